"""The weighted sum of rows on a GPU (Triton): each row is read once, in its own precision, and added in float64.

torch would copy the rows to float64 first, five times the traffic. Importing this file needs Triton; `clipped_sum.gpu_add_rows`
says whether it can be used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128
_ROWS = 32
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # each operation rounded by itself


@triton.jit(do_not_specialize=["rows", "columns"])
def _add_rows(total, values, factors, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < columns
    added = tl.zeros([ROWS, BLOCK], tl.float64)
    for first in range(
        0, rows, ROWS
    ):  # many rows at a time, else a short parameter waits for memory once for each of them
        row = first + tl.arange(0, ROWS).to(tl.int64)  # the rows together may have more than 2³¹ numbers
        factor = tl.load(factors + row, mask=row < rows, other=0.0)
        place = row[:, None] * columns + at[None, :]
        value = tl.load(values + place, mask=(row < rows)[:, None] & there[None, :], other=0.0)
        added += factor[:, None] * value.to(tl.float64)
    tl.store(total + at, tl.load(total + at, mask=there, other=0.0) + tl.sum(added, axis=0), mask=there)


def add_rows(total: Tensor, values: Tensor, factors: Tensor) -> None:
    """total += Σ_i factors[i]·values[i], in place; float64 `total` and `factors`, and all of them contiguous."""
    rows, columns = values.shape
    if not (total.is_contiguous() and values.is_contiguous() and factors.is_contiguous()):
        raise ValueError("the rows, their factors and the total must be contiguous")
    if not rows or not columns:
        return
    with torch.cuda.device_of(total):  # Triton launches on the current device, wherever the tensors are
        _add_rows[(-(-columns // _BLOCK),)](total, values, factors, rows, columns, _ROWS, _BLOCK, **OPTIONS)
