"""Which C a sampling is accounted for, and what is said of another: the value, the limit, and what is accounted for."""

from functools import lru_cache

import numpy as np

from fedcgd.mechanisms import DPSGD, Mechanism, Normalized
from fedcgd.mechanisms.mechanism import Matrix
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.mechanisms.toeplitz import BandedInverseMechanism, BandedToeplitzMechanism
from fedcgd.participation import Participation
from fedcgd.participation.samplings import Law

_ROUNDING = 1e-12  # of the largest entry: what optimisers and inverses leave in place of a zero

NARROW = frozenset({Law.COINS, Law.ONE_OF_EACH_EPOCH})
"""Laws that are accounted for with few bands of C: a user's rounds overlap with the next ones at most."""


class NegativeEntryError(ValueError):
    """C has a negative entry, and the sampling is accounted for without."""


def most_bands(participation: Participation) -> int | None:
    """How many bands C may have under the sampling; None where any C has an account, or any without negative entries."""
    return participation.spacing if participation.scheme.law in NARROW else None


def too_wide(mechanism: Mechanism, participation: Participation, bands: int) -> ValueError:
    """What to raise for a `mechanism` whose C has more bands than the sampling is accounted for."""
    plain = mechanism.mechanism if isinstance(mechanism, Normalized) else mechanism
    inverse = (
        f" (its C⁻¹ has {plain.inverse_bandwidth(participation.rounds)})"
        if isinstance(plain, BandedInverseMechanism)
        else ""
    )
    return ValueError(
        f"{_covered(participation)}; that of {mechanism.name} has {bands}{inverse}. {_remedy(participation)}"
    )


@lru_cache(maxsize=16)
def column_norm(mechanism: Mechanism, participation: Participation) -> float:
    """The largest column norm of C, or a bound on it. Raises ValueError if C is too wide for the sampling."""
    n, most = participation.rounds, most_bands(participation)
    p = mechanism.bandwidth(n)
    if most is not None and p > most:
        raise too_wide(mechanism, participation, p)
    if isinstance(mechanism, DPSGD):
        return 1.0
    if isinstance(mechanism, BandedToeplitzMechanism):
        return float(np.linalg.norm(mechanism.band[:n]))  # of the first column, which is cut nowhere
    return sensitivity(mechanism, Participation(rounds=n, min_separation=n)).value


def nothing_to_choose(name: str, symbols: str, participation: Participation) -> ValueError:
    """What to raise where the numbers of a mechanism are left open, and those that the sampling covers are DP-SGD."""
    return ValueError(
        f"there is no {symbols} of {name} to choose under {participation.sampling} sampling: {_covered(participation)}, and the "
        f"only such {name} is dp-sgd. {_remedy(participation)}"
    )


def _covered(participation: Participation) -> str:
    most = most_bands(participation)
    limit = (
        "with one band only"
        if most == 1
        else f"with at most {most} bands, the rounds from one participation to the next"
    )
    return f"{participation.sampling} sampling covers C {limit}"


def _remedy(participation: Participation) -> str:
    most = most_bands(participation)
    narrow = "dp-sgd" if most == 1 else f"bsr:{most}, banded-toeplitz:{most} or band-mf:{most}"
    return (
        f"Use {narrow}, or sampling none; or balls-in-bins or b-min-sep, which cover every C without negative entries"
    )


def non_negative(entries: Matrix, name: str, sampling: str) -> Matrix:
    """|C| for C ≥ 0, and for C whose negative entries are rounding: what secret rounds are accounted for by.

    Inputs reach no more through C than aligned ones do through |C|, whatever the signs (docs: proofs.md), so that this errs
    upwards. Beyond rounding it would say far too much. Zeros in place of such entries could say too little.

    Args:
        entries: some entries of C.
        name: the mechanism's.
        sampling: what the message calls the sampling.

    Returns:
        |entries|.

    Raises:
        NegativeEntryError: if one of the entries is negative by more than rounding, or no number.
    """
    least = float(entries.min())
    if not least >= -_ROUNDING * float(np.abs(entries).max()):  # also refuses NaN
        raise NegativeEntryError(
            f"{name}: an entry of C is {least:g}, and {sampling} is accounted for non-negative C only (for others nobody has "
            "proven which inputs are the worst). Use sampling none, or a mechanism without negative entries, such as bsr"
        )
    return np.abs(entries) if least < 0 else entries
