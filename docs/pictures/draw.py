"""Draws the pictures of the documentation: `python docs/pictures/draw.py`. The same bytes each time, for one matplotlib.

Each function draws one picture in the colours it is given; each picture is made once for light and once for dark pages.
What can be computed is computed by the library: the noise from a key, the cohorts by the scheduler.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from fedcgd.accounting import calibrate
from fedcgd.mechanisms import DPSGD, LambdaCGD, Mechanism, inverse_matrix
from fedcgd.noise import NoiseStream
from fedcgd.participation import Participation
from fedcgd.participation.cohorts import cohort
from fedcgd.participation.draws import bin_of
from fedcgd.participation.history import History

FOLDER = Path(__file__).parent
MEASURED = FOLDER.parents[1] / "benchmarks" / "results" / "planner-digits.json"
KEY = bytes(range(32))  # of pictures: no secret
LAM = 0.7
ROUNDS = 10


@dataclass(frozen=True)
class Colours:
    """Of one kind of page."""

    page: str
    ink: str
    faint: str
    box: str
    plain: str
    ours: str
    secret: str


LIGHT = Colours("#ffffff", "#1c1e26", "#8a8f9c", "#eef0f6", "#c4500a", "#2257c9", "#7a3e9d")
DARK = Colours("#1e2129", "#e6e8ee", "#8a90a0", "#2b2f3b", "#f2935c", "#7fa8ff", "#cb9be8")


def noise(colours: Colours) -> Figure:
    """Noise of ten rounds and its running sum, independent and correlated, at the same ε."""
    figure = _figure(colours, 4.4, 5.2)  # as wide as a phone
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(2, 1)
    rounds = np.arange(1, ROUNDS + 1)
    participation = Participation(rounds=ROUNDS, min_separation=ROUNDS)
    z = np.array([NoiseStream(KEY).normal(t, 0, 17, 18)[0] for t in range(ROUNDS)], float)
    choices: list[tuple[Mechanism, str, str, float]] = [
        (DPSGD(), "independent (DP-SGD)", colours.plain, -0.2),
        (LambdaCGD(LAM), f"correlated (DP-λCGD, λ = {LAM})", colours.ours, 0.2),
    ]
    for mechanism, label, colour, shift in choices:
        sigma = calibrate(mechanism, participation, epsilon=2, delta=1e-5).noise_multiplier
        c_inv = inverse_matrix(mechanism, ROUNDS)
        sums = np.tril(np.ones((ROUNDS, ROUNDS))) @ c_inv
        left.bar(rounds + shift, sigma * c_inv @ z, 0.38, color=colour, label=label)
        spread = sigma * np.linalg.norm(sums, axis=1)
        right.fill_between(rounds, -spread, spread, color=colour, alpha=0.18, lw=0)
        right.plot(rounds, sigma * sums @ z, color=colour, marker="o", ms=4, label=label)
    for axes, title in ((left, "noise of each round"), (right, "its running sum: what the model carries")):
        axes.axhline(0, color=colours.faint, lw=0.8)
        axes.set_title(title, color=colours.ink)
        axes.set_xlabel("round")
        axes.set_xticks(rounds)
    left.set_ylim(bottom=-9)  # room for the legend below the bars
    left.legend(frameon=False, labelcolor=colours.ink, loc="lower left")
    right.text(
        0.02,
        0.97,
        "shaded: ± one standard deviation",
        transform=right.transAxes,
        va="top",
        color=colours.ink,
        fontsize=8.5,
    )
    limit = max(abs(v) for axes in (left, right) for v in axes.get_ylim())
    for axes in (left, right):
        axes.set_ylim(-limit, limit)
    return figure


def replay(colours: Colours) -> Figure:
    """A round makes the noise of the round before once more, from the key, and keeps nothing."""
    figure, axes = _canvas(colours, 9, 3.7, 18, 7.4)
    tints = (colours.faint, colours.plain, colours.ours, colours.secret)
    names = ("t − 2", "t − 1", "t", "t + 1")
    _box(axes, colours, 1.5, 6.5, 2.6, 1.1, "secret key,\n32 bytes", edge=colours.ink)
    axes.plot([2.8, 16.65], [6.5, 6.5], color=colours.ink, lw=1.4)
    for i, x in ((1, 5.9), (2, 10.75), (3, 15.6)):
        for number, shift, note in ((i, -1.1, ""), (i - 1, 1.1, "\nonce more")):
            _arrow(axes, colours.ink, (x + shift, 6.5), (x + shift, 5.4))
            text = f"Z, round {names[number]}{note}"
            _box(axes, colours, x + shift, 4.8, 2.0, 1.2, text, edge=tints[number], dashed=bool(note), size=8)
            _arrow(axes, colours.ink, (x + shift, 4.2), (x + shift * 0.7, 2.75))
        axes.text(x - 1.15, 3.5, "+ 1", ha="right", va="center", color=colours.ink)
        axes.text(x + 1.15, 3.5, "− λ", ha="left", va="center", color=colours.ink)
        _box(
            axes,
            colours,
            x,
            2.1,
            4.2,
            1.25,
            f"released in round {names[i]}:\nsum of updates + ζσ · this",
            edge=colours.ink,
        )
        axes.text(x, 0.85, "noise is forgotten", ha="center", va="center", color=colours.ink, fontsize=8.5)
    return figure


def participation(colours: Colours) -> Figure:
    """Users against rounds: at most k marks in a row, and at least b columns from one to the next."""
    users, rounds, separation, size = 12, 12, 4, 3
    plan = Participation(rounds=rounds, min_separation=separation, max_participations=3)
    figure, axes = _canvas(colours, 9, 4.1, rounds + 7.2, users + 0.4, bottom=-1.2)
    history, names = History(), [f"user {i + 1:2d}" for i in range(users)]
    taken: dict[str, list[int]] = {name: [] for name in names}
    for t in range(rounds):
        chosen = cohort(plan, t, names, history, cohort_size=size, key=KEY)
        assert chosen is not None
        history = history.with_round(t, chosen)
        for name in chosen:
            taken[name].append(t)
    shown = next(name for name in names if len(taken[name]) > 1)
    for row, name in enumerate(names):
        y = users - 1 - row
        axes.text(2.2, y + 0.5, name, ha="right", va="center", color=colours.ink, fontsize=8.5)
        for t in range(rounds):
            colour = colours.ours if t in taken[name] else colours.box
            held = any(0 < t - last < separation for last in taken[name])
            axes.add_patch(Rectangle((2.5 + t + 0.06, y + 0.06), 0.88, 0.88, color=colour, lw=0))
            if held:
                axes.text(3 + t, y + 0.5, "·", ha="center", va="center", color=colours.faint)
    first, second = taken[shown][:2]
    y = users - 1 - names.index(shown) + 0.5
    axes.annotate(
        "",
        (2.5 + second + 0.1, y),
        (3.5 + first - 0.1, y),
        arrowprops={"arrowstyle": "<->", "color": colours.plain, "lw": 1.5},
    )
    for t in range(rounds):
        axes.text(3 + t, -0.5, str(t), ha="center", va="center", color=colours.ink, fontsize=8.5)
    axes.text(1.3, -0.5, "round", ha="center", va="center", color=colours.ink, fontsize=9)
    notes = (
        f"k = {plan.participations}: at most so many\nfilled squares in a row\n\n"
        f"b = {separation}: at least so many\nrounds from one to the next;\ndots are rounds in which\nthe user has to wait\n\n"
        f"{size} users a round"
    )
    axes.text(rounds + 3, users / 2, notes, va="center", color=colours.ink, fontsize=8.5)
    return figure


def balls_in_bins(colours: Colours) -> Figure:
    """Each user falls in one secret bin; bin j trains in rounds j, j + b, j + 2b."""
    users, bins, epochs = 14, 4, 3
    figure, axes = _canvas(colours, 9, 3.9, 18, 7.8)
    tints = (colours.ours, colours.plain, colours.secret, colours.faint)
    members: list[list[int]] = [[] for _ in range(bins)]
    for user in range(1, users + 1):
        members[bin_of(f"user {user}", bins, KEY)].append(user)
    for j in range(bins):
        x = 3 + 4 * j
        axes.plot([x - 1.4, x - 1.4, x + 1.4, x + 1.4], [6.6, 4.3, 4.3, 6.6], color=colours.ink, lw=1.4)
        axes.text(x, 3.95, f"bin {j}", ha="center", va="center", color=colours.ink, fontsize=9)
        for i, user in enumerate(members[j]):
            at = (x - 0.9 + 0.9 * (i % 3), 4.75 + 0.85 * (i // 3))
            axes.add_patch(Circle(at, 0.38, color=tints[j], lw=0))
            axes.text(*at, str(user), ha="center", va="center", color=colours.page, fontsize=8, weight="bold")
    axes.text(
        9,
        7.4,
        "each user falls in one bin: secret, uniform, the same for the whole run",
        ha="center",
        va="center",
        color=colours.ink,
        fontsize=9.5,
    )
    for t in range(bins * epochs):
        x = 1.6 + 1.25 * t + 0.35 * (t // bins)
        axes.add_patch(Rectangle((x - 0.55, 1.5), 1.1, 1.1, color=tints[t % bins], lw=0))
        axes.text(x, 2.05, str(t), ha="center", va="center", color=colours.page, fontsize=10, weight="bold")
    for epoch in range(epochs):
        x = 1.6 + 1.25 * (bins * epoch + (bins - 1) / 2) + 0.35 * epoch
        axes.text(x, 0.9, f"epoch {epoch}", ha="center", va="center", color=colours.ink, fontsize=9)
    axes.text(
        9,
        3.1,
        "rounds: bin j trains in rounds j, j + 4, j + 8",
        ha="center",
        va="center",
        color=colours.ink,
        fontsize=9.5,
    )
    return figure


def path(colours: Colours) -> Figure:
    """The path of an update: what happens to it on the node, on the server, and when it leaves."""
    figure, axes = _canvas(colours, 9, 4.6, 18, 9.2)
    zones = [
        (0.2, 5.0, "node (trusted by its users)", colours.faint),
        (5.5, 7.3, "server process (trusted; holds the key)", colours.secret),
        (13.1, 4.7, "everybody else", colours.plain),
    ]
    for x, width, label, edge in zones:
        axes.add_patch(
            FancyBboxPatch(
                (x, 0.2),
                width,
                8.0,
                boxstyle="round,pad=0,rounding_size=0.25",
                fc="none",
                ec=edge,
                lw=1.2,
                ls=(0, (4, 3)),
            )
        )
        axes.text(x + width / 2, 8.65, label, ha="center", va="center", color=colours.ink, fontsize=9.5)
    steps = [
        (2.7, 7.2, "train on one\nuser's data"),
        (2.7, 5.2, "clip to norm ζ"),
        (2.7, 3.2, "round to the grid,\ntowards zero"),
        (2.7, 1.2, "add up the users\nof this node"),
        (7.35, 1.2, "bound again:\nusers × ζ"),
        (7.35, 3.2, "add up the nodes\n(integers)"),
        (7.35, 5.2, "add ζσ · (C⁻¹Z)\nfrom the key"),
        (7.35, 7.2, "divide by the\nplanned cohort"),
        (11.1, 7.2, "inner strategy:\nFedAvg, FedAdam"),
        (11.1, 5.2, "ledger: durable\nbefore it leaves"),
        (15.45, 5.2, "released model:\nthis is what\nε is about"),
    ]
    for x, y, text in steps:
        wide = 4.2 if x < 4 else 3.2 if x < 13 else 3.9
        ours = "noise" in text or "C⁻¹Z" in text
        _box(axes, colours, x, y, wide, 1.5 if x > 13 else 1.25, text, edge=colours.ours if ours else colours.ink)
    for (x0, y0, _), (x1, y1, _) in itertools.pairwise(steps):
        if x0 == x1:
            down = math.copysign(0.63, y1 - y0)
            _arrow(axes, colours.ink, (x0, y0 + down), (x1, y1 - down))
        else:
            _arrow(axes, colours.ink, (x0 + (2.1 if x0 < 4 else 1.6), y0), (x1 - (1.6 if x1 < 13 else 1.95), y1))
    return figure


def accuracy(colours: Colours) -> Figure:
    """Test accuracy against ε, measured: DP-SGD in cohorts and with full batches, and the plan; a secret sampling is dotted."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))
    figure = _figure(colours, 4.4, 4.4)  # as wide as a phone
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    epsilons = [row["epsilon"] for row in rows]
    for label, shown, colour, style in (
        ("plan, nothing secret", "correlated noise, 60 users a round", colours.ours, "-o"),
        ("dp-sgd, full batch", "DP-SGD, full batch (1260 users a round)", colours.secret, "--D"),
        ("dp-sgd, poisson", "DP-SGD, 60 users a round, secret Poisson sampling", colours.faint, ":"),
        ("dp-sgd, nothing secret", "DP-SGD, 60 users a round", colours.plain, "-s"),
    ):
        means = np.array([100 * np.mean(row[label]) for row in rows])
        spread = np.array([100 * np.std(row[label]) for row in rows])
        axes.plot(epsilons, means, style, color=colour, label=shown, markersize=5)
        if style in ("-o", "-s"):
            axes.fill_between(epsilons, means - spread, means + spread, color=colour, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.set(xlabel="ε of the whole run, δ = 10⁻⁵", ylabel="test accuracy, %", ylim=(0, 100))
    axes.set_title("handwritten digits, each user takes part ten times", color=colours.ink)
    figure.legend(frameon=False, labelcolor=colours.ink, loc="outside lower left")
    return figure


PICTURES: dict[str, Callable[[Colours], Figure]] = {
    "accuracy": accuracy,
    "noise": noise,
    "replay": replay,
    "participation": participation,
    "balls-in-bins": balls_in_bins,
    "path": path,
}


def draw(folder: Path) -> None:
    """Write every picture, `NAME.svg` and `NAME-dark.svg`, to `folder`."""
    with mpl.rc_context(
        {"svg.hashsalt": "fedcgd", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9}
    ):
        for name, picture in PICTURES.items():
            for colours, suffix in ((LIGHT, ""), (DARK, "-dark")):
                figure = picture(colours)
                figure.savefig(
                    folder / f"{name}{suffix}.svg", metadata={"Date": None, "Creator": None}, facecolor=colours.page
                )


def _figure(colours: Colours, width: float, height: float) -> Figure:
    mpl.rcParams.update(
        dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), colours.ink)
        | {"axes.facecolor": colours.page, "axes.spines.top": False, "axes.spines.right": False}
    )
    return Figure(figsize=(width, height))


def _canvas(
    colours: Colours, width: float, height: float, right: float, top: float, bottom: float = 0
) -> tuple[Figure, Axes]:
    """A figure without axes, in units of its own."""
    figure = _figure(colours, width, height)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(0, right), ylim=(bottom, top))
    axes.set_axis_off()
    return figure, axes


def _box(
    axes: Axes,
    colours: Colours,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    *,
    edge: str,
    dashed: bool = False,
    size: float = 9,
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.2",
            fc=colours.box,
            ec=edge,
            lw=1.4,
            ls="--" if dashed else "-",
        )
    )
    axes.text(x, y, text, ha="center", va="center", color=colours.ink, fontsize=size)


def _arrow(axes: Axes, colour: str, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=colour, lw=1.4, shrinkA=0, shrinkB=0)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER)
    draw(parser.parse_args().output)
