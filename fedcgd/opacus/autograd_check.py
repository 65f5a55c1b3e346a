"""Whether the gradients of examples add up to autograd's own: whoever makes them may not know how a layer is used."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedcgd.opacus.deferred import Finding
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
        self._findings: list[Finding] = []

    def keep(self, parameter: Any, gradient: Tensor) -> None:
        """Note the `gradient` that a backward pass has made for `parameter`."""
        if self._turn is None or parameter is self._parameters[self._turn]:
            self._gradients.setdefault(parameter, []).append(gradient.detach().clone())

    def forget(self) -> None:
        """Gradients that were noted are of no use any more."""
        self._gradients = {}

    def begin(self) -> None:
        """A round begins: what was found in another is of no use any more."""
        self.forget()
        self._findings = []

    def take_findings(self) -> list[Finding]:
        """What `compare` found since this was called last, or the round began."""
        findings, self._findings = self._findings, []
        return findings

    def compare(self, passes: Sequence[Sequence[PerSampleGradients]], scale: Tensor) -> None:
        """Find out whether the gradients of examples, of each backward pass, add up to those that were noted.

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
        own = [gradients[-count:] for gradients in noted]
        self._findings.append(self._finding(parameters, [passes[i] for i in turn], own, scale))
        if self._turn is not None:
            self._turn = (self._turn + 1) % len(self._parameters)

    def _finding(
        self,
        parameters: Sequence[nn.Parameter],
        passes: Sequence[Sequence[PerSampleGradients]],
        whole: Sequence[Sequence[Tensor]],
        scale: Tensor,
    ) -> Finding:
        """For each parameter how far the rows of all its `passes` are from summing to what autograd found, `whole`."""
        off, sizes, halves = [], [], False
        for parameter, rows, gradients in zip(parameters, passes, whole, strict=True):
            total = torch.zeros(parameter.numel(), dtype=torch.float64, device=parameter.device)
            size = total.new_zeros(())
            for row in rows:
                if row.examples:
                    share = total.new_full((row.examples,), 1 / row.examples if self._mean else 1.0)
                    row.add_to(total, share, None)
                    size = size + share.dot(row.norms(False).norm(dim=1))
                    halves |= getattr(row, "values", getattr(row, "b", total)).dtype in _HALVES
            for gradient in gradients:
                total -= gradient.to_dense().reshape(-1)
            off.append(total.norm())
            sizes.append(size)

        def judge(numbers: list[float]) -> None:
            count = len(parameters)
            odd = _odd(
                numbers[:count], numbers[count : 2 * count], numbers[-1], _ROUNDING_OF_HALVES if halves else _ROUNDING
            )
            if odd:
                self._refuse([parameters[i] for i in odd])
            if odd is not None and self._turn is None:
                self._turn = 0

        return Finding(torch.stack([*off, *sizes, scale]), judge)

    def _refuse(self, odd: Sequence[nn.Parameter]) -> None:
        names = [name for name, p in self._module.named_parameters() if any(p is one for one in odd)]
        raise RuntimeError(
            f"the gradients of the examples do not add up to the gradient of {names[0]!r} and {len(names) - 1} other "
            "parameters: they are used in a way that the layer's gradients do not cover, as a weight that another layer or a "
            "penalty in the loss takes by itself (weight_decay of the optimizer is private), tensors that a layer is given "
            "by keyword, or a hook that changes the gradient. Call the layer for all that it does, or make it one module "
            "with a forward pass of one tensor, with grad_sample_mode='functorch'"
        )


def _odd(off: Sequence[float], sizes: Sequence[float], scale: float, rounding: tuple[float, float]) -> list[int] | None:
    """Which of the errors `off` are more than rounding allows, relative to the gradients of all parameters and to `scale`.

    None if nothing can be compared, because a gradient is not finite, or all are zero.
    """
    if not _SMALLEST < sum(off) + sum(sizes) < math.inf:
        return None
    own, all_of_them = rounding
    least = all_of_them * max(math.hypot(*sizes), scale) + _SMALLEST
    return [i for i, (error, size) in enumerate(zip(off, sizes, strict=True)) if error > own * size + least]
