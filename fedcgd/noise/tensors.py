"""Noise for sums that are torch tensors: made where they are by Triton (`gpu_code`), else in main memory; the same numbers."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcgd.noise.quantisation import (
    Lattice,
    add_noise,
    add_values,
    check_values,
    dither_key,
    dither_width,
    keyed_noise,
)
from fedcgd.noise.stream import COLUMNS, NUMPY, TILE, NoiseStream, Term, key_words, words_of

_HASHES, _HASHED = 4, 2048
_FEW_HASHES = 2**13  # 64 KiB, which the host hashes in the time of a kernel's launch


class GpuKernels(NamedTuple):
    """What runs on a device. All work on the coordinates from `start` on; totals are int64."""

    add_to_grid: Callable[..., None]
    """(total, start, keys, weights, dither, width), as in `stream.Kernels`."""
    add_values_to_grid: Callable[..., None]
    """(total, start, values, scale, dither, width): total += round(scale·values + width·words)."""
    fill_normals: Callable[..., None]
    """(out, start, key): out = Z, float32."""
    tile_hashes: Callable[..., Tensor]
    """(numbers, coefficients) → linear hashes of each tile, modulo 2⁶⁴; see `sum_digest`."""


class TensorNormals:
    """Z of `stream`; sums are int64 tensors on a device, in steps of `grid`.

    A sum's first number is of coordinate `start`. On a GPU the key of a round's noise, but never the run's own, is in the memory
    of the device while the noise is made. Where no kernel can make it there, it is made in main memory.
    """

    def __init__(self, stream: NoiseStream, grid: Lattice, start: int = 0) -> None:
        self.grid = grid
        self._stream, self._start = stream, start

    def add(self, total: Tensor, terms: Sequence[Term], stddev: float) -> None:
        gpu = gpu_kernels(total.device)
        if gpu is None:
            steps = total.cpu()
            add_noise(steps.numpy(), self._stream, terms, stddev, self.grid, start=self._start)
            total.copy_(steps)
            return
        keys, weights, dither = keyed_noise(self._stream, terms, stddev, self.grid)
        gpu.add_to_grid(total, self._start, keys, weights, dither, dither_width(stddev, self.grid))

    def add_row(self, total: Tensor, row: Tensor, newest: Term, stddev: float) -> None:
        gpu = gpu_kernels(total.device)
        if gpu is None:
            steps = total.cpu()
            add_values(steps.numpy(), row.cpu().numpy(), self._stream, newest, stddev, self.grid, start=self._start)
            total.copy_(steps)
            return
        check_values(row, total, stddev, self.grid)
        scale, width = stddev / self.grid.step, dither_width(stddev, self.grid)
        dither = dither_key(self._stream, newest)
        gpu.add_values_to_grid(total, self._start, row.to(total.device), scale, dither, width)

    def vector(self, total: Tensor, round: int, nonce: int) -> Tensor:
        gpu, stop = gpu_kernels(total.device), self._start + total.numel()
        if gpu is None:
            return torch.from_numpy(self._stream.normal(round, nonce, self._start, stop)).to(total.device)
        made = torch.empty(total.numel(), dtype=torch.float32, device=total.device)
        gpu.fill_normals(made, self._start, key_words(self._stream.key_of(round, nonce)))
        return made

    def digest(self, total: Tensor, key: bytes) -> NDArray[Any]:
        return sum_digest(total, key)


@cache
def gpu_kernels(device: torch.device) -> GpuKernels | None:
    """What makes noise on `device`; None on a CPU, and, with a warning, where Triton is missing or gives other bits."""
    if device.type == "cpu":
        return None
    try:
        from fedcgd.noise import gpu_code

        kernels = GpuKernels(
            gpu_code.add_to_grid, gpu_code.add_values_to_grid, gpu_code.fill_normals, gpu_code.tile_hashes
        )
        reason = "" if same_bits(kernels, device) else "Triton gives other bits there than NumPy"
    except Exception as error:  # whatever a compiler can raise for a device that it does not know
        reason = f"Triton does not work there ({type(error).__name__}: {error})"
    if not reason:
        return kernels
    warnings.warn(
        f"noise for sums on {device} is made in main memory and copied, the same numbers more slowly: {reason}; "
        "pip install 'fedcgd[gpu]'",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def same_bits(kernels: GpuKernels, device: torch.device) -> bool:
    """Whether some thousand numbers that `kernels` make on `device` are those of NumPy."""
    stream = NoiseStream(hashlib.shake_256(b"numbers to compare").digest(32))
    keys = np.stack([key_words(stream.key_of(i, 0)) for i in range(3)])
    weights = np.array([-0.9, 1e6])
    first, last = 2**32 // COLUMNS - 1, 2**32 // COLUMNS + 1
    start, size, width = first * TILE + 5, (last - first) * TILE - 9, 1e-6
    total = torch.zeros(size, dtype=torch.int64, device=device)
    z = torch.empty(size, dtype=torch.float32, device=device)
    kernels.fill_normals(z, start, keys[0])
    kernels.add_to_grid(total, start, keys[:2], weights, keys[2], width)
    kernels.add_values_to_grid(total, start, z, 1.7e5, keys[2], width)

    normal, expected = np.empty(size, np.float32), np.zeros(size, np.int64)
    NUMPY.fill_normals(normal, start, keys[0])
    NUMPY.add_to_grid(expected, start, keys[:2], weights, keys[2], width)
    words = words_of(stream.key_of(2, 0), first, last)[5:-4]
    expected += np.rint(np.float64(normal) * 1.7e5 + width * words).astype(np.int64)
    hashes = kernels.tile_hashes(total, _coefficients(bytes(32), device))
    coefficients = _coefficients(bytes(32), torch.device("cpu")).numpy()
    tiles = np.pad(expected, (0, -size % coefficients.shape[1])).reshape(-1, 1, coefficients.shape[1])
    expected_hashes = (tiles * coefficients).sum(-1).reshape(-1)
    return (
        z.cpu().numpy().tobytes() == normal.tobytes()
        and np.array_equal(total.cpu().numpy(), expected)
        and np.array_equal(hashes.cpu().numpy(), expected_hashes)
    )


def sum_digest(steps: Tensor, key: bytes) -> NDArray[Any]:
    """What tells `steps`, whole numbers, from others: themselves without kernels for their device, else some thousand hashes.

    Hashes are linear, modulo 2⁶⁴, four for each tile of 2048 numbers, with coefficients from `key`; and of these again, with
    other coefficients, while they are many. Other steps have other hashes but for a chance of 2⁻¹²⁸ in each of few passes, if
    2³² does not divide all that differs: a difference δ that 2ᵛ divides has none in one of four hashes with chance 2⁻⁽⁶⁴⁻ᵛ⁾.
    """
    gpu = gpu_kernels(steps.device)
    if gpu is None:
        return steps.cpu().numpy()
    hashes = steps
    while hashes is steps or len(hashes) > _FEW_HASHES:
        key = hashlib.sha256(b"fedcgd fingerprint" + key).digest()
        hashes = gpu.tile_hashes(hashes, _coefficients(key, steps.device))
    return hashes.cpu().numpy()


@lru_cache(maxsize=4)
def _coefficients(key: bytes, device: torch.device) -> Tensor:
    """Uniform int64, shape (4, 2048), on `device`."""
    numbers = np.frombuffer(hashlib.shake_256(key).digest(8 * _HASHES * _HASHED), "<i8").astype(np.int64)
    return torch.from_numpy(numbers.reshape(_HASHES, _HASHED)).to(device)
