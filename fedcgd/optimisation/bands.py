"""How many bands: more of them cancel more noise, fewer of them leave more privacy to amplification by sampling.

After McKenna, "Scaling up the Banded Matrix Factorization Mechanism for Differentially Private ML", 2024, arXiv:2405.15913.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fedcgd.mechanisms.error import error_norms
from fedcgd.mechanisms.mechanism import Mechanism
from fedcgd.mechanisms.workload import PREFIX_SUMS, Objective, Workload
from fedcgd.quadratic import Quadratic
from fedcgd.quadratic.loss import final_loss


@dataclass(frozen=True)
class BandChoice:
    """The `bandwidth` of least error, its mechanism and σ, and (p, error) of all that were tried, ascending in p."""

    bandwidth: int
    mechanism: Mechanism
    noise_multiplier: float
    errors: tuple[tuple[int, float], ...]


def best_bandwidth(
    candidate: Callable[[int], tuple[Mechanism, float] | None],
    bandwidths: Iterable[int],
    *,
    rounds: int,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    curvature: Quadratic | None = None,
) -> BandChoice:
    """The number of bands p whose mechanism has the least error at equal privacy, by trying all.

    `candidate(p)` gives the mechanism with p bands and the σ that the privacy budget needs for it, amplified by whatever sampling
    p allows, or None where it has no account. With a `curvature` its loss counts, in place of `error` and
    `workload`. Ties go to the fewest bands.
    Raises ValueError if there is nothing to try.
    """
    found: dict[int, tuple[float, Mechanism, float]] = {}
    for p in sorted(set(bandwidths)):
        made = candidate(p)
        if made is None:
            continue
        mechanism, sigma = made
        if curvature is not None:
            found[p] = (final_loss(mechanism, rounds, curvature, stddev=sigma), mechanism, sigma)
            continue
        norms = error_norms(mechanism, rounds, workload)
        found[p] = (norms.rmse(sigma) if error == "rmse" else norms.max_se(sigma), mechanism, sigma)
    if not found:
        raise ValueError("no bandwidths to choose from; power_bandwidths(rounds, epochs) lists the usual ones")
    best = min(found, key=lambda p: found[p][0])
    _, mechanism, sigma = found[best]
    return BandChoice(best, mechanism, sigma, tuple((p, value) for p, (value, _, _) in found.items()))


def power_bandwidths(rounds: int, epochs: int) -> tuple[int, ...]:
    """1, 2, 4, … and n/k, which has no amplification left: the error changes slowly between them."""
    longest = max(1, rounds // epochs)
    return tuple(sorted({2**i for i in range(longest.bit_length())} | {longest}))
