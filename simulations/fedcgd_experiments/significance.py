"""How sure a difference is: mechanisms compared seed by seed, because they share noise and batches under a seed."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np
from scipy.stats import ttest_1samp

from fedcgd.participation import Sampling
from fedcgd_experiments.experiment import Record, Setup, identity
from fedcgd_experiments.sweep import best_of_families, best_rates, to_point


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Accuracies of two things over the same seeds, `seeds` of them: the mean of one with its spread, and that of the baseline.

    `difference` is mean(one − baseline); `p_value` that of a two-sided paired t-test of no difference (NaN for one seed, or if
    the difference is the same for all).
    """

    accuracy: float
    spread: float
    baseline: float
    difference: float
    p_value: float
    seeds: int


@dataclass(frozen=True, kw_only=True)
class PairedComparison(Pairs):
    """Test accuracy of `setup`, and as the baseline of `reference`, each tuned on validation.

    `corrected` is the p-value after Holm's correction over the table.
    """

    setup: Setup
    reference: Setup
    corrected: float


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Pairs | None:
    """Accuracies by seed, compared over the seeds that both have; None if there is none."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    one, baseline = ([accuracies[seed] for seed in seeds] for accuracies in (ours, theirs))
    differences = np.subtract(one, baseline)
    return Pairs(
        accuracy=fmean(one),
        spread=stdev(one) if len(seeds) > 1 else 0.0,
        baseline=fmean(baseline),
        difference=float(differences.mean()),
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


def tuned_accuracies(runs: Sequence[Record], split: str = "test") -> dict[Setup, dict[int, float]]:
    """Accuracy of each setup on `split`, by seed, at the learning rate that was best on validation."""
    rates = best_rates(runs)
    found: dict[Setup, dict[int, float]] = defaultdict(dict)
    for record in runs:
        point = to_point(record)
        if point.split == split and point.learning_rate == rates.get(point.setup):
            found[point.setup][point.seed] = record["accuracy"]
    return dict(found)


def compare_paired(
    runs: Sequence[Record], baseline: str = "dp-sgd", *, under: Sampling | None = None
) -> list[PairedComparison]:
    """Every mechanism at every budget compared with the family `baseline` on the same seeds, sorted by sampling, budget and name.

    Of a mechanism with a number (λ, bands, buffers, ν), on either side, with that which was best on validation. The baseline has
    the same sampling, or the sampling `under`. Holm's correction is over all comparisons that are returned.
    """
    best, tested = best_of_families(runs), tuned_accuracies(runs)
    references = {setup.budget: setup for setup in sorted(best, key=identity) if setup.family == baseline}
    rows = []
    for setup in sorted(best, key=identity):
        reference = references.get(replace(setup.budget, sampling=under or setup.sampling))
        if reference is None or reference == setup:
            continue
        pairs = paired(tested.get(setup, {}), tested.get(reference, {}))
        if pairs is not None:
            rows.append(PairedComparison(**vars(pairs), setup=setup, reference=reference, corrected=math.nan))
    corrected = holm([row.p_value for row in rows])
    rows = [replace(row, corrected=p) for row, p in zip(rows, corrected, strict=True)]
    return sorted(rows, key=lambda row: (row.setup.sampling, row.setup.epsilon, row.setup.mechanism))
