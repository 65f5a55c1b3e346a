"""The weighted sum of rows on a GPU (Triton): each row is read once, in its own precision, and added in float64.

What `row_passes.c` does in main memory. torch would copy the rows to float64 first, five times the traffic. Importing this file
needs Triton; `row_passes.gpu_add_rows` says whether it can be used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # each operation rounded by itself, as in `row_passes.c`


@triton.jit(do_not_specialize=["rows", "columns"])
def _add_rows(total, values, factors, rows, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < columns
    added = tl.load(total + at, mask=there, other=0.0)
    row = values + at
    for i in range(rows):
        added += tl.load(factors + i) * tl.load(row, mask=there, other=0.0).to(tl.float64)
        row += columns  # a pointer: the rows together may have more than 2³¹ numbers
    tl.store(total + at, added, mask=there)


def add_rows(total: Tensor, values: Tensor, factors: Tensor) -> None:
    """total += Σ_i factors[i]·values[i], in place; float64 `total` and `factors`, and all of them contiguous."""
    rows, columns = values.shape
    if not (total.is_contiguous() and values.is_contiguous() and factors.is_contiguous()):
        raise ValueError("the rows, their factors and the total must be contiguous")
    if not rows or not columns:
        return
    with torch.cuda.device_of(total):  # Triton launches on the current device, wherever the tensors are
        _add_rows[(-(-columns // _BLOCK),)](total, values, factors, rows, columns, _BLOCK, **OPTIONS)
