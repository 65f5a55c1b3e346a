"""How sure a difference is: arms compared seed by seed, because they share noise and batches under a seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from scipy.stats import t as student
from scipy.stats import ttest_1samp


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Accuracies of two things over the same seeds, `seeds` of them: the mean of one with its spread, and that of the baseline.

    `difference` is mean(one − baseline), and [`low`, `high`] its 95 % confidence interval (Student's t); `p_value` is that of a
    two-sided paired t-test of no difference. NaN where there is one seed, p also where the difference is the same for all.
    """

    accuracy: float
    spread: float
    baseline: float
    difference: float
    low: float
    high: float
    p_value: float
    seeds: int


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Pairs | None:
    """Accuracies by seed, compared over the seeds that both have; None if there is none."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    one, baseline = ([accuracies[seed] for seed in seeds] for accuracies in (ours, theirs))
    differences = np.subtract(one, baseline)
    mean, several = float(differences.mean()), len(seeds) > 1
    error = float(differences.std(ddof=1)) / math.sqrt(len(seeds)) if several else math.nan
    half = error * float(student.ppf((1 + 0.95) / 2, len(seeds) - 1)) if several else math.nan
    return Pairs(
        accuracy=fmean(one),
        spread=stdev(one) if several else 0.0,
        baseline=fmean(baseline),
        difference=mean,
        low=mean - half,
        high=mean + half,
        p_value=float(ttest_1samp(differences, 0.0).pvalue) if np.ptp(differences) > 0 else math.nan,
        seeds=len(seeds),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's correction: rejecting those below α errs in any of them with probability at most α.

    NaN stays, and does not count. (Holm, "A simple sequentially rejective multiple test procedure", 1979.)
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, highest = list(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        corrected[i] = highest
    return corrected
