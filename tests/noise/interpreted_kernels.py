"""The GPU's kernels beside NumPy. test_noise_gpu.py runs this by pytest with TRITON_INTERPRET=1, read when Triton is imported."""

import numpy as np
import pytest
import torch

from fedcgd.clipping import gpu_code as clipping
from fedcgd.mechanisms import BSR, LambdaCGD
from fedcgd.noise import NoiseStream, gpu_code, tensors
from fedcgd.noise.quantisation import Lattice
from fedcgd.noise.stream import NUMPY, key_words, words_of
from fedcgd.noise.tensors import GpuKernels, TensorNormals
from fedcgd.release.run_noise import NoiseSource

KERNELS = GpuKernels(gpu_code.add_to_grid, gpu_code.add_values_to_grid, gpu_code.fill_normals, gpu_code.tile_hashes)
STREAM = NoiseStream(bytes(range(32)))
NONCE = 2**64 + 7
KEYS = [key_words(STREAM.key_of(round, NONCE)) for round in range(4)]
SMOOTHING = STREAM.key_of(3, NONCE)
CARRY = 2**32 * 12  # the coordinate at which the number of a block needs its upper 32 bits
WIDTH = 3e-4
RANDOM = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("start", "size"),
    [(CARRY - 700, 1000), (2**40 - 3, 3), (7, 0), (1535, 1), (2**31 - 5, 10)],  # the last: past what an int32 holds
)
def test_numbers_have_the_bits_of_numpy(start: int, size: int) -> None:
    found = torch.zeros(size)
    KERNELS.fill_normals(found, start, KEYS[0])
    expected = STREAM.normal(0, NONCE, start, start + size)
    np.testing.assert_array_equal(found.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize(
    ("start", "size", "weights"),
    [
        *((start, size, [1.3e6, -0.9e6]) for start, size in ((5, 1600), (CARRY - 700, 1000), (2**40 - 3, 3))),
        (100, 301, [1.0]),
        (100, 301, [0.3, -(2.0**40), 1e-9, 7.0]),
    ],
)
def test_sums_have_the_whole_numbers_of_numpy(start: int, size: int, weights: list[float]) -> None:
    found, expected = torch.arange(size), np.arange(size)
    KERNELS.add_to_grid(found, start, KEYS[: len(weights)], weights, KEYS[3], WIDTH)
    NUMPY.add_to_grid(expected, start, KEYS[: len(weights)], weights, KEYS[3], WIDTH)
    np.testing.assert_array_equal(found.numpy(), expected)
    assert np.abs(expected - np.arange(size)).max() >= 1


def test_noise_made_elsewhere_is_smoothed_and_rounded_as_by_numpy() -> None:
    row, found = RANDOM.normal(size=333).astype(np.float32), torch.arange(333)
    KERNELS.add_values_to_grid(found, 77, torch.from_numpy(row), 1.7e6, KEYS[3], WIDTH)
    words = words_of(SMOOTHING, 0, 1)[77 : 77 + 333]
    np.testing.assert_array_equal(found, np.arange(333) + np.rint(np.float64(row) * 1.7e6 + words * WIDTH))


def test_the_check_before_use_passes() -> None:
    assert tensors.same_bits(KERNELS, torch.device("cpu"))


@pytest.mark.parametrize(("size", "scale"), [(1, 1), (256, 1), (700, 1), (700, 2**11)])
def test_hashes_are_those_of_numpy(size: int, scale: int) -> None:
    numbers = np.rint(RANDOM.normal(size=size) * 2.0**50).astype(np.int64) * scale
    coefficients = RANDOM.integers(-(2**63), 2**63 - 1, (3, 256), dtype=np.int64)
    tiles = np.pad(numbers, (0, -size % 256)).reshape(-1, 1, 256)
    found = KERNELS.tile_hashes(torch.from_numpy(numbers), torch.from_numpy(coefficients))
    np.testing.assert_array_equal(found, (tiles * coefficients).sum(-1).reshape(-1))


def test_the_digest_of_a_sum_depends_on_every_number_and_on_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "gpu_kernels", lambda device: KERNELS)
    steps = torch.from_numpy(np.rint(RANDOM.normal(size=5000) * 2.0**40))
    other = steps + torch.eye(5000)[-1]
    one, changed = (tensors.sum_digest(each, bytes(32)) for each in (steps, other))
    assert (one != changed).tolist() == [False] * 8 + [True] * 4  # the last number is of the third tile
    assert (one != tensors.sum_digest(steps, bytes(31) + b"1")).all()


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((3, 1500), np.float32),
        ((3, 1500), np.float16),
        ((70, 1500), np.float32),  # more rows than the kernel takes at a time
        ((2, 9000), np.float32),  # longer than a program's stretch
        ((0, 1500), np.float32),
    ],
)
def test_norms_and_sums_of_clipped_rows_are_those_of_numpy(shape: tuple[int, int], kind: type) -> None:
    rows, factors = RANDOM.normal(size=shape).astype(kind), 1e6 * RANDOM.random(shape[0])
    if shape[0] == 70:
        rows[7, 1], factors[7] = np.nan, 0.0
    total = torch.arange(shape[1])
    clipping.accumulate(torch.from_numpy(rows), torch.from_numpy(factors), total)
    counted = factors > 0
    squares = clipping.squares(torch.from_numpy(rows)).numpy()[counted]
    np.testing.assert_allclose(squares, np.square(rows[counted], dtype=np.float64).sum(1), rtol=1e-13)
    terms = np.trunc(rows[counted].astype(np.float64) * factors[counted, None])
    np.testing.assert_array_equal(total, np.arange(shape[1]) + terms.sum(0))


def test_numbers_that_are_apart_in_memory_are_refused() -> None:
    numbers = torch.zeros(20, 2, dtype=torch.int64)[:, 0]
    with pytest.raises(ValueError, match="contiguous"):
        KERNELS.add_to_grid(numbers, 0, [], [], KEYS[3], 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        KERNELS.tile_hashes(numbers, torch.ones(1, 16, dtype=torch.int64))


@pytest.mark.parametrize(("mechanism", "mode"), [(LambdaCGD(0.8), "replay"), (BSR(3), "cpu-buffer")])
def test_a_run_can_move_between_devices(mechanism, mode, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kernels in (KERNELS, None):
        monkeypatch.setattr(tensors, "gpu_kernels", lambda device, kernels=kernels: kernels)
        source = NoiseSource(mechanism, 3, TensorNormals(STREAM, Lattice(2.0**-18)), mode)
        totals = torch.arange(401).repeat(2, 1)
        for t, total in enumerate(totals):
            source.add(total, [5, 0, 7][: t + 1], 3.0)
        found.append(totals)
    # What is combined in buffers is combined by torch there and by NumPy here: ends of float32 may differ.
    assert (found[0] - found[1]).abs().max() <= (0 if mode == "replay" else 2)
