"""The problem that errors are measured on: gradient descent on a quadratic whose spectrum is known."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fedcgd.mechanisms.mechanism import Vector
from fedcgd.quadratic.spectrum import Spectrum
from fedcgd.support.numbers import as_float

_ENTRIES = 2**21


@dataclass(frozen=True)
class Quadratic:
    """½(w − d)ᵀH(w − d) for an H with a known spectrum, descended with a constant learning rate η.

    Args:
        spectrum: the eigenvalues of H.
        learning_rate: η in (0, 2/‖H‖₂).

    Raises:
        ValueError: for another learning rate, with which descent without any noise diverges.
    """

    spectrum: Spectrum
    learning_rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "learning_rate", as_float("learning_rate", self.learning_rate))
        rate, largest = self.learning_rate, self.spectrum.largest
        limit = 2 / largest if largest > 0 else math.inf
        if not 0 < rate < limit or not math.isfinite(rate):
            raise ValueError(
                f"learning_rate must be positive and below 2/μ = {limit:.6g} for the largest eigenvalue μ = {largest:.6g}, got "
                f"{rate}: beyond, gradient descent diverges without any noise"
            )

    def contractions(self) -> tuple[Vector, Vector, Vector]:
        """(a, μ, counts) of the directions that are not flat, a = 1 − ημ in (−1, 1)."""
        values, counts = self.spectrum.arrays()
        return 1 - self.learning_rate * values, values, counts

    def contractions_in_parts(self, width: int) -> Iterator[tuple[Vector, Vector, Vector]]:
        """As `contractions`, a few directions at a time.

        Args:
            width: an array with so many numbers for each of them has at most 16 MiB.
        """
        a, values, counts = self.contractions()
        step = max(1, _ENTRIES // width)
        for start in range(0, len(a), step):
            part = slice(start, start + step)
            yield a[part], values[part], counts[part]
