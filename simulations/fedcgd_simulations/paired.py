"""Mechanisms against DP-SGD on the same seeds: mean difference of test accuracy, and a paired t-test."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np
from scipy.stats import ttest_1samp

from fedcgd_simulations.plots import best_lambda
from fedcgd_simulations.point import Record, Setup
from fedcgd_simulations.sweep import to_point


@dataclass(frozen=True)
class Comparison:
    """Test accuracy of `setup` and of DP-SGD, each tuned on validation, over the same seeds.

    `difference` is mean(setup − DP-SGD); `p_value` that of a two-sided paired t-test of no difference (NaN for one seed).
    """

    setup: Setup
    accuracy: float
    spread: float
    baseline: float
    difference: float
    p_value: float
    seeds: int


def against_dp_sgd(runs: Sequence[Record]) -> list[Comparison]:
    """Every mechanism at every budget, of DP-λCGD with the λ that was best on validation, sorted by budget and name."""
    wanted = best_lambda(runs)
    tested: dict[Setup, dict[int, float]] = defaultdict(dict)
    for record in runs:
        point = to_point(record)
        if point.split == "test":
            tested[point.setup][point.seed] = record["accuracy"]
    comparisons = []
    for setup in wanted:
        plain = replace(setup, mechanism="dp-sgd", lam=None, bandwidth=None, degree=None, normalize=False)
        seeds = sorted(tested[setup].keys() & tested[plain].keys()) if setup in tested and plain in tested else []
        if setup == plain or not seeds:
            continue
        ours, theirs = ([tested[which][seed] for seed in seeds] for which in (setup, plain))
        differences = np.subtract(ours, theirs)
        enough = len(seeds) > 1
        comparisons.append(
            Comparison(
                setup=setup,
                accuracy=fmean(ours),
                spread=stdev(ours) if enough else 0.0,
                baseline=fmean(theirs),
                difference=float(differences.mean()),
                p_value=float(ttest_1samp(differences, 0.0).pvalue) if enough else float("nan"),
                seeds=len(seeds),
            )
        )
    return sorted(comparisons, key=lambda c: (c.setup.sampling, c.setup.epsilon, c.setup.label))
