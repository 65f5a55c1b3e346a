"""Machine code gives the bits that NumPy gives."""

import re
from ctypes import c_double
from pathlib import Path

import numpy as np
import pytest

from fedcgd.native.library import array, function, library
from fedcgd.noise import NoiseStream, box_muller, compiled, correlated_noise
from fedcgd.noise.compiled import WORTHWHILE, kernels, kernels_for
from fedcgd.noise.correlated import add_rounded
from fedcgd.noise.quantisation import Lattice, add_noise
from fedcgd.noise.stream import COLUMNS, key_words

STREAM = NoiseStream(bytes(range(32)))
TERMS = [(1, 7, 1.0), (0, 3, -0.9), (2, 0, 0.123456789)]
SIZE = WORTHWHILE + 1001
STARTS = [17, 2**32 * 12 - 70_001]  # across the number 2³² of a block, too


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch):
    """A function that takes the compiler away, and what it has made."""

    def no_library(*_: object) -> None:
        raise OSError("it was not built")

    def take_away() -> None:
        kernels.cache_clear()
        monkeypatch.setattr(compiled, "library", no_library)
        assert kernels() is None

    yield take_away
    kernels.cache_clear()


def test_a_compiler_is_there_for_these_tests() -> None:
    assert kernels_for(SIZE) is not None
    assert kernels_for(WORTHWHILE - 1) is None


@pytest.mark.parametrize("start", STARTS)
def test_noise_has_the_same_bits(start: int, without_compiler) -> None:
    fast = STREAM.normal(7, 5, start, start + SIZE)
    without_compiler()
    slow = STREAM.normal(7, 5, start, start + SIZE)
    np.testing.assert_array_equal(fast.view(np.int32), slow.view(np.int32))
    np.testing.assert_array_equal(
        slow, correlated_noise(STREAM, [(7, 5, 1.0)], 1.0, start, start + SIZE).astype(np.float32)
    )


@pytest.mark.parametrize("step", [2.0**-12, 2.0**-38])  # below the smoothing's width and far above
@pytest.mark.parametrize("start", STARTS)
def test_sums_are_the_same(step: float, start: int, without_compiler) -> None:
    sums = []
    for _ in range(2):
        total = np.arange(SIZE)
        add_noise(total, STREAM, TERMS, 2.5, Lattice(step), start=start)
        sums.append(total)
        without_compiler()
    np.testing.assert_array_equal(*sums)


def test_extreme_words_have_the_same_bits() -> None:
    """Combinations of the least, the largest and ordinary integers."""
    code = library(Path(compiled.__file__).with_name("normals.c"))
    add = function(code, "add_normals", [array(np.int32, 16, 128), c_double, array(np.float64, 12, 128)])
    edges = np.array([0, 1, -1, 2, 2**30, -(2**31), 2**31 - 1, -123456789], np.int32)
    generator = np.random.default_rng(0)
    for _ in range(200):
        words = edges[generator.integers(0, len(edges), (16, 128))]
        fast, slow = np.zeros((12, 128)), np.zeros((12, 128))
        add(words, 0.37, fast)
        box_muller.add_normals(words, 0.37, slow)
        np.testing.assert_array_equal(fast.view(np.int64), slow.view(np.int64))


def test_ties_are_rounded_to_even_by_both() -> None:
    """Where the noise is a multiple of a half: no term, and a width of one half."""
    fast = kernels()
    assert fast is not None
    key = bytes(range(32))
    found, expected = np.zeros(5000, np.int64), np.zeros(5000, np.int64)
    fast.add_to_grid(found, 3, np.zeros((0, 8), np.uint32), np.zeros(0), key_words(key), 0.5)
    add_rounded(expected, 3, [], key, 0.5)
    np.testing.assert_array_equal(found, expected)
    assert (found % 2 == 0).mean() > 0.6  # of all a quarter were ties


def test_the_constants_in_c_are_those_of_box_muller() -> None:
    named = [
        "NUMBERS",
        "MAGNITUDE",
        "MANTISSA",
        "UNIT",
        "TWO_UNITS",
        "UNIT_BITS",
        "EXPONENT",
        "ODD",
        "SHARE",
        "FRACTION",
        "TWO_FRACTIONS",
        "ONE",
        "TWO",
    ]
    expected = {"COLUMNS": COLUMNS} | {name: getattr(box_muller, name) for name in named}
    for name in ("ATANH", "SINE"):
        expected |= {f"{name}_{i}": value for i, value in enumerate(getattr(box_muller, name))}
    source = Path(compiled.__file__).with_name("normals.c").read_text()
    found = dict(re.findall(r"^#define (\w+) (-?[0-9a-fx.p+-]+)$", source, re.MULTILINE))
    assert found.keys() - {"SIDE"} == expected.keys()  # SIDE: words in a register, as many as the processor holds
    for name, value in expected.items():
        if isinstance(value, np.float32):
            assert float.fromhex(found[name].removesuffix("f")) == float(value), name
        else:
            assert int(found[name]) == value, name
