"""Whether the gradients of examples add up to autograd's own: whoever makes them may not know how a layer is used."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedcgd.opacus.gradient_forms import PerSampleGradients

_ROUNDING = 0.01, 0.001  # relative to the gradients for this parameter, and for all
_ROUNDING_OF_HALVES = 0.1, 0.05
_SMALLEST = torch.finfo(torch.float32).tiny  # smaller numbers have fewer digits
_HALVES = (torch.float16, torch.bfloat16)


class AutogradCheck:
    """Compares the gradients of examples with autograd's: for all parameters at first, and then for one in each step, in turn.

    So what begins later (a penalty on weights in the loss, which no example has) is refused too, when its turn comes.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], mean: bool) -> None:
        """`mean`: the loss of a backward pass is the mean of its rows'."""
        self._module, self._parameters, self._mean = module, parameters, mean
        self._gradients: dict[Any, list[Tensor]] = {}
        """Autograd's own, of each backward pass since the last step."""
        self._turn: int | None = None
        """Whose gradients are compared in this step; None is all, until some were."""

    def keep(self, parameter: Any) -> None:
        """Note the gradient that a backward pass has left in `parameter`."""
        if self._turn is None or parameter is self._parameters[self._turn]:
            self._gradients.setdefault(parameter, []).append(parameter.grad.detach().clone())

    def forget(self) -> None:
        """Whatever was noted is of no use any more."""
        self._gradients = {}

    def check(self, passes: Sequence[Sequence[PerSampleGradients]], scale: float) -> None:
        """Raise RuntimeError unless the gradients of examples, of each backward pass, add up to those that were noted.

        `scale` is the mean norm of the examples' gradients: a parameter that has none to speak of may have some of its rounding.
        """
        turn = range(len(self._parameters)) if self._turn is None else [self._turn]
        noted = [self._gradients.get(self._parameters[i], []) for i in turn]
        self._gradients = {}
        count = len(passes[0])
        # There are none with expanded weights, and earlier ones too where a pass was for something else.
        if not count or any(len(own) != len(noted[0]) for own in noted) or len(noted[0]) < count:
            return
        parameters = [self._parameters[i] for i in turn]
        odd = grad_sample_mismatches(
            parameters, [passes[i] for i in turn], [own[-count:] for own in noted], self._mean, scale
        )
        if odd:
            names = [name for name, p in self._module.named_parameters() if any(p is one for one in odd)]
            raise RuntimeError(
                f"the gradients of the examples do not add up to the gradient of {names[0]!r} and {len(names) - 1} other "
                "parameters: they are used in a way that the layer's gradients do not cover, as a weight that another layer or a "
                "penalty in the loss takes by itself (weight_decay of the optimizer is private), tensors that a layer is given "
                "by keyword, or a hook that changes the gradient. Call the layer for all that it does, or make it one module "
                "with a forward pass of one tensor, with grad_sample_mode='functorch'"
            )
        if odd is not None or self._turn is not None:
            self._turn = 0 if self._turn is None else (self._turn + 1) % len(self._parameters)


def grad_sample_mismatches(
    parameters: Sequence[nn.Parameter],
    passes: Sequence[Sequence[PerSampleGradients]],
    whole: Sequence[Sequence[Tensor]],
    mean: bool,
    scale: float,
) -> list[nn.Parameter] | None:
    """The parameters for which the rows of all backward `passes` do not sum to the gradients that autograd found, `whole`.

    With `mean`, the loss of a pass is the mean of its rows'. Rounding is allowed for, relative to gradients and `scale`. None if
    nothing can be compared, because
    a gradient is not finite, or all are zero.
    """
    off, sizes, halves = [], [], False
    for parameter, rows, gradients in zip(parameters, passes, whole, strict=True):
        total = torch.zeros(parameter.numel(), dtype=torch.float64, device=parameter.device)
        size = 0.0
        for row in rows:
            if row.examples:
                share = torch.full(
                    (row.examples,), 1 / row.examples if mean else 1.0, dtype=total.dtype, device=total.device
                )
                row.add_to(total, share, None)
                size += float((share * row.norms(False).norm(dim=1)).sum())
                halves |= getattr(row, "values", getattr(row, "b", total)).dtype in _HALVES
        for gradient in gradients:
            total -= gradient.to_dense().reshape(-1).double()
        off.append(float(total.norm()))
        sizes.append(size)
    if not _SMALLEST < sum(off) + sum(sizes) < math.inf:
        return None
    own, all_of_them = _ROUNDING_OF_HALVES if halves else _ROUNDING
    least = all_of_them * max(math.hypot(*sizes), scale) + _SMALLEST
    return [p for p, error, size in zip(parameters, off, sizes, strict=True) if error > own * size + least]
