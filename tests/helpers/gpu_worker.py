"""Run by test_noise_gpu.py with TRITON_INTERPRET=1: answers questions with the GPU's kernels."""

import pickle
import sys

import numpy as np
import torch

from fedcgd.clipping import gpu_code as clipping
from fedcgd.noise import gpu_code, tensors
from fedcgd.noise.quantisation import Lattice
from fedcgd.noise.stream import NoiseStream
from fedcgd.noise.tensors import GpuKernels, TensorNormals
from fedcgd.release.run_noise import NoiseSource

KERNELS = GpuKernels(gpu_code.add_to_grid, gpu_code.add_values_to_grid, gpu_code.fill_normals, gpu_code.tile_hashes)


def normal(key: bytes, start: int, size: int) -> np.ndarray:
    out = torch.zeros(size)
    KERNELS.fill_normals(out, start, np.frombuffer(key, "<u4"))
    return out.numpy()


def noise(start: int, size: int, keys: list[bytes], weights: list[float], smoothing: bytes, width: float) -> np.ndarray:
    total = torch.arange(size)
    words = [np.frombuffer(key, "<u4") for key in (*keys, smoothing)]
    KERNELS.add_to_grid(total, start, words[:-1], weights, words[-1], width)
    return total.numpy()


def values(start: int, values: np.ndarray, scale: float, smoothing: bytes, width: float) -> np.ndarray:
    total = torch.arange(len(values))
    words = np.frombuffer(smoothing, "<u4")
    KERNELS.add_values_to_grid(total, start, torch.from_numpy(values), scale, words, width)
    return total.numpy()


def hashes(numbers: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    return KERNELS.tile_hashes(torch.from_numpy(numbers), torch.from_numpy(coefficients)).numpy()


def sum_digest(steps: np.ndarray, key: bytes) -> np.ndarray:
    tensors.gpu_kernels = lambda device: KERNELS  # type: ignore[assignment]
    return tensors.sum_digest(torch.from_numpy(steps), key)


def clipped(rows: np.ndarray, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The squares of the rows, and their sum on whole numbers."""
    total, values = torch.arange(rows.shape[1]), torch.from_numpy(rows)
    clipping.accumulate(values, torch.from_numpy(factors), total)
    return clipping.squares(values).numpy(), total.numpy()


def apart(what: str) -> str:
    """What is said of numbers that are apart in memory."""
    numbers = torch.zeros(20, 2, dtype=torch.int64)[:, 0]
    try:
        if what == "noise":
            KERNELS.add_to_grid(numbers, 0, [], [], np.zeros(8, np.uint32), 1.0)
        else:
            KERNELS.tile_hashes(numbers, torch.ones(1, 16, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return ""


def same_bits() -> bool:
    return tensors.same_bits(KERNELS, torch.device("cpu"))


def rounds(mechanism: object, mode: str, stddev: float, size: int) -> list[np.ndarray]:
    """The sums of two rounds, beginning with whole numbers, as the Opacus engine has them."""
    tensors.gpu_kernels = lambda device: KERNELS  # type: ignore[assignment]
    source = NoiseSource(mechanism, 3, TensorNormals(NoiseStream(bytes(range(32))), Lattice(2.0**-18)), mode)  # type: ignore[arg-type]
    totals = [torch.arange(size) for _ in range(2)]
    for t, total in enumerate(totals):
        source.add(total, [5, 0, 7][: t + 1], stddev)
    return [total.numpy() for total in totals]


def main() -> None:
    questions = pickle.load(sys.stdin.buffer)
    answers = [globals()[name](*arguments) for name, *arguments in questions]
    pickle.dump(answers, sys.stdout.buffer)


if __name__ == "__main__":
    main()
