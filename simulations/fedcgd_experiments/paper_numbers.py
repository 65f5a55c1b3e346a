"""The papers' figures that need no GPU, as numbers: each function is one figure's, and returns JSON-able values.

"The first paper" is Kalinin, McKenna, Pagh and Lampert, "DP-λCGD: Efficient Noise Correlation for Differentially Private Model
Training" (arXiv:2601.22334); "the bands paper" is McKenna, "Scaling up the Banded Matrix Factorization Mechanism for
Differentially Private ML" (arXiv:2405.15913); "the talk" is Pillutla, "Near-Optimal Private Learning with Correlated Noise
Mechanisms".
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcgd.accounting import calibrate
from fedcgd.accounting.selection import select_lambda
from fedcgd.mechanisms import BSR, DPSGD, LambdaCGD, Mechanism, SquareRootToeplitz
from fedcgd.mechanisms.error import error_norms
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.noise.keys import NoiseKey
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.bands import power_bandwidths
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd_experiments.central_softmax import train_softmax
from fedcgd_experiments.point import Descent, Optimizer
from fedcgd_simulations.task import evaluate
from fedcgd_simulations.tasks import get_task

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
            for p in power_bandwidths(rounds, k):
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


EXAMPLE_B1 = (
    (0.740,),
    (0.500, 0.822),
    (0.450, 0.492, 0.876),
    (0, 0.286, 0.395, 0.821),
    (0, 0, 0.278, 0.462, 0.855),
    (0, 0, 0, 0.335, 0.442, 0.882),
    (0, 0, 0, 0, 0.272, 0.403, 0.892),
    (0, 0, 0, 0, 0, 0.243, 0.409, 0.936),
    (0, 0, 0, 0, 0, 0, 0.194, 0.353, 1.000),
)
"""The matrix that the bands paper prints in its Example B.1, row by row."""


def example_b1() -> Numbers:
    """Example B.1 of the bands paper: the optimal three bands for nine rounds, beside the printed ones; and both errors.

    The error is that of Proposition 2.1, ‖C‖²_{1,2}·‖A·C⁻¹‖²_F.
    """
    ours = catalogue.mechanism("band-mf:3", Participation(rounds=9, min_separation=3)).columns(9, np.arange(9))
    printed = np.zeros((9, 9))
    for i, row in enumerate(EXAMPLE_B1):
        printed[i, : len(row)] = row

    def error(c: np.ndarray) -> float:
        b = np.tri(9) @ np.linalg.inv(c)
        return float((c**2).sum(axis=0).max() * (b**2).sum())

    return {
        "ours": np.round(ours, 4).tolist(),
        "printed": printed.tolist(),
        "largest_difference": float(np.abs(ours - printed).max()),
        "error": error(ours),
        "printed_error": error(printed),
    }


def square_root_error(inverse: np.ndarray) -> float:
    """max |r(x) − √(1 − x)| over |x| = 1 − 1/n, r(x) = Σ_t inverse[t]·xᵗ, n = len(inverse): the talk's err(r)."""
    n = len(inverse)
    size = max(4096, 1 << (n - 1).bit_length())
    radius = 1 - 1 / n
    values = np.fft.fft(inverse * radius ** np.arange(n), size)
    x = radius * np.exp(-2j * np.pi * np.arange(size) / size)
    return float(np.abs(values - np.sqrt(1 - x)).max())


def newman(degree: int) -> float:
    """sup over x in [0, 1] of |r(x) − √x| for Newman's rational function of `degree`, which is at most 3·e^{−√degree}.

    r(x²) = x·(p(x) − p(−x))/(p(x) + p(−x)), p(x) = Π_{k<degree} (x + ξᵏ), ξ = e^{−1/√degree} (Newman, 1964).
    """
    nodes = np.exp(-np.arange(degree) / math.sqrt(degree))
    x = np.linspace(0, 1, 20_001) ** 4  # the error sits near zero
    ratio = np.prod((nodes - x[:, None]) / (nodes + x[:, None]), axis=1)  # p(−x)/p(x)
    return float(np.abs(x * (1 - ratio) / (1 + ratio) - x).max())


def rational(*, rounds: int = 1000, degrees: Sequence[int] = (1, 2, 3, 4, 5, 6)) -> Numbers:
    """The talk's approximation quality: how near BLTs with d buffers, and d bands, come to √(1 − x), and what it costs.

    `excess` is the MaxSE (one participation) over that of the optimal Toeplitz mechanism, minus 1. The BLTs are those of least
    MaxSE, which is not the same as least err(r).
    """
    participation = Participation(rounds=rounds, max_participations=1)

    def quality(mechanism: Any) -> tuple[float, float]:
        inverse = np.zeros(rounds)
        coefficients = mechanism.inverse_coefficients(rounds)
        inverse[: len(coefficients)] = coefficients
        error = error_norms(mechanism, rounds).max_se(sensitivity(mechanism, participation).value)
        return square_root_error(inverse), error

    least = quality(SquareRootToeplitz())[1]
    found: Numbers = {"rounds": rounds, "degrees": list(degrees), "toeplitz_max_se": least}
    for name, spelled, more in (("blt", "blt", 0), ("bands", "banded-toeplitz", 1)):
        made = [catalogue.mechanism(f"{spelled}:{d + more}", participation, error="max-se") for d in degrees]
        qualities = [quality(mechanism) for mechanism in made]
        found[name] = {
            "approximation": [near for near, _ in qualities],
            "excess": [error / least - 1 for _, error in qualities],
        }
    found["newman"] = [newman(d) for d in degrees]
    found["bound"] = [3 * math.exp(-math.sqrt(d)) for d in degrees]
    return found


def _digits() -> tuple[Any, Any, nn.Module]:
    task = get_task("digits")
    torch.set_num_threads(1)
    return task, task.load(), task.model(0)


def epochs_and_lambda(
    *,
    epochs: Sequence[int] = (10, 20, 40, 80),
    lams: Sequence[float] = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
    rates: Sequence[float] = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0),
    seeds: Sequence[int] = (0, 1, 2),
    batch: int = 26,
) -> Numbers:
    """Figure 7 of the first paper on handwritten digits: validation accuracy against λ for more and more epochs.

    The batch and so the rounds of an epoch (49, as in the paper) stay; the learning rate is tuned for each λ; δ = 1e-5, no
    amplification. `accuracy[k][λ]` is (mean, sample standard deviation, the rate).
    """
    epsilon = 2.0
    task, data, start = _digits()
    steps = -(-len(data.train) // batch)
    found: Numbers = {
        "epsilon": epsilon,
        "steps": steps,
        "lambdas": list(lams),
        "accuracy": {},
        "best": {},
        "rmse_optimal": {},
    }
    model = task.model(0)
    for k in epochs:
        participation = Participation(rounds=k * steps, min_separation=steps)
        row = {}
        for lam in lams:
            plan = Plan.calibrated(LambdaCGD(lam), participation, clip_norm=1.0, epsilon=epsilon, delta=1e-5)
            scores = []
            for seed in seeds:
                runs = [(plan, Descent(learning_rate=rate)) for rate in rates]
                trained = train_softmax(start, data.train, runs, key=NoiseKey.simulation(seed), steps=steps)
                scores.append([_score(model, flat, lambda: evaluate(model, task, data.validation)) for flat in trained])
            means = np.mean(scores, axis=0)
            at = int(np.argmax(means))
            row[f"{lam:g}"] = (float(means[at]), float(np.std(scores, axis=0, ddof=1)[at]), rates[at])
        found["accuracy"][str(k)] = row
        found["best"][str(k)] = max(row, key=lambda lam: row[lam][0])
        optimum = select_lambda(participation, objective="rmse", epsilon=epsilon, delta=1e-5).lam
        found["rmse_optimal"][str(k)] = optimum
    return found


def _score(model: nn.Module, flat: torch.Tensor, measure: Callable[[], float]) -> float:
    nn.utils.vector_to_parameters(flat, model.parameters())
    return measure()


def error_and_learning(
    *,
    optimizer: Optimizer,
    mechanisms: Sequence[str] = ("dp-sgd", "banded-toeplitz:4", "banded-toeplitz:16", "blt:3"),
    errors: Sequence[float] = (3.0, 10.0, 30.0, 100.0, 300.0),
    rates: Sequence[float],
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 10,
    batch: int = 60,
) -> Numbers:
    """Figures 5 and 8 of the bands paper on handwritten digits: cross-entropy on test examples at equal RMSE and at equal MaxSE.

    The noise multiplier of each mechanism is set so that its RMSE in the sum is `errors`; the rate is tuned for each point, on
    validation examples. If RMSE told all, the curves would lie on each other. `max_se` has the same points' MaxSE.
    """
    task, data, start = _digits()
    steps = -(-len(data.train) // batch)
    participation = Participation(rounds=epochs * steps, min_separation=steps)
    model = task.model(0)

    def cross_entropy(examples: Any) -> float:
        with torch.no_grad():
            return float(task.loss(model(examples.inputs), examples.targets).mean())

    found: Numbers = {"optimizer": optimizer, "rmse": list(errors), "cross_entropy": {}, "max_se": {}, "rates": {}}
    for spelling in mechanisms:
        mechanism = catalogue.mechanism(spelling, participation)
        norms = error_norms(mechanism, participation.rounds)
        points, chosen = [], []
        for error in errors:
            sigma = error / norms.rmse(1.0)
            plan = Plan(
                mechanism=mechanism, participation=participation, clip_norm=1.0, noise_multiplier=sigma, delta=1e-5
            )
            validation, test = [], []
            for seed in seeds:
                runs = [(plan, Descent(learning_rate=rate, optimizer=optimizer)) for rate in rates]
                trained = train_softmax(start, data.train, runs, key=NoiseKey.simulation(seed), steps=steps)
                validation.append([_score(model, flat, lambda: cross_entropy(data.validation)) for flat in trained])
                test.append([_score(model, flat, lambda: cross_entropy(data.test)) for flat in trained])
            at = int(np.argmin(np.mean(validation, axis=0)))
            points.append((float(np.mean(test, axis=0)[at]), float(np.std(test, axis=0, ddof=1)[at])))
            chosen.append(rates[at])
        found["cross_entropy"][spelling], found["rates"][spelling] = points, chosen
        found["max_se"][spelling] = [norms.max_se(error / norms.rmse(1.0)) for error in errors]
    return found


FIGURES: dict[str, Callable[[], Numbers]] = {
    "correlation": correlation,
    "normalisation": normalisation,
    "bands": lambda: bands(rounds=16384, epochs=(1, 2, 8, 32, 128, 512), epsilons=(1.0, 8.0)),
    "best-bands": lambda: bands(rounds=4096, epochs=(1, 2, 4, 8, 16, 32, 64, 128), epsilons=(0.5, 1.0, 2.0, 4.0, 8.0)),
    "example-b1": example_b1,
    "rational": rational,
    "epochs": epochs_and_lambda,
    "learning-sgd": lambda: error_and_learning(optimizer="sgd", rates=(0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)),
    "learning-adam": lambda: error_and_learning(optimizer="adam", rates=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3)),
}
"""Each figure of benchmarks/reports/paper_figures.md, at the size that is shown there."""
