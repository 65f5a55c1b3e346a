"""The numbers of a promise about who takes part when, as a sampling reads them."""

from typing import Protocol


class Promise(Protocol):
    """n, b, k and q; `fedcgd.participation.Participation` has them."""

    def __hash__(self) -> int: ...

    @property
    def rounds(self) -> int:
        """n."""
        ...

    @property
    def min_separation(self) -> int:
        """b: any two rounds of a user are at least so far apart."""
        ...

    @property
    def max_participations(self) -> int | None:
        """k as it was given."""
        ...

    @property
    def sampling_rate(self) -> float | None:
        """q, or p: the probability of a coin."""
        ...

    @property
    def warm_start(self) -> bool:
        """Whether the first cohorts are as large as the later ones."""
        ...

    @property
    def participations(self) -> int:
        """k: the most rounds that one user takes part in."""
        ...
