"""Machine code gives the bits that NumPy gives."""

import sys

import numpy as np
import pytest

from fedcgd.noise import NoiseStream, box_muller, for_each_chunk
from fedcgd.noise.box_muller import BYTES, Workspace
from fedcgd.noise.compiled import kernels
from fedcgd.noise.quantisation import Grid, add_noise
from fedcgd.noise.stream import TILE

STREAM = NoiseStream(bytes(range(32)))
TERMS = [(1, 7, 1.0), (0, 3, -0.9), (2, 0, 0.123456789)]


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch):
    """A function that takes Numba away."""

    def take_away() -> None:
        kernels.cache_clear()
        monkeypatch.setitem(sys.modules, "numba", None)
        assert kernels() is None

    yield take_away
    kernels.cache_clear()


def test_numba_is_there_for_these_tests() -> None:
    assert kernels() is not None


def noise() -> np.ndarray:
    out = np.empty(2 * TILE + 1001)

    def keep(begin: int, part: np.ndarray) -> None:
        out[begin - 17 : begin - 17 + len(part)] = part

    for_each_chunk(keep, STREAM, TERMS, 1.7, 17, 17 + len(out))
    return out


def test_noise_has_the_same_bits(without_numba) -> None:
    fast = noise()
    without_numba()
    np.testing.assert_array_equal(fast.view(np.int64), noise().view(np.int64))


@pytest.mark.parametrize("step", [2.0**-12, 2.0**-38])  # below the smoothing's width and far above
def test_sums_are_the_same(step: float, without_numba) -> None:
    sums = []
    for _ in range(2):
        total = np.arange(2 * TILE + 1001)
        add_noise(total, STREAM, TERMS, 2.5, Grid(step), start=99)
        sums.append(total)
        without_numba()
    np.testing.assert_array_equal(*sums)


def test_extreme_words_have_the_same_bits() -> None:
    """Every combination of the least, the largest and ordinary integers."""
    fast = kernels()
    assert fast is not None
    long = [0, 1, -1, 2, 3, 2**62, -(2**63), 2**63 - 1, 2**63 - 513, 123456789012345678, -(2**40)]
    short = [0, 1, -1, 2, 2**30, -(2**31), 2**31 - 1, -123456789]
    grid = np.array(np.meshgrid(long, long, short, short, short)).reshape(5, -1)
    columns = grid.shape[1]
    work = Workspace(columns)
    views = work.words(columns)
    k, v, a = views
    k[:], v[:], a[:] = grid[:2].ravel(), grid[2], grid[3:].ravel()
    kept = bytes(work.keystream[: BYTES * columns])
    total = np.empty(4 * columns)
    fast.weighted(k, v, a, 0.37, True, total)
    assert bytes(work.keystream[: BYTES * columns]) == kept
    radius, cosine, sine = work.polar(columns)
    expected = np.multiply(radius, np.stack([cosine, sine]), dtype=np.float64) * 0.37
    np.testing.assert_array_equal(total.view(np.int64), expected.ravel().view(np.int64))


def test_machine_code_that_differs_from_numpy_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a constant has changed, and Numba's cache on disk still holds the code with the old one."""
    kernels.cache_clear()
    monkeypatch.setattr(box_muller, "FRACTION", np.float32(2.0**-31 * (1 + 2.0**-20)))
    try:
        assert kernels() is None
    finally:
        kernels.cache_clear()
