"""Machine code gives the bits that NumPy gives, and both those of the definition."""

import re
from ctypes import c_double
from pathlib import Path

import numpy as np
import pytest

from fedcgd.native.library import array, function, library
from fedcgd.noise import NoiseStream, box_muller
from fedcgd.noise import stream as module
from fedcgd.noise.quantisation import Lattice, keyed_noise
from fedcgd.noise.stream import COLUMNS, NUMPY, kernels, key_words

STREAM = NoiseStream(bytes(range(32)))
KEY = key_words(bytes(range(32)))
TERMS = [(1, 7, 1.0), (0, 3, -0.9), (2, 0, 0.123456789)]
SIZE = 66_537


@pytest.mark.parametrize("start", [17, 2**32 * 12 - 40_001])  # across the number 2³² of a block, too
def test_both_forms_give_the_same_bits(start: int) -> None:
    assert kernels() is not NUMPY, "these tests need a C compiler"
    found = []
    for form in (kernels(), NUMPY):
        z, total = np.empty(SIZE, np.float32), np.arange(SIZE)
        form.fill_normals(z, start, key_words(STREAM.key_of(7, 5)))
        for step in (2.0**-12, 2.0**-38):  # below the smoothing's width and far above
            form.add_to_grid(total, start, *keyed_noise(STREAM, TERMS, 2.5, Lattice(step)), 1.3)
        found.append((z.tobytes(), total.tobytes()))
    assert found[0] == found[1]
    assert found[0][0] == STREAM.normal(7, 5, start, start + SIZE).tobytes()


def test_keys_of_another_number_than_the_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="keys"):
        kernels().add_to_grid(np.zeros(3, np.int64), 0, np.stack([KEY, KEY]), np.ones(3), KEY, 1.0)


def test_extreme_words_have_the_same_bits() -> None:
    """Combinations of the least, the largest and ordinary integers."""
    code = library(Path(module.__file__).with_name("normals.c"))
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
    found = np.zeros((2, 5000), np.int64)
    for form, total in zip((kernels(), NUMPY), found, strict=True):
        form.add_to_grid(total, 3, np.zeros((0, 8), np.uint32), np.zeros(0), KEY, 0.5)
    np.testing.assert_array_equal(*found)
    assert (found % 2 == 0).mean() > 0.6  # of all a quarter were ties


def test_the_constants_in_c_are_those_of_box_muller() -> None:
    expected = {"COLUMNS": COLUMNS, "NUMBERS": box_muller.NUMBERS, "ODD": 1, "ONE": 1.0, "TWO": 2.0}
    for name, value in vars(box_muller.Constants).items():
        if name in ("ATANH", "SINE"):
            expected |= {f"{name}_{i}": one for i, one in enumerate(value)}
        elif name.isupper():
            expected[name] = value
    source = Path(module.__file__).with_name("normals.c").read_text()
    found = dict(re.findall(r"^#define (\w+) (-?[0-9a-fx.p+-]+)$", source, re.MULTILINE))
    assert found.keys() - {"SIDE"} == expected.keys()  # SIDE: words in a register, as many as the processor holds
    for name, value in expected.items():
        read = float.fromhex(found[name].removesuffix("f")) if isinstance(value, float) else int(found[name])
        assert read == value == (np.float32(value) if isinstance(value, float) else np.int32(value)), name
