"""How long optimisers search, and what they may take: every number that is chosen and not derived. None touches ε."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes and grids."""

    entries: int = 2**26
    """Of a band that is optimised: 0.5 GiB."""
    chunk: int = 2**20
    """Entries that are worked on at once: 8 MiB, which the processor keeps near."""
    terms: int = 64
    """So many sums take less time than three Fourier transforms."""
    report: int = 20
    """Iterations between two reports of progress."""
    grid: int = 24
    """Numbers that a closed form is tried at before the search next to the best."""
    shortened: int = 10_000
    """Rounds, from which on the thousand steps of a search would take minutes: a shorter run is searched first."""
    dampings: tuple[float, ...] = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
    """Of BISR, at the best of which the search for a banded inverse starts."""
    entries_read: int = 2**24
    """Of a matrix that is read from a file: four times as many as `dense` makes."""


EFFORT = Effort()
