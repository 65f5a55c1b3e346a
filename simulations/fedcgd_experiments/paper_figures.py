"""The papers' figures that need no GPU, drawn from numbers that are kept in a JSON file.

    python -m fedcgd_experiments.paper_figures --numbers results/paper_figures.json --output results/plots

What the file holds is not computed again: from nothing it takes about twenty minutes of one core.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from fedcgd.cli.declare import Option
from fedcgd.noise import NoiseStream
from fedcgd.noise.keys import NoiseKey
from fedcgd_experiments.paper_numbers import FIGURES, Numbers
from fedcgd_experiments.plots import save
from fedcgd_experiments.runner import within
from fedcgd_simulations.commands import of_function
from fedcgd_simulations.report import write_json

console = Console()
_LINES = ("-", "--", ":", "-.")  # readable without colour

MARKS = {"dp-sgd": ("0.0", "o"), "lambda-cgd": ("C0", "s"), "blt": ("C3", "v"), "banded-toeplitz": ("C4", "P")}
"""Colour and marker of each mechanism that is drawn."""


def style(mechanism: str) -> dict[str, Any]:
    """How the curve of a mechanism is drawn."""
    color, marker = MARKS[mechanism.split(":")[0]]
    return {"color": color, "marker": marker, "linestyle": "-", "fillstyle": "full"}


def _panels(columns: int, *, width: float = 4.6) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, columns, figsize=(width * columns, 4), layout="constrained", squeeze=False)
    for one in axes[0]:
        one.grid(alpha=0.3)
    return figure, list(axes[0])


def draw_correlation(numbers: Numbers) -> Figure:
    """The way that noise takes the model in two coordinates, and how far it has taken it."""
    figure, (path, growth) = _panels(2)
    stream, lam = NoiseStream(NoiseKey.simulation(5).noise), numbers["lambda"]
    z = np.array([stream.normal(t, 0, start=0, stop=2) for t in range(60)])
    for name, own, label in (("dp-sgd", z, "DP-SGD"), ("lambda-cgd", _cancelled(z, lam), f"DP-λCGD, λ = {lam:g}")):
        way = numbers[name]["noise_multiplier"] * np.cumsum(own, axis=0)
        looks = style(name) | {"markersize": 3}
        path.plot(way[:, 0], way[:, 1], linewidth=0.8, label=label, **looks)
        growth.loglog(numbers["after"], numbers[name]["in_the_model"], label=label, **looks)
    path.set(title="noise in the model, first 60 rounds", xlabel="coordinate 1", ylabel="coordinate 2", aspect="equal")
    growth.set(title="its standard deviation", xlabel="rounds", ylabel="of a coordinate, clip norm 1")
    for axes in (path, growth):
        axes.legend(fontsize=8)
    return figure


def _cancelled(z: Any, lam: float) -> Any:
    own = z.copy()
    own[1:] -= lam * z[:-1]
    return own


def draw_normalisation(numbers: Numbers) -> Figure:
    """RMSE with unit columns over that without."""
    figure, (axes,) = _panels(1, width=6)
    for line, (b, ratios) in zip(_LINES, numbers["ratios"].items(), strict=False):
        axes.plot(numbers["epochs"], ratios, line, marker="o", label=f"b = {b}")
    axes.set(xlabel="epochs k", ylabel="RMSE, normalised / plain", xscale="log")
    axes.set_xticks(numbers["epochs"], [str(k) for k in numbers["epochs"]])
    axes.legend()
    return figure


def draw_bands(numbers: Numbers) -> Figure:
    """RMSE against bands, for each number of epochs; a panel for each ε."""
    figure, panels = _panels(len(numbers["epsilons"]), width=6)
    for axes, (epsilon, curve) in zip(panels, numbers["curves"].items(), strict=True):
        for i, (k, row) in enumerate(curve["epochs"].items()):
            p = [int(bands) for bands in row["rmse"]]
            axes.loglog(p, list(row["rmse"].values()), _LINES[i % 4], marker=".", label=f"{k} epochs")
        axes.axhline(curve["full_batch"], color="black", linewidth=0.8, label="DP-SGD, full batch")
        axes.set(xlabel="bands", ylabel="RMSE in the mean (relative)", title=f"n = {numbers['rounds']}, ε = {epsilon}")
        axes.legend(fontsize=8)
    return figure


def draw_best_bands(numbers: Numbers) -> Figure:
    """The best number of bands, and what amplification and correlation bring, for each ε and number of epochs."""
    figure, panels = _panels(3)
    for axes, (field, title) in zip(
        panels,
        (("best", "best bands"), ("unamplified", "no amplification / best"), ("uncorrelated", "DP-SGD / best")),
        strict=True,
    ):
        values = np.array([[row[field] for row in c["epochs"].values()] for c in numbers["curves"].values()])
        axes.grid(visible=False)
        axes.imshow(np.log2(values), cmap="Blues", aspect="auto", origin="lower")
        for (i, j), value in np.ndenumerate(values):
            text = f"{value:g}" if field == "best" else f"{value:.2f}"
            dark = np.log2(value) > np.log2(values).max() / 2
            axes.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        axes.set_xticks(range(values.shape[1]), [str(k) for k in numbers["epochs"]])
        axes.set_yticks(range(values.shape[0]), [f"{e:g}" for e in numbers["epsilons"]])
        axes.set(xlabel="epochs", ylabel="ε", title=f"{title}, n = {numbers['rounds']}")
    return figure


DRAWN: dict[str, Callable[[Numbers], Figure]] = {
    "correlation": draw_correlation,
    "normalisation": draw_normalisation,
    "bands": draw_bands,
    "best-bands": draw_best_bands,
}
"""How each figure is drawn."""


def main(
    numbers: Annotated[Path, Option(help="JSON file of the numbers; figures that it has are not computed again")],
    output: Annotated[Path, Option(help="folder of the plots")],
    only: Annotated[list[str] | None, Option(help="a figure's name; repeat it; all if not given")] = None,
    minutes: Annotated[float, Option(help="begin no other figure after so many minutes")] = 60.0,
) -> None:
    """Compute and draw the figures."""
    if unknown := set(only or ()) - set(FIGURES):
        raise ValueError(f"unknown figure {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    known: dict[str, Any] = json.loads(numbers.read_text()) if numbers.exists() else {}
    late = within(minutes)
    for name in only or FIGURES:
        if name not in known:
            if late():
                console.print(f"{name} and what comes after it is left; call again to go on")
                raise SystemExit(3)
            started = time.process_time()
            found = FIGURES[name]()
            known[name] = found | {"cpu_seconds": round(time.process_time() - started, 1)}
            write_json(numbers, known)
        save(DRAWN[name](known[name]), output / f"paper-{name}.png")
        console.print(f"{name}: {known[name]['cpu_seconds']} s of processor time", highlight=False)


app = of_function(main)

if __name__ == "__main__":
    app()
