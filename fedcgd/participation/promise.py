"""The numbers of a promise about who takes part when, as a sampling reads them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Promise:
    """n, b, k, the sampling's name and its number; `fedcgd.participation.Participation` says what each is, and checks them."""

    rounds: int
    min_separation: int = 1
    max_participations: int | None = None
    sampling: str = "none"
    sampling_rate: float | None = None
    warm_start: bool = True

    @property
    def participations(self) -> int:
        """k: the most rounds that one user takes part in (n for Poisson sampling, where nothing bounds it)."""
        if self.max_participations is not None:
            return self.max_participations
        return math.ceil(self.rounds / self.min_separation)
