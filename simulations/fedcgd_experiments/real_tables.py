"""Tables of what `real_data` trained: linear models, the planner's recipes next to them, and networks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcgd_experiments.significance import paired

if TYPE_CHECKING:  # what trains takes the labels from here, where there may be no matplotlib
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
UNAMPLIFIED = (
    "λ-CGD, without amplification",
    "banded Toeplitz, without amplification",
    "DP-SGD, without amplification",
    "DP-SGD, full batch",
)
"""Arms that keep nothing secret."""
POISSON = "DP-SGD, Poisson"
PLAN, PUBLIC = "plan, without amplification", "plan from public inputs"
"""Of the planner's recipes: from four numbers; and with inputs of public pictures for the number of features."""
NETWORKS = {
    ("poisson", "dp-sgd"): "DP-SGD, Poisson, constant rate",
    ("balls-in-bins", "lambda-cgd"): "λ-CGD, Balls-in-Bins, constant rate",
    ("none", "lambda-cgd"): "λ-CGD, without amplification, falling rate",
    ("none", "dp-sgd"): "DP-SGD, without amplification, falling rate",
}


def rows_of(results: Path) -> list[Row]:
    """What was trained."""
    return [json.loads(line) for line in (results / "real_data.jsonl").read_text(encoding="utf-8").splitlines()]


def cells(rows: Sequence[Row]) -> dict[str, dict[str, dict[float, list[float]]]]:
    """Set → label → ε → test accuracies in percent, by seed. A set is `cifar10-45000-4800`: data, examples, features."""
    found: dict[str, dict[str, dict[float, list[float]]]] = {}
    for row in rows:
        if "set" in row:
            name = f"{row['set']}-{row['users']}-{row['features']}"
            by_label = found.setdefault(name, {})
            by_label.setdefault(row["label"], {})[row["epsilon"]] = [100 * value for value in row["test"]]
    return found


def difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """`+0.4 [0.1, 0.7]`: by seed, with the interval of Student's t at 95 %."""
    pairs = paired(dict(enumerate(ours)), dict(enumerate(theirs)))
    assert pairs is not None
    return f"{pairs.difference:+.1f} [{pairs.low:.1f}, {pairs.high:.1f}]"


def best_tuned(by_label: Mapping[str, Mapping[float, Sequence[float]]], epsilon: float) -> float:
    """The mean of the arm that is best on test examples, of those without amplification: which favours it over the plan."""
    return max(fmean(by_label[label][epsilon]) for label in UNAMPLIFIED)


def behind(rows: Sequence[Row], *, public: bool) -> dict[tuple[str, float], tuple[float, float]]:
    """(set, ε) → by how many points the plan is behind the best tuned without amplification, and behind tuned Poisson.

    With `public` that from public inputs, where there are such for a set.
    """
    found = {}
    for name, by_label in cells(rows).items():
        if POISSON not in by_label:  # a plan alone
            continue
        for epsilon, plan in by_label[PUBLIC if public and PUBLIC in by_label else PLAN].items():
            mine = fmean(plan)
            found[name, epsilon] = best_tuned(by_label, epsilon) - mine, fmean(by_label[POISSON][epsilon]) - mine
    return found


def by_epsilon(rows: Sequence[Row]) -> dict[str, dict[float, list[float]]]:
    """Networks: arm → ε → test accuracies in percent of the seeds that test."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row.get("figure") in ("figure-4", PLAN):
            recipe = row["recipe"]
            label = PLAN if row["figure"] == PLAN else NETWORKS[recipe["sampling"], recipe["mechanism"].split(":")[0]]
            found.setdefault(label, {}).setdefault(row["epsilon"], []).append(100 * row["test"])
    return found


def against_lambda(rows: Sequence[Row], figure: str) -> dict[float, dict[float, Row]]:
    """ε → λ, 0 for DP-SGD → the row of a linear model in Figure 2 or 3."""
    found: dict[float, dict[float, Row]] = {}
    for row in rows:
        if row.get("figure") == f"{figure} scattering":
            place = float(row["recipe"]["mechanism"].partition(":")[2] or 0)
            found.setdefault(row["epsilon"], {})[place] = row
    return found


def lambda_picture(results: Path) -> "Figure":
    """Accuracy of a linear model against λ, the rate tuned for each λ, ± standard deviation: without sampling, and with."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    titles = {"figure-2": "without amplification (Figure 2)", "figure-3": "Balls-in-Bins, secret (Figure 3)"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for (epsilon, by), line in zip(against_lambda(rows_of(results), name).items(), ("-", "--"), strict=True):
            tests = 100 * np.array([row["test"] for row in by.values()])
            axes.errorbar(
                list(by), tests.mean(1), tests.std(1, ddof=1), linestyle=line, marker="o", capsize=2, label=f"ε = {epsilon:g}"
            )  # fmt: skip
        axes.set(title=title, xlabel="λ (0: DP-SGD)")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("test accuracy, %")
    figure.suptitle("CIFAR-10 (JPEG), 20,000 examples, linear model on 1200 scattering features, δ = 1e-5", fontsize=10)
    return figure


def picture(results: Path) -> "Figure":
    """Accuracy against ε: linear models on 15,552 features, and the CNN, ± standard deviation."""
    import matplotlib.pyplot as plt
    import numpy as np

    rows = rows_of(results)
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    linear = {label: by for label, by in cells(rows)["cifar10-45000-15552"].items() if not label.endswith("Poisson")}
    linear[POISSON] = cells(rows)["cifar10-45000-15552"][POISSON]
    titles = ("linear model, 15,552 scattering features", "CNN, 10 epochs; batches of 128, the plan's of 1071")
    for axes, arms, title in zip(panels, (linear, by_epsilon(rows)), titles, strict=True):
        for number, (label, by) in enumerate(arms.items()):
            x = sorted(by)
            means, spreads = [fmean(by[e]) for e in x], [float(np.std(by[e], ddof=len(by[e]) > 1)) for e in x]
            secret = {"linestyle": ":"} if "Poisson" in label or "Bins" in label else {}
            axes.errorbar(x, means, yerr=spreads, marker="osD^vP*X"[number], capsize=2, label=label, **secret)
        axes.set_xscale("log")
        axes.set_xticks((ticks := sorted({e for by in arms.values() for e in by})), [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(title=f"CIFAR-10 (JPEG): {title}", xlabel="ε at δ = 1e-5", ylabel="test accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    return figure
