"""A device's kernels, by NumPy: for tests of what uses them."""

import numpy as np
import torch

from fedcgd.noise import tensors
from fedcgd.noise.stream import NUMPY
from fedcgd.noise.tensors import GpuKernels


def numpy_kernels(*, wrong: bool = False) -> GpuKernels:
    """What a device's kernels do, by NumPy; `wrong` in the last bit of one number."""

    def fill_normals(out, start, key) -> None:
        z = np.empty(out.numel(), np.float32)
        NUMPY.fill_normals(z, start, key)
        out.copy_(torch.from_numpy(z))

    def add_to_grid(total, start, keys, weights, smoothing, width) -> None:
        NUMPY.add_to_grid(total.numpy(), start, keys, weights, smoothing, width)
        total[-1] += wrong

    def add_values_to_grid(total, start, values, scale, smoothing, width) -> None:
        noise = torch.zeros_like(total)
        add_to_grid(noise, start, [], [], smoothing, width)
        first, last = start // 1536, -(-(start + len(total)) // 1536)
        words = tensors.words_of(smoothing.astype("<u4").tobytes(), first, last)[start - first * 1536 :][: len(total)]
        total += torch.from_numpy(np.rint(values.double().numpy() * scale + width * words).astype(np.int64))

    def tile_hashes(numbers, coefficients):
        steps = numbers.to(torch.int64).numpy()
        tiles = np.pad(steps, (0, -len(steps) % coefficients.shape[1])).reshape(-1, 1, coefficients.shape[1])
        return torch.from_numpy((tiles * coefficients.numpy()).sum(-1).reshape(-1))

    return GpuKernels(add_to_grid, add_values_to_grid, fill_normals, tile_hashes)
