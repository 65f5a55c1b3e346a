"""What a run leaves behind: a JSON file of its figures, a plot of accuracy per round, and one line for people."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a server has no display
import matplotlib.pyplot as plt

from fedcgd.accounting.guarantee import rounded_up
from fedcgd.support.files import atomic_write

_STYLES = ("-", "--", ":", "-.")  # readable without colour


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write `figures` so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(json.dumps(figures, indent=1) + "\n")


def plot_accuracy(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Test accuracy against round for `runs`, as PNG."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for run, style in zip(runs, _STYLES * len(runs), strict=False):
        label = f"{run['label']}: {run['accuracy'][-1]:.3f}"
        axes.plot(range(len(run["accuracy"])), run["accuracy"], style, label=label, linewidth=1.6)
    first = runs[0]
    axes.set(
        xlabel="round",
        ylabel="test accuracy",
        ylim=(0, 1),
        title=f"{first['task']}, {first['cohort']} users a round, (ε, δ) = ({rounded_up(first['epsilon'])}, {first['delta']:g})",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", title="final accuracy")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def summary(run: dict[str, Any]) -> str:
    """One line: accuracy, and ε with δ, adjacency, sampling and method, and whether the noise is a secret at all."""
    guessed = "" if run["private"] else f"; the noise is that of seed {run['seed']}: nothing here is private"
    return (
        f"{run['label']} on {run['task']}: test accuracy {run['accuracy'][-1]:.4f} after {run['releases']} rounds; "
        f"ε ≤ {rounded_up(run['epsilon'], 4)} at δ = {run['delta']:g} (adjacency: {run['adjacency']}; "
        f"sampling: {run['sampling']}; {run['method']}){guessed}"
    )
