"""The eigenvalues of a Hessian, each with how many there are of it, in memory and in a file."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.support.files import atomic_write

_KIND = "fedcgd spectrum"
_VERSION = 1


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a Hessian, and how many there are of each. `Spectrum.from_eigenvalues` makes one of any list.

    Args:
        eigenvalues: at least 0 and strictly falling, in units of loss / parameter².
        counts: how many directions have each of them, positive. They need not be whole: a density that was estimated has parts
            of directions.
        measured_on: what the eigenvalues are of (model, data, method; JSON-able); it takes no part in comparisons.

    Raises:
        ValueError: for anything else.

    >>> Spectrum.from_eigenvalues([0.5, 2.0, 0.5])
    Spectrum(eigenvalues=(2.0, 0.5), counts=(1.0, 2.0))
    """

    eigenvalues: tuple[float, ...]
    counts: tuple[float, ...]
    measured_on: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        values, counts = np.asarray(self.eigenvalues, np.float64), np.asarray(self.counts, np.float64)
        if values.ndim != 1 or not len(values) or values.shape != counts.shape:
            raise ValueError(
                f"a spectrum has at least one eigenvalue and a count for each, got {values.shape} and {counts.shape}"
            )
        if not (np.all(np.isfinite(values)) and np.all(np.diff(values) < 0) and values[-1] >= 0):
            raise ValueError(
                f"eigenvalues must be finite, at least 0 and strictly falling, got {values[:5]}…; Spectrum.from_eigenvalues "
                "sorts them, counts equal ones and puts 0 for negative ones"
            )
        if not (np.all(np.isfinite(counts)) and np.all(counts > 0)):
            raise ValueError(f"counts must be positive and finite, got {counts[:5]}…")
        object.__setattr__(self, "eigenvalues", tuple(values.tolist()))
        object.__setattr__(self, "counts", tuple(counts.tolist()))

    @staticmethod
    def from_eigenvalues(
        eigenvalues: Sequence[float] | NDArray[np.float64],
        counts: Sequence[float] | NDArray[np.float64] | None = None,
        *,
        measured_on: Mapping[str, Any] | None = None,
    ) -> "Spectrum":
        """The spectrum of these eigenvalues; equal ones are counted together.

        Args:
            eigenvalues: in any order. Negative ones become 0, since the theory is of convex quadratics.
            counts: how many directions have each of them; None for one each.
            measured_on: what the eigenvalues are of (model, data, method; JSON-able).

        Raises:
            ValueError: for values or counts that are not finite, and for counts that are not positive.
        """
        values = np.asarray(eigenvalues, np.float64).reshape(-1)
        weights = np.ones(len(values)) if counts is None else np.asarray(counts, np.float64).reshape(-1)
        if values.shape != weights.shape:
            raise ValueError(f"there must be one count for each of the {len(values)} eigenvalues, got {len(weights)}")
        if not np.all(np.isfinite(values)):
            raise ValueError(f"eigenvalues must be finite, got {values[~np.isfinite(values)][0]}")
        distinct, which = np.unique(np.maximum(values, 0.0), return_inverse=True)
        total = np.zeros(len(distinct))
        np.add.at(total, which, weights)
        return Spectrum(tuple(distinct[::-1].tolist()), tuple(total[::-1].tolist()), dict(measured_on or {}))

    @property
    def dimension(self) -> int:
        """d: the number of directions."""
        return round(math.fsum(self.counts))

    @property
    def largest(self) -> float:
        """‖H‖₂."""
        return self.eigenvalues[0]

    @property
    def trace(self) -> float:
        """Tr(H)."""
        return math.fsum(value * count for value, count in zip(self.eigenvalues, self.counts, strict=True))

    @property
    def effective_dimension(self) -> float:
        """d_eff = Tr(H)/‖H‖₂, at most d; 0 if all eigenvalues are 0.

        Choquette-Choo et al., "Correlated Noise Provably Beats Independent Noise for Differentially Private Learning", 2024,
        arXiv:2310.06771.
        """
        return self.trace / self.largest if self.largest else 0.0

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(eigenvalues, counts) of the directions that are not flat, which alone have a part in the errors."""
        values, counts = np.array(self.eigenvalues), np.array(self.counts)
        return values[values > 0], counts[values > 0]

    @property
    def digest(self) -> str:
        """SHA-256 of the eigenvalues and counts, hexadecimal."""
        both = np.array([self.eigenvalues, self.counts], "<f8")
        return hashlib.sha256(both.tobytes()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the spectrum to a file, from which `load` reads the same numbers, bit by bit.

        Args:
            path: a JSON file; one that is there is replaced.
        """
        content = {
            "kind": _KIND,
            "version": _VERSION,
            "measured_on": dict(self.measured_on),
            "dimension": self.dimension,
            "effective_dimension": self.effective_dimension,
            "eigenvalues": self.eigenvalues,
            "counts": self.counts,
        }
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        with atomic_write(os.fspath(path)) as part:
            part.write_text(text)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Spectrum":
        """The spectrum in a file that `save` wrote.

        Args:
            path: the JSON file.

        Raises:
            FileNotFoundError: if it is not there.
            ValueError: if it holds something else.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["kind"] != _KIND or content["version"] != _VERSION:
                raise ValueError(f"kind {content['kind']!r}, version {content['version']!r}")
            return Spectrum(tuple(content["eigenvalues"]), tuple(content["counts"]), dict(content["measured_on"]))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no spectrum at {path}; fedcgd curve -o {path} measures one") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no spectrum (kind {_KIND!r}, version {_VERSION}): {error}") from error
