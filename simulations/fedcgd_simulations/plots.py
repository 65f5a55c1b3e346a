"""Plots of sweeps: accuracy against λ and against ε, running times, and error ratios, readable without colour."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import matplotlib

matplotlib.use("Agg")  # a server has no display
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcgd.accounting.selection import select_lambda
from fedcgd_simulations.point import Record, Setup, identity
from fedcgd_simulations.sweep import to_point

STYLES = [(line, marker) for line, marker in zip(["-", "--", "-.", ":"] * 3, "osD^vP*Xph<>", strict=True)]
ERRORS: tuple[Literal["rmse", "max-se"], ...] = ("rmse", "max-se")

Summary = tuple[float, float]
"""(mean, sample standard deviation) over seeds."""


def save(figure: Figure, path: Path) -> list[Path]:
    """Write `path` as PNG and as SVG; both paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for target in written:
        figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
    return written


def by_setup(runs: Iterable[Record], split: str) -> dict[Setup, Summary]:
    """Accuracy of each setup on `split`, at the learning rate that is best there if there are several."""
    values: dict[Setup, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in runs:
        point = to_point(record)
        if point.split == split:
            values[point.setup][point.learning_rate].append(record["accuracy"])
    best = {setup: max(rates.values(), key=fmean) for setup, rates in values.items()}
    return {setup: (fmean(v), stdev(v) if len(v) > 1 else 0.0) for setup, v in best.items()}


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
        if setup.mechanism == "lambda-cgd" and replace(setup, lam=None) == replace(
            like, mechanism="lambda-cgd", lam=None, sampling="balls-in-bins"
        ):
            errors[setup.lam] = record["rmse"]
    return min(errors, key=lambda lam: errors[lam]) if errors else None


def accuracy_against_lambda(
    runs: Sequence[Record], calibrations: Mapping[str, Record], *, split: str = "validation"
) -> Figure:
    """One panel per ε: accuracy of DP-λCGD against λ (0 is DP-SGD), with the error-optimal λ as vertical lines."""
    summaries = {
        setup: value for setup, value in by_setup(runs, split).items() if setup.mechanism in ("dp-sgd", "lambda-cgd")
    }
    if not summaries:
        raise ValueError(f"no dp-sgd or lambda-cgd runs judged by {split} examples are in these results")
    epsilons = sorted({setup.epsilon for setup in summaries})
    figure, panels = plt.subplots(
        1, len(epsilons), figsize=(3.4 * len(epsilons) + 0.6, 3.4), layout="constrained", squeeze=False, sharey=True
    )
    for axes, budget in zip(panels[0], epsilons, strict=True):
        curves: dict[Setup, dict[float, Summary]] = defaultdict(dict)
        for setup, value in summaries.items():
            if setup.epsilon == budget:
                curves[replace(setup, mechanism="lambda-cgd", lam=None, normalize=False)][setup.lam or 0.0] = value
        for (setup, curve), (line, marker) in zip(sorted(curves.items(), key=str), STYLES, strict=False):
            lams = sorted(curve)
            means, spreads = zip(*(curve[lam] for lam in lams), strict=True)
            axes.errorbar(
                lams, means, yerr=spreads, fmt=line + marker, color="black", capsize=3, label=_training(setup)
            )
        first = next(iter(curves))
        rmse, max_se = optimal_lambdas(first)
        axes.axvline(rmse, color="0.35", linestyle="--", label=f"RMSE-optimal λ = {rmse:.3g}")
        axes.axvline(max_se, color="0.35", linestyle=":", label=f"MaxSE-optimal λ = {max_se:.3g}")
        amplified = amplified_optimum(calibrations, first)
        if amplified is not None:
            axes.axvline(amplified, color="0.35", linestyle="-.", label=f"amplified RMSE: λ = {amplified:.3g}")
        axes.set(xlabel="λ (0 is DP-SGD)", title=f"ε = {budget:g}, δ = {first.delta:g}")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"{split} accuracy")
    return figure


def accuracy_against_epsilon(runs: Sequence[Record]) -> Figure:
    """Test accuracy of each mechanism against ε; of DP-λCGD the λ that was best on validation."""
    chosen = best_lambda(runs)
    curves: dict[str, dict[float, Summary]] = defaultdict(dict)
    for setup, value in by_setup(runs, "test").items():
        if setup in chosen:
            family = replace(setup, lam=None) if setup.mechanism == "lambda-cgd" else setup
            curves[f"{family.label}, {_training(family)}"][setup.epsilon] = value
    if not curves:
        raise ValueError("no runs judged by test examples are in these results; sweep without --no-test")
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for (label, curve), (line, marker) in zip(sorted(curves.items()), STYLES, strict=False):
        budgets = sorted(curve)
        means, spreads = zip(*(curve[budget] for budget in budgets), strict=True)
        axes.errorbar(budgets, means, yerr=spreads, fmt=line + marker, capsize=3, label=label)
    _epsilon_axis(axes, sorted({budget for curve in curves.values() for budget in curve}))
    axes.set_ylabel("test accuracy (mean and standard deviation over seeds)")
    axes.legend(fontsize=7)
    return figure


def best_lambda(runs: Sequence[Record]) -> set[Setup]:
    """All setups, but of DP-λCGD at each budget only the one with the best mean validation accuracy."""
    groups: dict[str, dict[Setup, float]] = defaultdict(dict)
    for setup, (mean, _) in by_setup(runs, "validation").items():
        groups[identity(replace(setup, lam=None) if setup.mechanism == "lambda-cgd" else setup)][setup] = mean
    return {max(sorted(group, key=identity), key=lambda setup: group[setup]) for group in groups.values()}


def error_ratios(calibrations: Mapping[str, Record]) -> Figure:
    """RMSE of each mechanism over that of DP-SGD, against ε."""
    setups = {name: Setup(**record["setup"]) for name, record in calibrations.items()}
    baseline = {
        (s.sampling, s.epsilon, s.delta, s.steps, s.epochs): calibrations[name]["rmse"]
        for name, s in setups.items()
        if s.mechanism == "dp-sgd"
    }
    curves: dict[str, dict[float, float]] = defaultdict(dict)
    for name, s in setups.items():
        reference = baseline.get((s.sampling, s.epsilon, s.delta, s.steps, s.epochs))
        if reference is not None and s.mechanism != "dp-sgd":
            curves[f"{s.label}, {_training(s)}"][s.epsilon] = calibrations[name]["rmse"] / reference
    if not curves:
        raise ValueError("RMSE ratios need dp-sgd and another mechanism calibrated at the same budget")
    figure, axes = plt.subplots(figsize=(9.4, 4.4), layout="constrained")
    for (label, curve), (line, marker) in zip(sorted(curves.items()), STYLES * len(curves), strict=False):
        budgets = sorted(curve)
        axes.plot(budgets, [curve[budget] for budget in budgets], line + marker, label=label)
    _epsilon_axis(axes, sorted({budget for curve in curves.values() for budget in curve}))
    axes.set_ylabel("RMSE over that of DP-SGD")
    axes.axhline(1, color="0.35", linewidth=0.8)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
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


def _training(setup: Setup) -> str:
    sampling = "no amplification" if setup.sampling == "none" else setup.sampling
    return f"{sampling}, {setup.epochs} epochs of {setup.steps} steps"


def _epsilon_axis(axes: Axes, budgets: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.set_xlabel("ε (add or remove one example)")
    axes.grid(alpha=0.3)
