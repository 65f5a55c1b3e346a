"""What is looked at when the model is called with a round's batch, before it is trained on: most of it in the first batches."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fedcgd.opacus.accountant import RunAccountant
from fedcgd.opacus.batches import RoundLoader
from fedcgd.opacus.independence import (
    CrossExampleLeakError,
    IndependenceProbe,
    check_collation,
    same_random_numbers,
    tensors_of,
)
from fedcgd.opacus.rounds import PrivateRun

_AGAIN, _EXAMPLES = 10, 64


class FirstBatches:
    """Probes the 1st, 10th, 100th, … batch in which something can be seen, as `check_independence` does, when it is used.

    What is found is an error, unless the run's author has answered for it (`RunAccountant.assumed_independent`).

    Args:
        run: whose model is called.
        accountant: of the run.
        loader: whose `collate_fn` keeps a batch.
    """

    def __init__(self, run: PrivateRun, accountant: RunAccountant, loader: RoundLoader) -> None:
        self._module, self._loader, self._rounds = run.module, loader, accountant.rounds
        self._accountant: RunAccountant | None = accountant
        self._dim, self._copies, self._mode = (
            int(not run.gradients.batch_first),
            run.gradients.copies,
            run.gradients.mode,
        )
        self._batches, self._next, self._collation_seen = 0, 1, False

    def __getstate__(self) -> dict[str, Any]:
        return {"_accountant": None}  # a copy of the model is no loader's

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else all probes are compiled, for many times the time of the steps
    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook."""
        accountant = self._accountant
        if accountant is None or not torch.is_grad_enabled() or not self._rounds.issued():
            return
        _refuse_outside_parameters((args, kwargs))
        layers = (layer for layer in self._module.modules() if layer.training)  # the module itself may be in eval mode
        if not any(hasattr(p, "grad_sample") for layer in layers for p in layer.parameters(recurse=False)):
            return
        self._batches += 1
        try:
            _refuse_count_of_batch(kwargs)
            if self._batches >= self._next:
                self._probe((args, kwargs))
        except CrossExampleLeakError as found:
            if accountant.assumed_independent is None:
                raise CrossExampleLeakError(
                    f"{found}. If this is no leak, say why in make_private(assume_independent=…), which is recorded with the run"
                ) from found
            warnings.warn(f"assumed to be no leak ({accountant.assumed_independent}): {found}", stacklevel=2)
        self._rounds.pending.called = True

    def _probe(self, given: Any) -> None:
        if not self._collation_seen:
            self._collation_seen = True
            self._check_collation(given)
        out = self._rounds.issued() * self._copies  # the first tensor may be no batch
        sizes = [t.shape[self._dim] for t in tensors_of(given) if t.dim() > self._dim]
        if not sizes:
            raise CrossExampleLeakError(
                "whether examples act on each other cannot be told: the module is given no tensor with a row for each example, "
                "but texts, a packed sequence or a mapping that is no dict, say. Give it tensors, as in module(**batch), and pad "
                "or pack in its forward pass"
            )
        rows = out if out in sizes else max(sizes[:1], default=0)
        if rows < 1:
            self._batches -= 1
            return
        probe = IndependenceProbe(
            self._module, _call, given, batch_dim=self._dim, copies=self._copies, mode=self._mode, rows=rows
        )
        if rows > self._copies and not probe.tells and self._next > 1:
            return
        probe.check()
        if rows == self._copies or probe.tells:
            self._next *= _AGAIN

    def _check_collation(self, given: Any) -> None:
        batch, collate = self._loader.collate_fn.take_latest(), self._loader.collate_fn.wrapped_collator_fn
        if batch is None or self._dim != 0:
            return
        arguments, dataset = _as_called(given, batch), self._loader.dataset
        call = None if arguments is None else lambda module, other: _call(module, arguments(other))
        with same_random_numbers(()):
            size: int = len(dataset)  # type: ignore[arg-type]
            examples = [dataset[i] for i in range(0, size, -(-size // _EXAMPLES))]
        examples = [rows[0] for rows in examples] if self._copies > 1 else examples
        check_collation(collate, examples, call, self._module)


def _call(module: nn.Module, given: Any) -> Any:
    args, kwargs = given
    return module(*args, **kwargs)


def _as_called(given: Any, batch: Any) -> Callable[[Any], Any] | None:
    """(another batch → the arguments that the program would call the model with), from those for `batch`; None if not known.

    `given` are (args, kwargs) of a call; each tensor of more than one number in it must be one of `batch`, wherever it lies.
    """
    leaves, spec = tree_flatten(given)
    own = tensors_of(batch)
    places: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            found = [j for j, part in enumerate(own) if part.shape == leaf.shape and torch.equal(part.to(leaf), leaf)]
            if not found:
                return None
            places[i] = found[0]

    def arguments(other: Any) -> Any:
        parts = tensors_of(other)
        changed = [parts[places[i]].to(leaf) if i in places else leaf for i, leaf in enumerate(leaves)]
        return tree_unflatten(changed, spec)

    return arguments


def _refuse_outside_parameters(given: Any) -> None:
    """Raise RuntimeError if what the model is given for a round's batch leads back to parameters of others.

    A backward pass would leave there the sum of the examples' gradients, unclipped and without noise. What is no `nn.Parameter`
    (an input that is attacked) may need gradients, and so may parameters that are private, of this model or of another one.
    Between a step and the next batch a generator may be trained through the model: it has no example in hand.
    """
    needing = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad]
    for leaf in _leaves(needing) if needing else ():
        if isinstance(leaf, nn.Parameter) and not hasattr(leaf, "grad_sample"):
            raise RuntimeError(
                f"the input of the private module is made with a parameter outside of it, of shape {tuple(leaf.shape)}, and it "
                "needs gradients: these would be plain sums over the batch, not clipped and without noise. Put all that is "
                "trained into one module, and give that to make_private; or freeze what stands before it "
                "(requires_grad_(False)), or call it under torch.no_grad(). The generator of a GAN is trained after the step of "
                "the private discriminator, before the next batch is taken; until then give the discriminator fake.detach()"
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


def _refuse_count_of_batch(by_keyword: dict[str, Any]) -> None:
    """Raise for a loss inside the model that is divided by what Transformers' Trainer counted in all examples together."""
    if by_keyword.get("num_items_in_batch") is not None and by_keyword.get("labels") is not None:
        raise CrossExampleLeakError(
            "the model's loss is divided by num_items_in_batch, the tokens of all examples of the batch: a longer example makes "
            "the gradients of the others smaller, before they are clipped. Give the Trainer "
            "compute_loss_func=fedcgd.opacus.sequence_loss, or another mean of one loss per example"
        )
