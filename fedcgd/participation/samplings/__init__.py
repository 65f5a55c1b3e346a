"""The samplings that are accounted for, one file each."""

from fedcgd.participation.samplings.b_min_sep import BMinSep
from fedcgd.participation.samplings.balls_in_bins import BallsInBins
from fedcgd.participation.samplings.cyclic_poisson import CyclicPoisson
from fedcgd.participation.samplings.drawn import DrawnInAdvance
from fedcgd.participation.samplings.none import NoSampling
from fedcgd.participation.samplings.poisson import Poisson
from fedcgd.participation.samplings.random_allocation import RandomAllocation
from fedcgd.participation.samplings.sampling import Law, Rows, Sampling
from fedcgd.participation.samplings.shuffle import Shuffle

__all__ = ["SAMPLINGS", "SECRET_SAMPLINGS", "DrawnInAdvance", "Law", "Rows", "Sampling", "scheme_of"]

SAMPLINGS: dict[str, Sampling] = {
    each.name: each
    for each in (
        NoSampling(),
        BallsInBins(),
        Poisson(),
        CyclicPoisson(),
        BMinSep(),
        RandomAllocation(),
        Shuffle(),
    )
}
"""By their names: the row that a new one needs."""

SECRET_SAMPLINGS = tuple(name for name, each in SAMPLINGS.items() if each.hidden and not each.takes_groups)
"""Those that amplify if nobody learns who was drawn, whatever the mechanism's number of bands."""


def scheme_of(sampling: str) -> Sampling:
    """The sampling of that name.

    Args:
        sampling: one of `SAMPLINGS`.

    Raises:
        ValueError: if there is none of that name.
    """
    if sampling not in SAMPLINGS:
        *others, last = SAMPLINGS
        raise ValueError(
            f"sampling must be {', '.join(others)} or {last}, got {sampling!r}; no other sampling is accounted for"
        )
    return SAMPLINGS[sampling]
