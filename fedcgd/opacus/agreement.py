"""Whether the gradients of examples add up to autograd's own: whoever makes them may not know how a layer is used."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedcgd.opacus.clipping import Rows

_ROUNDING = 0.01, 0.001  # relative to the gradients for this parameter, and for all
_ROUNDING_OF_HALVES = 0.1, 0.05
_SMALLEST = torch.finfo(torch.float32).tiny  # smaller numbers have fewer digits
_HALVES = (torch.float16, torch.bfloat16)


def disagreeing(
    parameters: Sequence[nn.Parameter], passes: Sequence[Sequence[Rows]], whole: Sequence[Sequence[Tensor]], mean: bool
) -> list[nn.Parameter] | None:
    """The parameters for which the rows of all backward `passes` do not sum to the gradients that autograd found, `whole`.

    With `mean`, the loss of a pass is the mean of its rows'. Rounding is allowed for. None if nothing can be compared, because
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
    least = all_of_them * math.hypot(*sizes) + _SMALLEST
    return [p for p, error, size in zip(parameters, off, sizes, strict=True) if error > own * size + least]
