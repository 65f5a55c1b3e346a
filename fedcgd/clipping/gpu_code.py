"""Norms of rows and the sum of clipped rows on a GPU (Triton): a number is read once for each, in its own precision.

What `squares` and `accumulate` of `fedcgd.native.vector_kernels` do in main memory. Sums are of whole numbers, so that they are
the same in whatever order programs add to them. Importing this file needs Triton; `per_sample_gradients` says whether it is used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _STRETCH = 512, 8192  # numbers of a row, at once and in one program
_ROWS, _GROUP = 8, 64  # rows, at once and in one program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # each operation rounded by itself, as in `vector_kernels.c`


@triton.jit(do_not_specialize=["columns"])
def _squares(rows, out, columns, STRETCH: tl.constexpr, BLOCK: tl.constexpr):
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    added = tl.zeros([BLOCK], tl.float64)
    for first in range(0, STRETCH, BLOCK):
        at = stretch * STRETCH + first + tl.arange(0, BLOCK)
        x = tl.load(rows + row * columns + at, mask=at < columns, other=0.0).to(tl.float64)
        added += x * x
    tl.store(out + row * tl.num_programs(1) + stretch, tl.sum(added))


@triton.jit(do_not_specialize=["count", "columns"])
def _accumulate(total, rows, factors, count, columns, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < columns
    added = tl.zeros([ROWS, BLOCK], tl.int64)
    for first in range(0, GROUP, ROWS):
        row = tl.program_id(1).to(tl.int64) * GROUP + first + tl.arange(0, ROWS)
        factor = tl.load(factors + row, mask=row < count, other=0.0)
        read = (factor > 0)[:, None] & there[None, :]
        value = tl.load(rows + row[:, None] * columns + at[None, :], mask=read, other=0.0)
        added += (value.to(tl.float64) * factor[:, None]).to(tl.int64)
    tl.atomic_add(total + at, tl.sum(added, axis=0), mask=there)


def squares(rows: Tensor) -> Tensor:
    """Σ_j rows[i, j]² of each row, float64."""
    rows = rows.contiguous()
    stretches = -(-rows.shape[1] // _STRETCH)
    out = torch.zeros(len(rows), stretches, dtype=torch.float64, device=rows.device)
    if out.numel():
        with torch.cuda.device_of(rows):  # Triton launches on the current device, wherever the tensors are
            _squares[(len(rows), stretches)](rows, out, rows.shape[1], _STRETCH, _BLOCK, **OPTIONS)
    return out.sum(dim=1)


def accumulate(rows: Tensor, factors: Tensor, total: Tensor) -> None:
    """total += Σ_i rows[i]·factors[i], each number rounded towards zero to an int64; rows whose factor is 0 are not read."""
    rows, (count, columns) = rows.contiguous(), rows.shape
    if count and columns:
        grid = (-(-columns // _BLOCK), -(-count // _GROUP))
        with torch.cuda.device_of(rows):
            _accumulate[grid](total, rows, factors, count, columns, _GROUP, _ROWS, _BLOCK, **OPTIONS)
