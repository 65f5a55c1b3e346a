"""Norms and the weighted sum of rows in main memory, each in one pass and in float64, by the machine code of `row_passes.c`.

A row is read once for its norm and once for the sum, and nothing is copied. Both use as many threads as torch does. On a GPU the
sum is Triton's (`gpu_code`).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcgd.native.library import array, checked, function, library

_FOR_THREADS = 2**22  # numbers, below which another thread costs more than it brings

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


class RowPasses(NamedTuple):
    """Both release the interpreter's lock."""

    squares: Callable[[Floats, Doubles], None]
    """(values, sums): sums[i] = Σ_j values[i, j]²."""
    add: Callable[[Floats, int, int, Doubles, Doubles], None]
    """(values, first, last, factors, total): total[j] += Σ_i factors[i]·values[i, j] for first ≤ j < last, row after row."""


def passes_for(values: Tensor) -> RowPasses | None:
    """What `norms` and `add_rows` need to work on `values`, shape (rows, columns); None where torch has to do it."""
    usable = values.device.type == "cpu" and values.dtype == torch.float32 and values.is_contiguous()
    return compiled() if usable else None


@cache
def gpu_add_rows(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """(total, values, factors): total += Σ_i factors[i]·values[i] on `device`; None on a CPU, and where Triton cannot do it."""
    if device.type == "cpu":
        return None
    try:
        from fedcgd.opacus.gpu_code import add_rows

        values = torch.sin(torch.arange(3 * 2077, device=device, dtype=torch.float32)).view(3, -1)
        factors = torch.tensor([0.1, 1e6, -0.7], dtype=torch.float64, device=device)
        total, expected = (torch.ones(2077, dtype=torch.float64, device=device) for _ in range(2))
        add_rows(total, values, factors)
        expected += torch.mv(values.double().T, factors)
        return add_rows if torch.allclose(total, expected, rtol=1e-12, atol=1e-9) else None
    except Exception:  # whatever a compiler can raise for a device that it does not know; `gpu_kernels` warns of it
        return None


def norms(passes: RowPasses, values: Tensor) -> Tensor:
    """L2 norm of each row, float64, shape (rows,): not finite where the row is not, and never too large for a float64."""
    rows, sums = values.numpy(), np.empty(len(values))
    if values.numel() < _FOR_THREADS:
        passes.squares(rows, sums)
        return torch.from_numpy(np.sqrt(sums))
    _in_parts(lambda first, last: passes.squares(rows[first:last], sums[first:last]), len(rows))
    return torch.from_numpy(np.sqrt(sums))


def add_rows(passes: RowPasses, total: Tensor, values: Tensor, factors: Tensor) -> None:
    """total += Σ_i factors[i]·values[i], in place; float64 `total` and `factors`. The same bits for any number of threads."""
    rows, weights, out = values.numpy(), factors.contiguous().numpy(), total.numpy()
    if values.numel() < _FOR_THREADS:
        passes.add(rows, 0, values.shape[1], weights, out)
        return
    _in_parts(lambda first, last: passes.add(rows, first, last, weights, out), values.shape[1])


def _in_parts(work: Callable[[int, int], None], size: int) -> None:
    threads = min(torch.get_num_threads(), size)
    if threads == 1:
        work(0, size)
        return
    ends = [size * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, ends[:-1], ends[1:]))


@cache
def compiled() -> RowPasses | None:
    """None where it was not built, or does not work or does not add up."""
    return checked(_load, _answer, _ANSWER)


def _load() -> RowPasses:
    code = library(Path(__file__).with_suffix(".c"))
    floats, doubles, size = array(np.float32), array(np.float64), c_int64
    squares = function(code, "squares", [floats, size, size, doubles])
    add = function(code, "add", [floats, size, size, size, size, doubles, doubles])
    return RowPasses(
        lambda values, sums: squares(values, *values.shape, sums),
        lambda values, first, last, factors, total: add(values, *values.shape, first, last, factors, total),
    )


_ANSWER = "f0e2daf18223a5bb9ddb50d313410d30868dd7e4fdef871905696d668025754a"


def _answer(made: RowPasses) -> bytes:
    """Sums of squares and the sum of seven rows, of which the first three numbers are left out."""
    rows, columns, first = 7, 2093, 3
    values = (np.arange(rows * columns) * 7919 % 10007 / 10007 - 0.4).astype(np.float32).reshape(rows, columns)
    sums, total = np.empty(rows), np.arange(columns, dtype=np.float64)
    made.squares(values, sums)
    made.add(values, first, columns, np.linspace(0.1, 1.0, rows), total)
    return sums.tobytes() + total.tobytes()
