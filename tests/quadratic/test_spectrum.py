"""A spectrum counts, sums and goes through a file."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedcgd.quadratic import Spectrum


def test_equal_eigenvalues_are_counted_and_negative_ones_are_zero() -> None:
    found = Spectrum.from_eigenvalues([0.5, 2.0, -1.0, 0.5, 0.0])
    assert found.eigenvalues == (2.0, 0.5, 0.0)
    assert found.counts == (1.0, 2.0, 2.0)
    assert found.dimension == 5


def test_the_effective_dimension_of_the_talks_examples() -> None:
    d = 16
    low = Spectrum.from_eigenvalues([1.0] + [1 / d] * (d - 1))
    assert low.effective_dimension == pytest.approx(1 + 15 / 16)
    assert Spectrum((1.0,), (d,)).effective_dimension == d
    assert Spectrum((0.0,), (3.0,)).effective_dimension == 0.0
    assert Spectrum((4.0, 2.0), (1.0, 1e7)).trace == pytest.approx(4 + 2e7)


def test_a_file_gives_the_same_numbers_back(tmp_path: Path) -> None:
    values = np.random.default_rng(3).exponential(size=50)
    spectrum = Spectrum.from_eigenvalues(
        values, np.linspace(0.5, 7, 50), measured_on={"model": "small", "examples": 100}
    )
    spectrum.save(tmp_path / "s.json")
    again = Spectrum.load(tmp_path / "s.json")
    assert again == spectrum
    assert again.digest == spectrum.digest
    assert again.measured_on == {"model": "small", "examples": 100}
    assert Spectrum.from_eigenvalues(values).digest != spectrum.digest


@pytest.mark.parametrize(
    ("values", "counts", "words"),
    [
        ((1.0, 2.0), (1.0, 1.0), "^eigenvalues"),
        ((1.0, 1.0), (1.0, 1.0), "^eigenvalues"),
        ((1.0, -0.5), (1.0, 1.0), "^eigenvalues"),
        ((float("nan"),), (1.0,), "^eigenvalues"),
        ((1.0,), (0.0,), "^counts"),
        ((1.0,), (1.0, 2.0), r"\(1,\) and \(2,\)"),
        ((), (), "at least one"),
    ],
)
def test_what_is_no_spectrum_is_refused(values, counts, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Spectrum(values, counts)


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"kind": "fedcgd spectrum", "version": 2})])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match="holds no"):
        Spectrum.load(tmp_path / "s.json")


def test_mismatched_and_infinite_values_are_refused() -> None:
    with pytest.raises(ValueError, match="one count"):
        Spectrum.from_eigenvalues([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="got inf"):
        Spectrum.from_eigenvalues([1.0, float("inf")])
