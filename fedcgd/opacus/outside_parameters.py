"""Whether what a private model is given comes from parameters that are trained outside of it, by gradients that nobody clips."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedcgd.opacus.probing import tensors_of


@torch.compiler.disable  # type: ignore[untyped-decorator]
def refuse_outside_parameters(_called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook, with keywords, of a private model: raises RuntimeError if its inputs lead back to others' parameters.

    A backward pass would leave there the sum of the examples' gradients, unclipped and without noise. What is no `nn.Parameter`
    (an input that is attacked) may need gradients, and so may parameters that are private, of this model or of another one.
    """
    if not torch.is_grad_enabled():
        return
    for leaf in _leaves([t for t in tensors_of((args, kwargs)) if t.requires_grad]):
        if isinstance(leaf, nn.Parameter) and not hasattr(leaf, "grad_sample"):
            raise RuntimeError(
                f"the input of the private module is made with a parameter outside of it, of shape {tuple(leaf.shape)}, and it "
                "needs gradients: these would be plain sums over the batch, not clipped and without noise. Put all that is "
                "trained into one module, and give that to make_private; or freeze what stands before it "
                "(requires_grad_(False)), or call it under torch.no_grad()"
            )


def _leaves(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors without history that `tensors` were made with, as autograd has it."""
    yield from (t for t in tensors if t.grad_fn is None)
    left = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if hasattr(node, "variable"):  # of AccumulateGrad
            yield node.variable
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                left.append(before)
