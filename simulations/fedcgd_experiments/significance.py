"""Mechanisms compared with one of them on the same seeds: mean difference of test accuracy, and a paired t-test."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy.stats import ttest_1samp

from fedcgd_experiments.experiment import Record, Setup, identity
from fedcgd_experiments.plots import best_lambda, plain
from fedcgd_experiments.sweep import best_rates, to_point


@dataclass(frozen=True)
class PairedComparison:
    """Test accuracy of `setup` and of the baseline, each tuned on validation, over the same seeds.

    `difference` is mean(setup − baseline); `p_value` that of a two-sided paired t-test of no difference (NaN for one
    seed, or if the difference is the same for all).
    """

    setup: Setup
    accuracy: float
    spread: float
    baseline: float
    difference: float
    p_value: float
    seeds: int


def compare_paired(runs: Sequence[Record], baseline: str = "dp-sgd") -> list[PairedComparison]:
    """Every mechanism at every budget compared with `baseline` (a name) on the same seeds, sorted by sampling, budget and name.

    Of DP-λCGD, on either side, with the λ that was best on validation. Raises ValueError if several setups of
    `baseline` have the same budget and sampling.
    """
    wanted, rates = best_lambda(runs), best_rates(runs)
    tested: dict[Setup, dict[int, float]] = defaultdict(dict)
    for record in runs:
        point = to_point(record)
        if point.split == "test" and point.learning_rate == rates.get(point.setup):
            tested[point.setup][point.seed] = record["accuracy"]
    references: dict[Setup, Setup] = {}
    for setup in sorted(wanted, key=identity):
        if baseline in (setup.name, setup.family) and references.setdefault(plain(setup), setup) != setup:
            several = f"{references[plain(setup)].mechanism} and {setup.mechanism}"
            raise ValueError(f"{baseline} is here as {several}; compare with a mechanism that is here once")
    comparisons = []
    for setup in sorted(wanted, key=identity):
        reference = references.get(plain(setup), setup)
        seeds = sorted(tested[setup].keys() & tested[reference].keys())
        if reference == setup or not seeds:
            continue
        ours, theirs = ([tested[which][seed] for seed in seeds] for which in (setup, reference))
        differences = np.subtract(ours, theirs)
        comparisons.append(
            PairedComparison(
                setup=setup,
                accuracy=fmean(ours),
                spread=stdev(ours) if len(seeds) > 1 else 0.0,
                baseline=fmean(theirs),
                difference=float(differences.mean()),
                p_value=float(ttest_1samp(differences, 0.0).pvalue) if np.ptp(differences) > 0 else float("nan"),
                seeds=len(seeds),
            )
        )
    return sorted(comparisons, key=lambda c: (c.setup.sampling, c.setup.epsilon, c.setup.mechanism))
