"""How sure a difference is: mechanisms compared seed by seed, because they share noise and batches under a seed."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np
from scipy.stats import ttest_1samp

from fedcgd_experiments.experiment import Record, Setup, identity
from fedcgd_experiments.sweep import best_of_families, best_rates, to_point


@dataclass(frozen=True)
class PairedComparison:
    """Test accuracy of `setup` and of the baseline, each tuned on validation, over the same seeds.

    `difference` is mean(setup − baseline); `p_value` that of a two-sided paired t-test of no difference (NaN for one
    seed, or if the difference is the same for all), and `corrected` the same after Holm's correction over the table.
    """

    setup: Setup
    reference: Setup
    accuracy: float
    spread: float
    baseline: float
    difference: float
    p_value: float
    corrected: float
    seeds: int


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


def tested_accuracies(runs: Sequence[Record]) -> dict[Setup, dict[int, float]]:
    """Test accuracy of each setup, by seed, at the learning rate that was best on validation."""
    rates = best_rates(runs)
    tested: dict[Setup, dict[int, float]] = defaultdict(dict)
    for record in runs:
        point = to_point(record)
        if point.split == "test" and point.learning_rate == rates.get(point.setup):
            tested[point.setup][point.seed] = record["accuracy"]
    return dict(tested)


def compare_paired(
    runs: Sequence[Record], baseline: str = "dp-sgd", *, under: str | None = None
) -> list[PairedComparison]:
    """Every mechanism at every budget compared with the family `baseline` on the same seeds, sorted by sampling, budget and name.

    Of a mechanism with a number (λ, bands, buffers, ν), on either side, with that which was best on validation. The baseline has
    the same sampling, or the sampling `under`. Holm's correction is over all comparisons that are returned.
    """
    best, tested = best_of_families(runs), tested_accuracies(runs)
    references = {_budget(setup): setup for setup in sorted(best, key=identity) if setup.family == baseline}
    rows = []
    for setup in sorted(best, key=identity):
        sampling = setup.sampling if under is None else under
        reference = references.get((sampling, *_budget(setup)[1:]))
        if reference in (None, setup) or setup not in tested or reference not in tested:
            continue
        seeds = sorted(tested[setup].keys() & tested[reference].keys())
        if not seeds:
            continue
        ours, theirs = ([tested[which][seed] for seed in seeds] for which in (setup, reference))
        differences = np.subtract(ours, theirs)
        rows.append(
            PairedComparison(
                setup=setup,
                reference=reference,
                accuracy=fmean(ours),
                spread=stdev(ours) if len(seeds) > 1 else 0.0,
                baseline=fmean(theirs),
                difference=float(differences.mean()),
                p_value=float(ttest_1samp(differences, 0.0).pvalue) if np.ptp(differences) > 0 else math.nan,
                corrected=math.nan,
                seeds=len(seeds),
            )
        )
    corrected = holm([row.p_value for row in rows])
    rows = [replace(row, corrected=p) for row, p in zip(rows, corrected, strict=True)]
    return sorted(rows, key=lambda row: (row.setup.sampling, row.setup.epsilon, row.setup.mechanism))


def _budget(setup: Setup) -> tuple[str, float, float, int, int]:
    return setup.sampling, setup.epsilon, setup.delta, setup.steps, setup.epochs
