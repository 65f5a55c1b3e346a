"""Plots of studies: the gain of correlated noise as a heat map, and accuracy against work; readable without colour."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")  # a server has no display
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.stats import sem

from fedcgd_experiments.comparison import Tuned, epsilons, works
from fedcgd_experiments.results import Record
from fedcgd_experiments.tables import CASES, Found, headline_comparisons

matplotlib.rcParams["svg.hashsalt"] = "fedcgd"  # the same figures give the same file

STYLES: dict[str, dict[str, str]] = {
    "DP-SGD": {"color": "0.55", "marker": "o"},
    "DP-SGD, full batch": {"color": "0.0", "marker": "D"},
    "λ-CGD, default λ, constant rate": {"color": "C1", "marker": "v"},
    "λ-CGD, default λ": {"color": "C0", "marker": "s"},
    "λ-CGD, λ = 0.9": {"color": "C0", "marker": "s"},
    "band-mf": {"color": "C2", "marker": "*"},
    "DP-SGD, Poisson": {"color": "0.0", "marker": "P", "linestyle": ":"},
    "λ-CGD, Balls-in-Bins": {"color": "C3", "marker": "X", "linestyle": "--"},
    "λ-CGD, b-min-sep": {"color": "C4", "marker": "^", "linestyle": "--"},
}
"""The arms that the frontier shows, and how; others are on the data page."""


def save(figure: Figure, path: Path) -> None:
    """Write the file `path`, in the format that its ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def gains(studies: Sequence[Found]) -> Figure:
    """A panel for each case of the verdict, two a row: data × ε, what λ-CGD gains over the better baseline; framed if p < .05."""
    compared = [{found.study.title: headline_comparisons(found, case) for found in studies} for case in CASES]
    titles = [found.study.title for found in studies if any(panel[found.study.title] for panel in compared)]
    if not titles:
        raise ValueError("no study has an arm of λ-CGD and its baselines complete")
    rows = [row for panel in compared for found in panel.values() for row in found]
    budgets = sorted({row.epsilon for row in rows})
    largest = max(abs(100 * row.pairs.difference) for row in rows)
    figure, panels = plt.subplots(
        2, len(CASES) // 2, figsize=(8.2, 0.7 * len(titles) + 2), layout="constrained", sharey=True
    )
    for axes, case, panel in zip(panels.flat, CASES, compared, strict=True):
        values = np.full((len(titles), len(budgets)), np.nan)
        for i, title in enumerate(titles):
            for row in panel[title]:
                j, points = budgets.index(row.epsilon), 100 * row.pairs.difference
                values[i, j], sure = points, row.corrected < 0.05
                axes.text(
                    j, i, f"{points:+.1f}", ha="center", va="center", fontsize=10,
                    color="white" if abs(points) > 0.6 * largest else "black", fontweight="bold" if sure else "normal",
                )  # fmt: skip
                if sure:
                    axes.add_patch(Rectangle((j - 0.47, i - 0.45), 0.94, 0.9, fill=False, linewidth=1.2))
        axes.imshow(values, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
        axes.set_xticks(range(len(budgets)), [f"ε = {budget:g}" for budget in budgets], fontsize=8)
        axes.set_yticks(range(len(titles)), titles)
        axes.set_title(case.label, fontsize=10)
        axes.tick_params(length=0)
    figure.supxlabel(
        "points of test accuracy over the better baseline; framed: p < .05 after Holm's correction", fontsize=8
    )
    return figure


def frontier(studies: Sequence[Found], epsilon: float) -> Figure:
    """A panel for each study of several amounts of work: accuracy of the tuned arms at `epsilon` against it, ± standard error."""
    shown = [
        found for found in studies if epsilon in epsilons(found.study) and found.tuned and len(works(found.study)) > 1
    ]
    if not shown:
        raise ValueError(f"no study has results at ε = {epsilon:g}")
    figure, panels = plt.subplots(
        1, len(shown), figsize=(3.7 * len(shown) + 0.4, 4.6), layout="constrained", squeeze=False
    )
    for axes, found in zip(panels[0], shown, strict=True):
        for arm, style in STYLES.items():
            mine = [
                t for t in found.tuned if t.arm == arm and t.setting["epsilon"] == epsilon and len(t.accuracies) > 1
            ]
            if mine and not (arm == "λ-CGD, λ = 0.9" and "λ-CGD, default λ" in found.study.arms):
                axes.errorbar(
                    [t.setting[found.study.work] for t in mine], *_means(mine), label=arm, capsize=2, markersize=6, **style
                )  # fmt: skip
        counts = works(found.study)
        axes.set_xscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set(title=f"{found.study.title}, ε = {epsilon:g}", xlabel=found.study.unit)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("test accuracy, %")
    marks = {str(mark.get_label()): mark for axes in panels[0] for mark in axes.containers}
    figure.legend(list(marks.values()), list(marks), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _means(found: Sequence[Tuned]) -> tuple[list[float], list[float]]:
    values = [[100 * value for value in one.accuracies.values()] for one in found]
    return [fmean(v) for v in values], [float(sem(v)) for v in values]


def lambdas(found: Found) -> Figure:
    """Test accuracy of DP-λCGD against λ (0 is DP-SGD), the rate tuned for each λ; a line for each ε, ± standard deviation."""
    figure, axes = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
    for epsilon, line in zip(epsilons(found.study), itertools.cycle(("-", "--", ":", "-."))):
        shown = sorted(
            (float(one.point.mechanism.partition(":")[2] or 0), [100 * value for value in one.accuracies.values()])
            for one in found.tuned
            if one.setting["epsilon"] == epsilon and one.accuracies
        )
        if shown:
            x, tests = zip(*shown, strict=True)
            means, spreads = [fmean(row) for row in tests], [float(np.std(row)) for row in tests]
            axes.errorbar(x, means, yerr=spreads, linestyle=line, marker="o", capsize=2, label=f"ε = {epsilon:g}")
    if not axes.containers:
        raise ValueError(f"no arm of {found.study.name} is complete")
    row = next(iter(found.tuned[0].tests.values()))
    title = f"{found.study.title}: {row['task']}, {row['model']}, δ = {row['delta']:g}"
    axes.set(xlabel="λ (0: DP-SGD)", ylabel="test accuracy, %", title=title)
    axes.legend()
    return figure


def runtime_bars(records: Sequence[Record]) -> Figure:
    """Time of a step over that of the first row (Opacus, or in older records DP-SGD), with quartiles; a panel per model."""
    if not records:
        raise ValueError("there are no running times")
    figure, panels = plt.subplots(
        1, len(records), figsize=(3.6 * len(records) + 0.4, 3.6), layout="constrained", squeeze=False
    )
    hatches = {"opacus": "oo", "dp-sgd": "", "replay": "//", "buffer": "xx", "cpu-buffer": ".."}
    for axes, record in zip(panels[0], records, strict=True):
        rows = record["rows"]
        places = np.arange(len(rows))
        low = [row["ratio"] - row["quartiles"][0] for row in rows]
        high = [row["quartiles"][1] - row["ratio"] for row in rows]
        bars = axes.bar(
            places, [row["ratio"] for row in rows], yerr=(low, high), capsize=3, color="0.85", edgecolor="black"
        )
        for bar, row in zip(bars, rows, strict=True):
            bar.set_hatch(hatches[row["noise"]])
        names = [row["noise"] + (f" p={row['bands']}" if row["bands"] > 1 else "") for row in rows]
        axes.set_xticks(places, names, rotation=60, ha="right", fontsize=8)
        axes.set(title=f"{record['model']} ({record['parameters'] / 1e6:.3g} M), {record['mode']}, {record['device']}")
        axes.axhline(1, color="0.35", linewidth=0.8)
    panels[0][0].set_ylabel(f"time of a step over that of {records[0]['rows'][0]['noise']}")
    return figure
