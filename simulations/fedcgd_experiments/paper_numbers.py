"""The papers' figures that need no GPU, as numbers: each function is one figure's, and returns JSON-able values.

"The first paper" is Kalinin, McKenna, Pagh and Lampert, "DP-λCGD: Efficient Noise Correlation for Differentially Private Model
Training" (arXiv:2601.22334); "the bands paper" is McKenna, "Scaling up the Banded Matrix Factorization Mechanism for
Differentially Private ML" (arXiv:2405.15913).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from fedcgd.accounting import calibrate
from fedcgd.accounting.selection import select_lambda
from fedcgd.mechanisms import BSR, DPSGD, LambdaCGD, Mechanism
from fedcgd.mechanisms.error import error_norms
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.bands import power_bandwidths
from fedcgd.participation import Participation

Numbers = dict[str, Any]


def correlation(*, lam: float = 0.9, rounds: int = 3900, epochs: int = 10) -> Numbers:
    """Figure 5 of the first paper: the noise of a round, and what has gathered in the model after so many rounds.

    Standard deviations of a coordinate for clip norm 1, in the paper's CIFAR-10 setting (δ = 1e-5, no amplification): a round's
    noise is larger than that of DP-SGD, and the noise in the model smaller.
    """
    epsilon = 8.0
    participation = Participation(rounds=rounds, min_separation=rounds // epochs)
    after = [t for t in (1, 2, 10, 100, 1000, rounds) if t <= rounds]
    found: Numbers = {"lambda": lam, "rounds": rounds, "epsilon": epsilon, "after": after}
    for name, mechanism in (("dp-sgd", DPSGD()), ("lambda-cgd", LambdaCGD(lam))):
        sigma = calibrate(mechanism, participation, epsilon=epsilon, delta=1e-5).noise_multiplier
        inverse = np.zeros(rounds)
        coefficients = mechanism.inverse_coefficients(rounds)
        inverse[: len(coefficients)] = coefficients
        found[name] = {
            "noise_multiplier": sigma,
            "in_a_round": sigma * float(np.linalg.norm(inverse)),
            "in_the_model": [sigma * math.sqrt(float((np.cumsum(inverse)[:t] ** 2).sum())) for t in after],
        }
    return found


def normalisation(
    *, epochs: Sequence[int] = (1, 2, 4, 8, 16, 32), separations: Sequence[int] = (10, 100, 400)
) -> Numbers:
    """Figure 6 of the first paper: RMSE of DP-λCGD with unit columns over that without, each with its own RMSE-optimal λ."""
    ratios = {}
    for b in separations:
        row = []
        for k in epochs:
            participation = Participation(rounds=k * b, min_separation=b, max_participations=k)
            plain, unit = (
                select_lambda(participation, objective="rmse", epsilon=1.0, delta=1e-5, normalize=normalize).value
                for normalize in (False, True)
            )
            row.append(unit / plain)
        ratios[str(b)] = row
    return {"epochs": list(epochs), "ratios": ratios}


_OPTIMISED = 1024  # bands that are optimised; beyond, the square root, whose error is a few percent larger


@cache
def banded(bandwidth: int, rounds: int) -> Mechanism:
    """The Toeplitz mechanism with so many bands of least RMSE, for one participation in `bandwidth` rounds."""
    if bandwidth == 1:
        return DPSGD()
    if bandwidth > _OPTIMISED:
        return BSR(bandwidth)
    return catalogue.mechanism(f"banded-toeplitz:{bandwidth}", Participation(rounds=rounds, max_participations=1))


def bands(*, rounds: int, epochs: Sequence[int], epsilons: Sequence[float], delta: float = 1e-8) -> Numbers:
    """Figures 3, 4 and 7 of the bands paper: RMSE of banded noise in the *mean* update, by ε, epochs and bands.

    Under cyclic Poisson sampling with as many groups as bands, σ amplified. A batch of k epochs is k times as large as that of
    one, so RMSE is divided by k; "full_batch" is that of DP-SGD with everyone in every round. `best` has the bands of least RMSE,
    `unamplified` the RMSE of n/k bands over the best, `uncorrelated` that of one band, and `rule` the bands of the rule of
    thumb.
    """
    found: Numbers = {
        "rounds": rounds,
        "delta": delta,
        "epochs": list(epochs),
        "epsilons": list(epsilons),
        "curves": {},
    }
    for epsilon in epsilons:
        full = calibrate(DPSGD(), Participation(rounds=rounds), epsilon=epsilon, delta=delta).noise_multiplier
        curves = {}
        for k in epochs:
            errors = {}
            for p in power_bandwidths(rounds // k):
                mechanism = banded(p, rounds)
                plan = Participation.for_cohorts(
                    "cyclic-poisson", rounds, users=rounds, cohort_size=k, min_separation=p
                )
                sigma = calibrate(mechanism, plan, epsilon=epsilon, delta=delta).noise_multiplier
                errors[p] = error_norms(mechanism, rounds).rmse(sigma) / k
            least = min(errors, key=errors.__getitem__)
            curves[str(k)] = {
                "rmse": {str(p): error for p, error in errors.items()},
                "best": least,
                "rule": max(1, min(round(epsilon * math.sqrt(rounds) / k), rounds // k)),  # its Section 4.3
                "unamplified": errors[max(errors)] / errors[least],
                "uncorrelated": errors[1] / errors[least],
            }
        found["curves"][f"{epsilon:g}"] = {
            "full_batch": error_norms(DPSGD(), rounds).rmse(full) / rounds,
            "epochs": curves,
        }
    return found


FIGURES: dict[str, Callable[[], Numbers]] = {
    "correlation": correlation,
    "normalisation": normalisation,
    "bands": lambda: bands(rounds=16384, epochs=(1, 2, 8, 32, 128, 512), epsilons=(1.0, 8.0)),
    "best-bands": lambda: bands(rounds=4096, epochs=(1, 2, 4, 8, 16, 32, 64, 128), epsilons=(0.5, 1.0, 2.0, 4.0, 8.0)),
}
"""Each figure of benchmarks/reports/paper_figures.md, at the size that is shown there."""
