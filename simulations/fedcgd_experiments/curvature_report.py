"""What the runs of the curvature experiment say: the best learning rates, test accuracies, and which noise is better."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from scipy.stats import permutation_test, ttest_rel

from fedcgd_experiments.curvature_design import (
    BAND_MF,
    DP_SGD,
    FITTED_LAMBDA,
    NOISE_CURVE,
    PRACTICAL,
    arm_of,
    check_one_design,
)
from fedcgd_experiments.point import CentralPoint
from fedcgd_experiments.results import Row, point_of
from fedcgd_experiments.significance import holm

COMPARISONS = (
    (NOISE_CURVE, BAND_MF),
    (FITTED_LAMBDA, PRACTICAL),
    (NOISE_CURVE, DP_SGD),
    (FITTED_LAMBDA, DP_SGD),
    (BAND_MF, DP_SGD),
    (NOISE_CURVE, FITTED_LAMBDA),
)
"""(what should be better, than what): those whose p-values are reported."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """An arm at a budget: the learning rate of highest mean validation accuracy (of equals the smaller), and what it gives."""

    learning_rate: float
    validation: float
    tests: dict[int, float]
    """Seed → accuracy on the test examples."""


def tuned(runs: Iterable[Row]) -> dict[tuple[str, float], Tuned]:
    """(arm, budget) → what validation chose. Raises ValueError as `check_one_design` does."""
    read = [(to_point(run), run["accuracy"]) for run in runs]
    check_one_design(point for point, _ in read)
    found: dict[tuple[str, float], dict[float, dict[str, dict[int, float]]]] = {}
    for point, accuracy in read:
        rates = found.setdefault((arm_of(point.mechanism), point.epsilon), {})
        splits = rates.setdefault(point.learning_rate, {"validation": {}, "test": {}})
        splits[point.split][point.seed] = accuracy
    chosen = {}
    for key, rates in found.items():
        means = {rate: fmean(of["validation"].values()) for rate, of in sorted(rates.items()) if of["validation"]}
        if means:
            best = max(means, key=means.__getitem__)
            chosen[key] = Tuned(learning_rate=best, validation=means[best], tests=rates[best]["test"])
    return chosen


def to_point(row: Row) -> CentralPoint:
    """The point of a run."""
    point = point_of(row, CentralPoint)
    assert isinstance(point, CentralPoint)
    return point


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Test accuracies of two arms at one budget, on the same seeds: means, and p-values of `better` being no better."""

    epsilon: float
    better: str
    than: str
    seeds: int
    difference: float
    p_permutation: float
    """Of all ways to deal the accuracies out to the two arms, the share with a difference of the means at least as large."""
    p_paired: float
    """Of the paired t-test, one-sided."""
    corrected: float
    """`p_permutation` after Holm's correction over all comparisons."""


def compare(runs: Iterable[Row]) -> list[Comparison]:
    """Every comparison of `COMPARISONS` at every budget for which both arms have the same test seeds, at least two.

    The permutation test is the exact one of two samples (appendix A.3 of Gu et al., 2026, arXiv:2510.05416): with ten seeds each
    there are 184,756 ways, and 1/184,756 is the least that p can be.
    """
    accuracies, found = {key: one.tests for key, one in tuned(runs).items()}, []
    for epsilon in sorted({epsilon for _, epsilon in accuracies}):
        for better, than in COMPARISONS:
            first, second = accuracies.get((better, epsilon), {}), accuracies.get((than, epsilon), {})
            seeds = sorted(first.keys() & second.keys())
            if len(seeds) < 2:
                continue
            x, y = (np.array([part[seed] for seed in seeds]) for part in (first, second))
            test = permutation_test(
                (x, y), lambda a, b, axis: a.mean(axis) - b.mean(axis), vectorized=True,
                n_resamples=10**6, alternative="greater",
            )  # fmt: skip
            found.append(
                Comparison(
                    epsilon=epsilon,
                    better=better,
                    than=than,
                    seeds=len(seeds),
                    difference=float((x - y).mean()),
                    p_permutation=float(test.pvalue),
                    p_paired=float(ttest_rel(x, y, alternative="greater").pvalue),
                    corrected=math.nan,
                )
            )
    corrected = holm([row.p_permutation for row in found])
    return [replace(row, corrected=p) for row, p in zip(found, corrected, strict=True)]
