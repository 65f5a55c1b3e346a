"""The tables and plots of the studies with people: test accuracy of the tuned arms, compared seed by seed with DP-FedAvg."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp

from fedcgd_experiments.claims import claims
from fedcgd_experiments.experiment import Record
from fedcgd_experiments.people import STUDIES, Study, best, by_point, moved, name_of, point_of, tuning
from fedcgd_experiments.people_run import PeoplePoint
from fedcgd_experiments.plots import MARKS
from fedcgd_experiments.significance import holm

OURS = "DP-λCGD"
CORRELATED = (OURS, "BISR", "BLT", "banded Toeplitz", "tree")
TITLES = {
    "tweets": "Tweets, all mechanisms",
    "epsilon": "Fashion-MNIST, against ε",
    "skew": "Fashion-MNIST, against how different people are",
    "cohort": "Fashion-MNIST, against the cohort of a fixed population",
    "population": "Fashion-MNIST, extrapolated to larger populations",
    "proximal": "Fashion-MNIST, FedProx with five local epochs",
    "local": "Fashion-MNIST, local training tuned too",
    "sampling": "Fashion-MNIST, with secret sampling of people",
    "tanh-cnn": "Fashion-MNIST, tanh-CNN",
}
MARKED = {
    "DP-FedAvg": MARKS["dp-sgd"],
    "DP-λCGD": MARKS["lambda-cgd"],
    "BISR": MARKS["bisr"],
    "BLT": MARKS["blt"],
    "banded Toeplitz": MARKS["banded-toeplitz"],
    "tree": MARKS["tree"],
    "Flower, fixed clipping": ("0.45", "x"),
    "Flower, adaptive clipping": ("0.7", "+"),
    "DP-FedAvg, Poisson": (MARKS["dp-sgd"][0], "*"),
    "DP-FedAvg, Balls-in-Bins": (MARKS["dp-sgd"][0], "P"),
    "DP-λCGD, Balls-in-Bins": (MARKS["lambda-cgd"][0], "P"),
}


AXES = {
    "epsilon": "ε of a person",
    "cohort": "people a round",
    "users": "how labels are spread over people (left: most skewed)",
    "population": "population (hollow: extrapolated, the noise of cohorts larger in proportion)",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm at a setting of a study, tuned, and its test records by seed, with those of the arm it is compared with."""

    setting: Mapping[str, Any]
    arm: str
    chosen: PeoplePoint
    records: tuple[Record, ...]
    baseline: tuple[Record, ...]
    corrected: float = float("nan")

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy of each seed whose training finished."""
        return [record["accuracy"] for record in self.records if not record.get("failure")]

    @property
    def differences(self) -> list[float]:
        """Test accuracy minus that of the baseline with the same seed; empty unless all trainings of both finished."""
        if any(record.get("failure") for record in (*self.records, *self.baseline)):
            return []
        theirs = {record["point"]["seed"]: record["accuracy"] for record in self.baseline}
        return [r["accuracy"] - theirs[r["point"]["seed"]] for r in self.records if r["point"]["seed"] in theirs]

    @property
    def p_value(self) -> float:
        """Of a two-sided paired t-test of no difference to the baseline; NaN for the baseline itself and for one seed."""
        values = self.differences
        if len(values) < 2 or np.ptp(values) == 0:
            return float("nan")
        return float(ttest_1samp(values, 0.0).pvalue)


def rows(records: Sequence[Record], study: Study) -> list[Row]:
    """What of `study` has been tuned and tested on all seeds, with p after Holm's correction over the study.

    Each arm is compared with the study's baseline at the same setting.
    """
    known, baseline = by_point(records), study.baseline
    found: list[Row] = []
    for setting in study.settings:
        tested = {}
        for arm in study.arms:
            chosen = best(study, arm, setting, known)
            if chosen is None:
                continue
            tests = [known.get(name_of(moved(chosen, seed=seed, split="test"))) for seed in study.seeds]
            if None not in tests:
                tested[arm] = chosen, tuple(record for record in tests if record)
        theirs = tested[baseline][1] if baseline in tested else ()
        found += [
            Row(setting=setting, arm=arm, chosen=chosen, records=tests, baseline=() if arm == baseline else theirs)
            for arm, (chosen, tests) in tested.items()
        ]
    corrected = holm([row.p_value for row in found])
    return [replace(row, corrected=p) for row, p in zip(found, corrected, strict=True)]


def table(found: Sequence[Row], baseline: str) -> str:
    """`found` as Markdown: percent, ± one standard deviation over seeds, differences to `baseline` in points."""
    lines = [
        f"| setting | arm | tuned to | σ | test accuracy | against {baseline} | p | p (Holm) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    local_too = any(row.chosen.local_epochs > 1 for row in found)
    for row in found:
        compared = (
            f"{100 * fmean(row.differences):+.1f} | {p_text(row.p_value)} | {p_text(row.corrected)} |"
            if row.differences
            else "| | |"
        )
        lines.append(
            f"| {setting_text(row.setting)} | {row.arm} | {tuned_text(row.chosen, local_too=local_too)} | "
            f"{row.records[0]['noise_multiplier']:.3g} | {accuracy_text(row)} | {compared}"
        )
    return "\n".join(lines)


def pairs_of(records: Sequence[Record], study: Study) -> list[Row]:
    """The correlated arms of `study`, compared with DP-λCGD."""
    return rows(records, replace(study, arms={arm: study.arms[arm] for arm in CORRELATED}, baseline=OURS))


def between(found: Sequence[Row]) -> str:
    """The differences of `found` and their p after Holm's correction as Markdown, a line for each arm."""
    settings = list(dict.fromkeys(setting_text(row.setting) for row in found))
    cells = {
        (
            row.arm,
            setting_text(row.setting),
        ): f"{100 * fmean(row.differences):+.1f} ({p_text(row.corrected) or 'equal'})"
        for row in found
        if row.differences
    }
    return "\n".join(
        [f"| arm | {' | '.join(settings)} |", "|---" * (len(settings) + 1) + "|"]
        + [
            f"| {arm} | {' | '.join(cells.get((arm, setting), '') for setting in settings)} |"
            for arm in dict.fromkeys(arm for arm, _ in cells)
        ]
    )


def accuracy_text(row: Row) -> str:
    """Mean and standard deviation in percent, and how many trainings finished if some did not."""
    found, all_of_them = row.accuracies, len(row.records)
    mean = f"{100 * fmean(found):.1f}" if found else "none"
    spread = f" ± {100 * stdev(found):.1f}" if len(found) > 1 else ""
    return mean + spread + (f" ({len(found)} of {all_of_them} finished)" if len(found) < all_of_them else "")


def setting_text(setting: Mapping[str, Any]) -> str:
    """What differs, in words."""
    words = {
        "epsilon": "ε = {:g}",
        "cohort": "{} a round",
        "users": "{}",
        "population": "population {:,}",
    }
    return ", ".join(
        "the population there is"
        if (name, value) == ("population", 0)
        else words.get(name, name.replace("_", " ") + " {}").format(value)
        for name, value in setting.items()
    )


def tuned_text(point: PeoplePoint, *, local_too: bool = False) -> str:
    """What was chosen on validation examples; Flower's strategies always choose their local training too."""
    epochs = f", {point.local_epochs} epochs" if point.local_epochs > 1 else ""
    local = f"{epochs}, local rate {point.local_learning_rate:g}"
    match point.mechanism:
        case "flower-fixed":
            return f"clip norm {point.clip_norm:g}{local}"
        case "flower-adaptive":
            return f"first norm {point.clip_norm:g}, quantile {point.quantile:g}{local}"
        case _:
            return f"`{point.mechanism}`, rate {point.learning_rate:g}{local if local_too else ''}"


def p_text(p: float) -> str:
    """A p-value with two digits, or what it is below."""
    return "" if np.isnan(p) else "< .001" if p < 0.001 else f"{p:.2g}".removeprefix("0")


def report(records: Sequence[Record]) -> str:
    """All tables, what broke off, and the processor minutes that each study took, as Markdown."""
    return "\n\n".join(filter(None, (section(records, name) for name in TITLES)))


def section(records: Sequence[Record], name: str) -> str:
    """The tables of the study `name`; empty if there is nothing to compare in it yet."""
    study = STUDIES[name]
    found = rows(records, study)
    if len(found) < 2 or len({str(row.setting) for row in found}) < min(2, len(study.settings)):
        return ""
    parts = [f"### {TITLES[name]}", table(found, study.baseline)]
    if study.arms.keys() >= set(CORRELATED):
        parts.append(f"Points more or less than {OURS}, and p (Holm):\n\n{between(pairs_of(records, study))}")
    parts.append(f"{caption(found)} {len(study.seeds)} test seeds; {spent_text(records, study)}.")
    if failures := failures_text(records, study):
        parts.append(failures)
    return "\n\n".join(parts)


def caption(found: Sequence[Row]) -> str:
    """What the ε of `found` means, and which it is if the rows do not say it."""
    said = sorted({row.chosen.epsilon for row in found if "epsilon" not in row.setting})
    meant = claims(record for row in found for record in row.records)
    return meant.replace("ε at", f"ε = {', '.join(f'{epsilon:g}' for epsilon in said)} at") if said else meant


def _done(records: Iterable[Record], study: Study) -> list[tuple[str, Record]]:
    """The records of `study`, and of which arm each is: tuning and tests of what was chosen."""
    known = by_point(records)
    found: dict[str, str] = {}
    for setting in study.settings:
        for arm in study.arms:
            chosen = best(study, arm, setting, known)
            tests = [moved(chosen, seed=s, split="test") for s in study.seeds] if chosen else []
            found |= {name_of(point): arm for point in [*tuning(study, arm, setting, known), *tests]}
    return [(arm, known[name]) for name, arm in found.items() if name in known]


def failures_text(records: Iterable[Record], study: Study) -> str:
    """What of `study` broke off, by arm and reason; such a training has no accuracy, and is never chosen. Empty if none."""
    reasons: Counter[str] = Counter()
    for arm, record in _done(records, study):
        if record.get("failure"):
            point = point_of(record)
            reasons[f"{arm}, {tuned_text(point)}, {point.split}: {record['failure']}"] += 1
    listed = "\n".join(f"- {reason} ({count} trainings)" for reason, count in reasons.items())
    return f"Broke off, and have no accuracy:\n\n{listed}" if listed else ""


def spent_text(records: Iterable[Record], study: Study) -> str:
    """How many trainings of `study` there are, and the processor minutes that they took."""
    seconds = [record["cpu_seconds"] for _, record in _done(records, study)]
    return f"{len(seconds)} trainings, {sum(seconds) / 60:.1f} processor minutes"


def plot(found: Sequence[Row], title: str) -> Figure:
    """Mean test accuracy and its spread over seeds against the setting, a line for each arm; extrapolations are hollow."""
    figure, axes = plt.subplots(figsize=(7, 4.8), layout="constrained")
    labels = list(dict.fromkeys(setting_text(row.setting) for row in found))
    arms = list(dict.fromkeys(row.arm for row in found))
    for i, arm in enumerate(arms):
        mine = [row for row in found if row.arm == arm and row.accuracies]
        places = [labels.index(setting_text(row.setting)) + (i - (len(arms) - 1) / 2) * 0.05 for row in mine]
        color, marker = MARKED.get(arm, ("C8", "8"))
        means = [fmean(row.accuracies) for row in mine]
        spreads = [stdev(row.accuracies) if len(row.accuracies) > 1 else 0.0 for row in mine]
        line = "--" if arm.startswith("Flower") else "-"
        axes.errorbar(
            places, means, yerr=spreads, color=color, linestyle=line, linewidth=1.2, capsize=2, elinewidth=0.8
        )
        for row, x, y in zip(mine, places, means, strict=True):
            fill = "none" if row.chosen.population else "full"
            axes.plot(x, y, color=color, marker=marker, fillstyle=fill, linestyle="none")
        axes.plot([], [], color=color, marker=marker, linestyle=line, linewidth=1.2, label=arm)
    varied = list(dict.fromkeys(name for row in found for name in row.setting))
    axes.set(xticks=range(len(labels)), xticklabels=labels, ylabel="test accuracy", title=title)
    axes.set_xlabel(" and ".join(AXES.get(name, name.replace("_", " ")) for name in varied))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    seeds = max(len(row.records) for row in found)
    said = f"{caption(found)} Mean and standard deviation of {seeds} seeds."
    figure.supxlabel(textwrap.fill(said, 110), fontsize=7, color="0.35")
    return figure
