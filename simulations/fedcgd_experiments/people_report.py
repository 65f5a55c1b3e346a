"""The tables and plots of the studies with people: test accuracy of the tuned arms, compared seed by seed with DP-FedAvg."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp

from fedcgd_experiments.claims import claims
from fedcgd_experiments.experiment import Record
from fedcgd_experiments.people import STUDIES, best, by_point, moved, name_of, tuning
from fedcgd_experiments.people_run import PeoplePoint
from fedcgd_experiments.plots import MARKS
from fedcgd_experiments.significance import holm

BASELINE = "DP-FedAvg"
TITLES = {
    "tweets": "Tweets, all mechanisms",
    "epsilon": "Fashion-MNIST, against ε",
    "skew": "Fashion-MNIST, against how different people are",
    "cohort": "Fashion-MNIST, against the cohort of a fixed population",
    "population": "Fashion-MNIST, extrapolated to larger populations",
    "proximal": "Fashion-MNIST, FedProx",
    "tanh-cnn": "Fashion-MNIST, tanh-CNN",
}
MARKED = {
    "DP-FedAvg": MARKS["dp-sgd"],
    "DP-λCGD": MARKS["lambda-cgd"],
    "BISR": MARKS["bisr"],
    "BLT": MARKS["blt"],
    "banded Toeplitz": MARKS["banded-toeplitz"],
    "tree": MARKS["tree"],
    "Flower, fixed clipping": ("0.5", "x"),
    "Flower, adaptive clipping": ("0.5", "+"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm at a setting of a study, tuned, and its test records by seed, with those of the baseline beside them."""

    study: str
    setting: Mapping[str, Any]
    arm: str
    chosen: PeoplePoint
    records: tuple[Record, ...]
    baseline: tuple[Record, ...]
    corrected: float = float("nan")

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy of each seed."""
        return [record["accuracy"] for record in self.records]

    @property
    def differences(self) -> list[float]:
        """Test accuracy minus that of the baseline with the same seed, where both are there."""
        theirs = {record["point"]["seed"]: record["accuracy"] for record in self.baseline}
        return [r["accuracy"] - theirs[r["point"]["seed"]] for r in self.records if r["point"]["seed"] in theirs]

    @property
    def p_value(self) -> float:
        """Of a two-sided paired t-test of no difference to the baseline; NaN for the baseline itself and for one seed."""
        values = self.differences
        if self.arm == BASELINE or len(values) < 2 or np.ptp(values) == 0:
            return float("nan")
        return float(ttest_1samp(values, 0.0).pvalue)


def rows(records: Sequence[Record], study: str) -> list[Row]:
    """What of `study` has been tuned and tested on all seeds, with p after Holm's correction over the study."""
    known, plan = by_point(records), STUDIES[study]
    found: list[Row] = []
    for setting in plan.settings:
        tested = {}
        for arm in plan.arms:
            chosen = best(plan, arm, setting, known)
            if chosen is None:
                continue
            tests = [known.get(name_of(moved(chosen, seed=seed, split="test"))) for seed in plan.seeds]
            if None not in tests:
                tested[arm] = chosen, tuple(record for record in tests if record)
        baseline = tested[BASELINE][1] if BASELINE in tested else ()
        found += [
            Row(study=study, setting=setting, arm=arm, chosen=chosen, records=tests, baseline=baseline)
            for arm, (chosen, tests) in tested.items()
        ]
    corrected = holm([row.p_value for row in found])
    return [Row(**vars(row) | {"corrected": p}) for row, p in zip(found, corrected, strict=True)]


def table(found: Sequence[Row]) -> str:
    """`found` as Markdown: percent, ± one standard deviation over seeds, differences in points."""
    lines = [
        "| setting | arm | tuned to | σ | test accuracy | against DP-FedAvg | p | p (Holm) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        low = row.arm != BASELINE and bool(row.baseline)
        lines.append(
            f"| {setting_text(row.setting)} | {row.arm} | {tuned_text(row.chosen)} | {row.records[0]['noise_multiplier']:.3g} | "
            f"{100 * fmean(row.accuracies):.1f} ± {100 * stdev(row.accuracies):.1f} | "
            + (
                f"{100 * fmean(row.differences):+.1f} | {p_text(row.p_value)} | {p_text(row.corrected)} |"
                if low
                else "| | |"
            )
        )
    return "\n".join(lines)


def setting_text(setting: Mapping[str, Any]) -> str:
    """What differs, in words."""
    words = {
        "epsilon": "ε = {}",
        "cohort": "{} a round",
        "users": "{}",
        "population": "population {:,}",
        "proximal": "µ = {}",
    }
    return ", ".join(
        "the population there is" if (name, value) == ("population", 0) else words[name].format(value)
        for name, value in setting.items()
    )


def tuned_text(point: PeoplePoint) -> str:
    """What was chosen on validation examples."""
    match point.mechanism:
        case "flower-fixed":
            return f"clip norm {point.clip_norm:g}"
        case "flower-adaptive":
            return f"first norm {point.clip_norm:g}, quantile {point.quantile:g}"
        case _:
            return f"`{point.mechanism}`, rate {point.learning_rate:g}"


def p_text(p: float) -> str:
    """A p-value with two digits, or what it is below."""
    return "" if np.isnan(p) else "< .001" if p < 0.001 else f"{p:.2g}".removeprefix("0")


def report(records: Sequence[Record]) -> str:
    """All tables, and the processor minutes that each study took, as Markdown."""
    parts = []
    for study, title in TITLES.items():
        found = rows(records, study)
        if any(row.arm != BASELINE for row in found):
            meant = claims(record for row in found for record in row.records)
            parts.append(
                f"### {title}\n\n{table(found)}\n\n{meant} {len(STUDIES[study].seeds)} test seeds; {spent_text(records, study)}."
            )
    return "\n\n".join(parts)


def spent_text(records: Iterable[Record], study: str) -> str:
    """How many trainings of `study` there are, and the processor minutes that they took."""
    known, plan = by_point(records), STUDIES[study]
    names = set()
    for setting in plan.settings:
        for arm in plan.arms:
            names |= {name_of(point) for point in tuning(plan, arm, setting, known)}
            chosen = best(plan, arm, setting, known)
            names |= {name_of(moved(chosen, seed=s, split="test")) for s in plan.seeds} if chosen else set()
    seconds = [known[name]["cpu_seconds"] for name in names if name in known]
    return f"{len(seconds)} trainings, {sum(seconds) / 60:.1f} processor minutes"


def plot(found: Sequence[Row], study: str) -> Figure:
    """Mean test accuracy and its spread against the setting, a line for each arm."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    labels = list(dict.fromkeys(setting_text(row.setting) for row in found))
    arms = list(dict.fromkeys(row.arm for row in found))
    for i, arm in enumerate(arms):
        mine = [row for row in found if row.arm == arm]
        places = [labels.index(setting_text(row.setting)) + (i - len(arms) / 2) * 0.04 for row in mine]
        color, marker = MARKED[arm]
        axes.errorbar(
            places,
            [fmean(row.accuracies) for row in mine],
            yerr=[stdev(row.accuracies) for row in mine],
            color=color,
            marker=marker,
            linestyle="--" if arm.startswith("Flower") else "-",
            capsize=2,
            linewidth=1.2,
            label=arm,
        )
    axes.set(xticks=range(len(labels)), xticklabels=labels, ylabel="test accuracy", title=TITLES[study])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
