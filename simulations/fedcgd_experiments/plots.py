"""Plots of sweeps: accuracy against λ and against ε, running times, and error ratios, readable without colour."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, TypeVar

import matplotlib

matplotlib.use("Agg")  # a server has no display
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcgd.accounting.selection import select_lambda
from fedcgd_experiments.experiment import Record, Setup, identity
from fedcgd_experiments.sweep import best_rates, to_point

matplotlib.rcParams["svg.hashsalt"] = "fedcgd"  # the same figures give the same file

STYLES = [(line, marker) for line, marker in zip(["-", "--", "-.", ":"] * 3, "osD^vP*Xph<>", strict=True)]
ERRORS: tuple[Literal["rmse", "max-se"], ...] = ("rmse", "max-se")

Summary = tuple[float, float]
"""(mean, sample standard deviation) over seeds."""

Value = TypeVar("Value")


def save(figure: Figure, path: Path) -> None:
    """Write the file `path`, in the format that its ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def by_setup(runs: Sequence[Record], split: str) -> dict[Setup, Summary]:
    """Accuracy of each setup on `split`, at the learning rate that was best on validation."""
    rates = best_rates(runs)
    values: dict[Setup, list[float]] = defaultdict(list)
    for record in runs:
        point = to_point(record)
        if point.split == split and point.learning_rate == rates.get(point.setup):
            values[point.setup].append(record["accuracy"])
    return {setup: (fmean(v), stdev(v) if len(v) > 1 else 0.0) for setup, v in values.items()}


def optimal_lambdas(setup: Setup) -> tuple[float, float]:
    """The λ with the least RMSE, and the one with the least MaxSE, without amplification."""
    rmse, max_se = (
        select_lambda(setup.participation(), objective=objective, epsilon=setup.epsilon, delta=setup.delta).lam
        for objective in ERRORS
    )
    return rmse, max_se


def amplified_optimum(calibrations: Mapping[str, Record], like: Setup) -> float | None:
    """The swept λ with the least RMSE under Balls-in-Bins at the budget of `like`; None if none was swept."""
    errors = {}
    for record in calibrations.values():
        setup = Setup(**record["setup"])
        if setup.family == "lambda-cgd" and plain(setup) == replace(plain(like), sampling="balls-in-bins"):
            errors[setup.lam] = record["rmse"]
    return min(errors, key=lambda lam: errors[lam]) if errors else None


def accuracy_against_lambda(
    runs: Sequence[Record], calibrations: Mapping[str, Record], *, split: str = "validation"
) -> Figure:
    """One panel per ε: accuracy of DP-λCGD against λ (0 is DP-SGD), with the error-optimal λ as vertical lines.

    Without amplification and with Balls-in-Bins: other samplings have no λ but 0.
    """
    summaries = {
        setup: value
        for setup, value in by_setup(runs, split).items()
        if setup.name in ("dp-sgd", "lambda-cgd") and setup.sampling in ("none", "balls-in-bins")
    }
    if not summaries:
        raise ValueError(f"no dp-sgd or lambda-cgd runs judged by {split} examples are in these results")
    curves: dict[float, dict[str, dict[float, Summary]]] = defaultdict(lambda: defaultdict(dict))
    for setup, value in sorted(summaries.items(), key=lambda item: (item[0].epsilon, item[0].lam)):
        name = _training(setup) + (", normalized" if setup.spelling.normalized else "")
        curves[setup.epsilon][name][setup.lam] = value
    lams = {setup.lam for setup in summaries}
    styles = dict(
        zip(sorted({name for panel in curves.values() for name in panel}, reverse=True), STYLES, strict=False)
    )
    figure, panels = plt.subplots(
        1, len(curves), figsize=(3.6 * len(curves) + 0.6, 4.0), layout="constrained", squeeze=False, sharey=True
    )
    for axes, (budget, panel) in zip(panels[0], curves.items(), strict=True):
        for name, curve in panel.items():
            means, spreads = zip(*curve.values(), strict=True)
            axes.errorbar(
                list(curve), means, yerr=spreads, fmt="".join(styles[name]), color="black", capsize=3, label=name
            )
        first = next(setup for setup in summaries if setup.epsilon == budget)
        rmse, max_se = optimal_lambdas(first)
        lines = [("RMSE", rmse, "--"), ("MaxSE", max_se, ":")]
        amplified = amplified_optimum(calibrations, first)
        if amplified is not None:
            lines.append(("amplified RMSE tried", amplified, "-."))
        marks = [
            axes.axvline(lam, color="0.45", linestyle=line, label=f"least {error}: {lam:.3g}")
            for error, lam, line in lines
        ]
        axes.set(xlabel="λ (0 is DP-SGD)", title=f"ε = {budget:g}, δ = {first.delta:g}")
        axes.set_xscale("function", functions=(_inverse_gap, _from_inverse_gap))
        axes.set_xlim(-0.1, _from_inverse_gap(_inverse_gap(max(*(lam for _, lam, _ in lines), *lams)) + 0.3))
        axes.set_xticks([0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95], ["0", ".3", ".5", ".7", ".8", ".9", ".95"])
        axes.legend(handles=marks, fontsize=7)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"{split} accuracy")
    shown = {str(mark.get_label()): mark for axes in panels[0] for mark in axes.containers}
    figure.legend([shown[name] for name in styles], list(styles), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def accuracy_against_epsilon(runs: Sequence[Record]) -> Figure:
    """A panel per sampling: test accuracy of each mechanism against ε; of DP-λCGD the λ that was best on validation."""
    curves = _by_family(runs, by_setup(runs, "test"))
    if not curves:
        raise ValueError("no runs judged by test examples are in these results; sweep without --no-test")
    figure, panels = _panels(len(curves))
    styles = _styles(curves)
    for axes, (training, families) in zip(panels, curves.items(), strict=True):
        for place, (label, curve) in enumerate(families.items()):
            means, spreads = zip(*curve.values(), strict=True)
            apart = 1.02 ** (place - (len(families) - 1) / 2)  # so that error bars do not hide each other
            axes.errorbar([e * apart for e in curve], means, yerr=spreads, capsize=3, label=label, **styles[label])
        _epsilon_axis(axes, training, families)
    panels[0].set_ylabel("test accuracy (mean and standard deviation)")
    return figure


def best_lambda(runs: Sequence[Record]) -> set[Setup]:
    """All setups, but of DP-λCGD at each budget only the one with the best mean validation accuracy."""
    groups: dict[str, dict[Setup, float]] = defaultdict(dict)
    for setup, (mean, _) in by_setup(runs, "validation").items():
        groups[identity(replace(setup, mechanism=setup.family))][setup] = mean
    return {max(sorted(group, key=identity), key=lambda setup: group[setup]) for group in groups.values()}


def error_ratios(runs: Sequence[Record], calibrations: Mapping[str, Record]) -> Figure:
    """A panel per sampling: RMSE of each mechanism that was tested over that of DP-SGD, against ε.

    Of DP-λCGD the λ that was best on validation.
    """
    errors = {
        setup: float(calibrations[identity(setup)]["rmse"])
        for setup in by_setup(runs, "test")
        if identity(setup) in calibrations
    }
    ratios = {setup: error / errors[plain(setup)] for setup, error in errors.items() if plain(setup) in errors}
    curves = _by_family(runs, {setup: ratio for setup, ratio in ratios.items() if setup.mechanism != "dp-sgd"})
    if not curves:
        raise ValueError("RMSE ratios need dp-sgd and another mechanism tested at the same budget")
    figure, panels = _panels(len(curves))
    styles = _styles(curves)
    for axes, (training, families) in zip(panels, curves.items(), strict=True):
        for label, curve in families.items():
            axes.plot(list(curve), list(curve.values()), label=label, **styles[label])
        axes.axhline(1, color="0.35", linewidth=0.8)
        axes.set_ylim(bottom=0)
        _epsilon_axis(axes, training, families)
    panels[0].set_ylabel("RMSE over that of DP-SGD")
    return figure


def runtime_bars(records: Sequence[Record]) -> Figure:
    """Time of a step over that of DP-SGD, for each way to make the noise, with quartiles; a panel per model."""
    figure, panels = plt.subplots(
        1, len(records), figsize=(3.6 * len(records) + 0.4, 3.6), layout="constrained", squeeze=False
    )
    hatches = {"dp-sgd": "", "replay": "//", "buffer": "xx", "cpu-buffer": ".."}
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
        axes.set(title=f"{record['model']} ({record['parameters'] / 1e6:.3g} M), {record['device']}")
        axes.axhline(1, color="0.35", linewidth=0.8)
    panels[0][0].set_ylabel("time of a step over that of DP-SGD")
    return figure


def plain(setup: Setup) -> Setup:
    """DP-SGD where `setup` is."""
    return replace(setup, mechanism="dp-sgd")


def _by_family(runs: Sequence[Record], values: Mapping[Setup, Value]) -> dict[str, dict[str, dict[float, Value]]]:
    """Training → mechanism → ε → value, each sorted; DP-SGD comes first, of DP-λCGD only the best λ is left."""
    chosen = best_lambda(runs)
    curves: dict[str, dict[str, dict[float, Value]]] = defaultdict(lambda: defaultdict(dict))
    for setup in sorted(values, key=_order):
        if setup in chosen:
            curves[_training(setup)][setup.family][setup.epsilon] = values[setup]
    return curves


def _styles(curves: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """How each mechanism is drawn, the same in every panel."""
    labels = dict.fromkeys(label for families in curves.values() for label in families)
    return {
        label: {"linestyle": line, "marker": marker, "color": f"C{place}"}
        for place, (label, (line, marker)) in enumerate(zip(labels, cycle(STYLES), strict=False))
    }


def _order(setup: Setup) -> tuple[Any, ...]:
    return setup.sampling != "none", setup.mechanism != "dp-sgd", setup.family, setup.epsilon


def _inverse_gap(lam: Any) -> Any:
    """log(1/(1 − λ)): the scale on which errors are smooth in λ."""
    return -np.log1p(-np.minimum(lam, 0.9999))


def _from_inverse_gap(scale: Any) -> Any:
    return -np.expm1(-scale)


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure, panels = plt.subplots(
        1, count, figsize=(5.0 * count + 0.6, 4.2), layout="constrained", squeeze=False, sharey=True
    )
    return figure, panels[0]


def _training(setup: Setup) -> str:
    sampling = "no amplification" if setup.sampling == "none" else setup.sampling
    return f"{sampling}, {setup.epochs} epochs of {setup.steps} steps"


def _epsilon_axis(axes: Axes, training: str, families: Mapping[str, Mapping[float, Any]]) -> None:
    budgets = sorted({budget for curve in families.values() for budget in curve})
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.set(xlabel="ε (add or remove one example)", title=training)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
