"""Whether the gradients of examples are autograd's own: a sampler may not know how a layer is used."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedcgd.opacus.clipped_sum import Rows, squares_of

_ROUNDING = 0.01, 0.001  # relative to the gradients for this parameter, and for all
_ROUNDING_OF_HALVES = 0.1, 0.05
_SMALLEST = torch.finfo(torch.float32).tiny  # smaller numbers have fewer digits
_HALVES = (torch.float16, torch.bfloat16)


class AutogradCheck:
    """Compares the sums of the examples' gradients with autograd's, in the first step in which there is something to compare."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], mean: bool) -> None:
        """`mean`: the loss of a backward pass is the mean of its rows'."""
        self._module, self._parameters, self._mean = module, parameters, mean
        self._gradients: dict[Any, list[Tensor]] = {}
        """Autograd's own, of each backward pass since the last step."""
        self.done = False

    def keep(self, parameter: Any, gradient: Tensor) -> None:
        """Note the `gradient` that a backward pass has made for `parameter`."""
        self._gradients.setdefault(parameter, []).append(gradient.detach().clone())

    def forget(self) -> None:
        """Gradients that were noted are of no use any more."""
        self._gradients = {}

    def compare(self, passes: Sequence[Sequence[Rows]]) -> None:
        """Raise RuntimeError unless the gradients of examples, of each backward pass, add up to those that were noted."""
        noted = [self._gradients.get(p, []) for p in self._parameters]
        self._gradients = {}
        count = len(passes[0])
        # There are earlier ones too where a pass was for something else.
        if not count or any(len(own) != len(noted[0]) for own in noted) or len(noted[0]) < count:
            return
        off, sizes = [], []
        halves = any(row.dtype in _HALVES for rows in passes for row in rows)
        for rows, gradients in zip(passes, noted, strict=True):
            total = -torch.stack([gradient.to_dense().reshape(-1).double() for gradient in gradients[-count:]]).sum(0)
            size = 0.0
            for row in rows:
                if len(row):
                    share = total.new_full((len(row),), 1 / len(row) if self._mean else 1.0)
                    if isinstance(
                        row, Tensor
                    ):  # to the digits that the gradients have: float64 would take copies of all rows
                        total += share.float() @ row.float()
                    else:
                        row.add_to(total, share)
                    size += float(share.dot(squares_of(row).sqrt()))
            off.append(float(total.norm()))
            sizes.append(size)
        odd = beyond_rounding(off, sizes, halves)
        if odd is not None:
            names = {p: name for name, p in self._module.named_parameters()}
            refuse_odd(names[self._parameters[i]] for i in odd)
            self.done = True


def beyond_rounding(off: Sequence[float], sizes: Sequence[float], halves: bool) -> list[int] | None:
    """Which of the errors `off` are more than rounding allows, relative to the gradients of this and of all parameters.

    `halves`: they were made in 16 bits. None if nothing can be compared, because a gradient is not finite, or all are zero.
    """
    if not _SMALLEST < sum(off) + sum(sizes) < math.inf:
        return None
    own, all_of_them = _ROUNDING_OF_HALVES if halves else _ROUNDING
    least = all_of_them * sum(sizes) + _SMALLEST
    return [i for i, (error, size) in enumerate(zip(off, sizes, strict=True)) if error > own * size + least]


def refuse_odd(names: Iterable[str]) -> None:
    """Raise RuntimeError if there are `names`, of parameters whose gradients of examples are not autograd's."""
    if odd := list(names):
        raise RuntimeError(
            f"the gradients of the examples are not those that autograd finds, for {odd[0]!r} and {len(odd) - 1} other "
            "parameters: they are used in a way that the layer's gradients do not cover, as a weight that another layer or a "
            "penalty in the loss takes by itself (weight_decay of the optimizer is private), tensors that a layer is given "
            "by keyword, or a hook that changes the gradient; or a sampler of your own (register_grad_sampler) does not return "
            "example i's gradient as row i. Call the layer for all that it does, or make it one module with a forward pass of "
            "one tensor, with grad_sample_mode='functorch'"
        )
