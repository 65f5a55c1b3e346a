"""Trade-off curves as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcgd.accounting.tradeoff import TradeOff


def plot_trade_off(path: Path, curves: Mapping[str, TradeOff]) -> None:
    """Draw named curves into the image file `path` (PNG, SVG or PDF)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    draw_trade_off(figure.add_subplot(), curves)
    figure.savefig(path, dpi=150)


def draw_trade_off(axes: Any, curves: Mapping[str, TradeOff]) -> None:
    """Draw named curves and the line of perfect privacy, β = 1 − α, into Matplotlib's `axes`."""
    axes.plot([0, 1], [1, 0], color="0.7", linestyle="dotted", label="perfect privacy")
    for name, curve in curves.items():
        axes.plot(curve.alphas, curve.betas, label=name if curve.exact else f"{name} (at least)")
    axes.set(
        xlabel="α: says “took part” of one who did not",
        ylabel="β: says “did not” of one who did",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axes.legend()
