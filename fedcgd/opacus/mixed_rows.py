"""Whether a program has mixed the rows of a batch before the model sees them, as mixup does: a·x_i + b·x_j in the place of x_i.

The rows that the loader has given tell which rows a mixture is of, if they are linearly independent. What makes a row of one
example (noise, normalisation, crops, another device) leaves their span, or is a multiple of that row.
"""

from typing import Any

import torch
from torch import Tensor

from fedcgd.opacus.probing import tensors_of

_COLUMNS = 4096
_MOST_ROWS = 512
_ROUNDING = 1e-5  # of the norm of a row in float32
_SMALLEST = 1e-3  # a part of another row


def rows_are_mixed(given: Any, delivered: Any) -> bool:
    """Whether more than half of the rows of an input in `given` are of two rows of `delivered`, the loader's batch, each.

    False too where that cannot be told: for rows in half precision, more than 512, or as many as half the numbers in one; where
    three are mixed, or parts cut out; and where something else was done to the rows after that.
    """
    return any(
        made.dtype in (torch.float32, torch.float64) and made.shape == rows.shape and _mixed(made, rows)
        for made in tensors_of(given)
        for rows in tensors_of(delivered)
        if rows.dim() > 1 and 2 <= len(rows) <= _MOST_ROWS
    )


def _mixed(made: Tensor, rows: Tensor) -> bool:
    flat, own = (t.detach().cpu().double().flatten(1) for t in (made, rows))
    step = -(-own.shape[1] // _COLUMNS)
    flat, own = flat[:, ::step], own[:, ::step]
    if own.shape[1] < 2 * len(own) or torch.equal(flat, own):
        return False
    lengths = own.norm(dim=1, keepdim=True)
    units = own / lengths
    factor, failed = torch.linalg.cholesky_ex(units @ units.T)
    if failed or not bool((factor.diagonal() > 10 * _ROUNDING).all()):  # some rows are combinations of others
        return False
    shares = torch.cholesky_solve(units @ flat.T, factor).T
    inside = (flat - shares @ units).norm(dim=1) <= _ROUNDING * flat.norm(dim=1)
    parts = (shares / lengths.T).abs() > _SMALLEST
    few = bool((parts.sum(0) <= 2).all()) and bool((parts.sum(1) <= 2).all())
    return bool(inside.all()) and few and 2 * int((parts.sum(1) == 2).sum()) > len(parts)
