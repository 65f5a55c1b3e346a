"""Plots of sweeps: accuracy against λ and against ε, running times, and error ratios, readable without colour."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from fedcgd_experiments.significance import tuned_accuracies
from fedcgd_experiments.sweep import best_of_families

matplotlib.rcParams["svg.hashsalt"] = "fedcgd"  # the same figures give the same file

MARKS: dict[str, tuple[str, str]] = {
    "dp-sgd": ("0.0", "o"),
    "lambda-cgd": ("C0", "s"),
    "bisr": ("C1", "D"),
    "band-inv-mf": ("C2", "^"),
    "blt": ("C3", "v"),
    "banded-toeplitz": ("C4", "P"),
    "band-mf": ("C5", "*"),
    "bsr": ("C6", "X"),
    "toeplitz": ("C7", "p"),
    "nu-dp-ftrl": ("C8", "h"),
    "tree": ("C9", "<"),
    "dense": ("0.45", ">"),
    "diagonal": ("0.65", "d"),
    "noise-curve": ("0.3", "H"),
}
"""Colour and marker of each mechanism, in every figure; the line says the sampling."""

LINES: dict[str, str] = {"none": "-", "balls-in-bins": "--", "poisson": ":", "cyclic-poisson": "-."}

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
    values = {setup: list(of_seed.values()) for setup, of_seed in tuned_accuracies(runs, split).items()}
    return {setup: (fmean(v), stdev(v) if len(v) > 1 else 0.0) for setup, v in values.items()}


def optimal_lambdas(setup: Setup) -> tuple[float, float]:
    """The λ with the least RMSE, and the one with the least MaxSE, without amplification."""
    rmse, max_se = (
        select_lambda(setup.participation(), objective=objective, epsilon=setup.epsilon, delta=setup.delta).lam
        for objective in ERRORS
    )
    return rmse, max_se


def style(mechanism: str, sampling: str) -> dict[str, Any]:
    """How the curve of a mechanism (a family, or a file's name) under a sampling is drawn."""
    color, marker = MARKS.get(mechanism.split(":")[0], ("C8", "8"))
    return {
        "color": color,
        "marker": marker,
        "linestyle": LINES[sampling],
        "fillstyle": "none" if mechanism.endswith(":normalized") else "full",
    }


def accuracy_against_lambda(runs: Sequence[Record], rules: Mapping[Setup, Mapping[str, float]]) -> Figure:
    """One panel per ε: accuracy of DP-λCGD against λ (0 is DP-SGD), with what each rule chooses as vertical lines.

    `rules` has for DP-SGD's setup at a budget the λ of each rule; of a budget that is not there the closed forms are shown.
    Without amplification and with Balls-in-Bins: other samplings have no λ but 0.
    """
    summaries = {
        setup: value
        for setup, value in by_setup(runs, "validation").items()
        if setup.name in ("dp-sgd", "lambda-cgd") and setup.sampling in ("none", "balls-in-bins")
    }
    if not summaries:
        raise ValueError("no dp-sgd or lambda-cgd runs judged by validation examples are in these results")
    curves: dict[float, dict[str, dict[float, Summary]]] = defaultdict(lambda: defaultdict(dict))
    looks: dict[str, dict[str, Any]] = {}
    for setup, value in sorted(summaries.items(), key=lambda item: (item[0].epsilon, item[0].lam)):
        normalized = ":normalized" if setup.spelling.normalized else ""
        name = _training(setup) + normalized.replace(":", ", ")
        looks[name] = style(f"lambda-cgd{normalized}", setup.sampling)
        curves[setup.epsilon][name][setup.lam] = value
    lams = {setup.lam for setup in summaries}
    figure, panels = plt.subplots(
        1, len(curves), figsize=(3.6 * len(curves) + 0.6, 4.0), layout="constrained", squeeze=False, sharey=True
    )
    for axes, (budget, panel) in zip(panels[0], curves.items(), strict=True):
        for name, curve in panel.items():
            means, spreads = zip(*curve.values(), strict=True)
            axes.errorbar(list(curve), means, yerr=spreads, capsize=3, label=name, **looks[name])
        at_budget = [setup for setup in summaries if setup.epsilon == budget]
        lines: dict[str, float] = {}
        for setup in {setup.budget: setup for setup in at_budget}:
            rmse, max_se = optimal_lambdas(setup)
            chosen = {"rmse": rmse, "max-se": max_se} | dict(rules.get(setup, {}))
            for rule, lam in chosen.items():
                if (rule, setup.sampling) == ("amplified-rmse", "none"):
                    continue  # there it is the same as "rmse"
                shared = rule in ("rmse", "max-se")  # the same for all samplings
                lines[rule if shared else f"{rule}, {setup.sampling}"] = lam
        shades = ("-", "--", "-.", ":", (0, (1, 4)), (0, (6, 4)), (0, (8, 2, 1, 2)), (0, (1, 1, 1, 5)), (0, (10, 5)))
        marks = [
            axes.axvline(lam, color="0.45", linewidth=1, linestyle=shades[i % len(shades)], label=f"{rule}: {lam:.3g}")
            for i, (rule, lam) in enumerate(sorted(lines.items()))
        ]
        axes.set(xlabel="λ (0 is DP-SGD)", title=f"ε = {budget:g}, δ = {at_budget[0].delta:g}")
        axes.set_xscale("function", functions=(_inverse_gap, _from_inverse_gap))
        axes.set_xlim(-0.1, _from_inverse_gap(_inverse_gap(max(*lines.values(), *lams)) + 0.3))
        axes.set_xticks([0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95], ["0", ".3", ".5", ".7", ".8", ".9", ".95"])
        axes.legend(handles=marks, fontsize=6)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("validation accuracy")
    shown = {str(mark.get_label()): mark for axes in panels[0] for mark in axes.containers}
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def accuracy_against_epsilon(runs: Sequence[Record]) -> Figure:
    """A panel without amplification and one with: test accuracy of each mechanism against ε, its number chosen on validation.

    All samplings that amplify are in one panel, so that Poisson and Balls-in-Bins can be compared.
    """
    curves = _by_family(runs, by_setup(runs, "test"))
    if not curves:
        raise ValueError("no runs judged by test examples are in these results; sweep without --no-test")
    figure, panels = _panels(len(curves))
    for axes, (title, families) in zip(panels, curves.items(), strict=True):
        for place, ((family, sampling), curve) in enumerate(families.items()):
            means, spreads = zip(*curve.values(), strict=True)
            apart = 1.012 ** (place - (len(families) - 1) / 2)  # so that error bars do not hide each other
            axes.errorbar(
                [e * apart for e in curve], means, yerr=spreads, capsize=3, label=_label(family, sampling),
                **style(family, sampling),
            )  # fmt: skip
        _epsilon_axis(axes, title, [e for curve in families.values() for e in curve])
    panels[0].set_ylabel("test accuracy (mean and standard deviation)")
    return figure


def error_ratios(runs: Sequence[Record], calibrations: Mapping[str, Record]) -> Figure:
    """A panel without amplification and one with: RMSE of each mechanism over that of DP-SGD with the same sampling, against ε.

    Of each mechanism that was tested, with the number that was best on validation.
    """
    errors = {
        setup: float(calibrations[identity(setup)]["rmse"])
        for setup in by_setup(runs, "test")
        if identity(setup) in calibrations
    }
    ratios = {setup: error / errors[setup.budget] for setup, error in errors.items() if setup.budget in errors}
    curves = _by_family(runs, {setup: ratio for setup, ratio in ratios.items() if setup.mechanism != "dp-sgd"})
    if not curves:
        raise ValueError("RMSE ratios need dp-sgd and another mechanism tested at the same budget")
    figure, panels = _panels(len(curves))
    for axes, (title, families) in zip(panels, curves.items(), strict=True):
        for (family, sampling), curve in families.items():
            axes.plot(list(curve), list(curve.values()), label=_label(family, sampling), **style(family, sampling))
        axes.axhline(1, color="0.35", linewidth=0.8)
        axes.set_ylim(bottom=0)
        _epsilon_axis(axes, title, [e for curve in families.values() for e in curve])
    panels[0].set_ylabel("RMSE over that of DP-SGD")
    return figure


def runtime_bars(records: Sequence[Record]) -> Figure:
    """Time of a step over that of the first row (Opacus, or in older records DP-SGD), with quartiles; a panel per model."""
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


Curves = dict[str, dict[tuple[str, str], dict[float, Value]]]
"""Title of a panel → (family, sampling) → ε → value."""


def _by_family(runs: Sequence[Record], values: Mapping[Setup, Value]) -> Curves[Value]:
    """`values` of the best setup of each family, sorted; DP-SGD comes first, and no amplification."""
    chosen = best_of_families(runs)
    curves: Curves[Value] = defaultdict(lambda: defaultdict(dict))
    for setup in sorted(values, key=_order):
        if setup in chosen:
            amplification = "no amplification" if setup.sampling == "none" else "with amplification"
            title = f"{amplification}, {setup.epochs} epochs of {setup.steps} steps"
            curves[title][setup.family, setup.sampling][setup.epsilon] = values[setup]
    return curves


def _order(setup: Setup) -> tuple[Any, ...]:
    known = list(MARKS)
    place = known.index(setup.name) if setup.name in MARKS else len(known)
    return setup.sampling != "none", place, setup.family, setup.sampling, setup.epsilon


def _label(family: str, sampling: str) -> str:
    return family if sampling == "none" else f"{family}, {sampling}"


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


def _epsilon_axis(axes: Axes, title: str, epsilons: Sequence[float]) -> None:
    budgets = sorted(set(epsilons))
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.set(xlabel="ε (zero out one example)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=1 + (len(axes.get_legend_handles_labels()[1]) > 7))
