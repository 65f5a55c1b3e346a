"""`fedcgd theory`: what the noise of each mechanism costs on a quadratic with a given spectrum."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedcgd.accounting import calibrate
from fedcgd.accounting.selection import select_mechanism
from fedcgd.cli.commands import TheoryOptions
from fedcgd.cli.options import RunOptions
from fedcgd.cli.printing import (
    budget,
    check_plot,
    console,
    drawn,
    number,
    print_json,
    print_refusals,
    progress,
)
from fedcgd.cli.printing import when as when_figures
from fedcgd.curvature import curves
from fedcgd.curvature.curves import Curve
from fedcgd.curvature.stationary import bounds, optimal_error, stationary_error
from fedcgd.mechanisms import DPSGD
from fedcgd.mechanisms.mechanism import Mechanism
from fedcgd.optimisation.catalogue import LAMBDA, MechanismSpec
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss, gradient_norm

_HEADINGS = {"noise_multiplier": "σ", "loss": "loss", "gradient_norm": "gradient norm", "stationary": "stationary"}
_CURVES = ("dp-sgd", "toeplitz", "bisr:4", "lambda-cgd", "nu-dp-ftrl", "blt:2")
_CURVE_POINTS = 19  # of the three curves that are drawn point by point


def default_mechanisms(separation: int) -> list[str]:
    """One or two of each kind, with as many bands as the separation allows, and at most 8."""
    bands = min(8, separation)
    return [
        "dp-sgd", "lambda-cgd", "nu-dp-ftrl", "bisr:4", "toeplitz", "tree", "blt:2",
        f"band-inv-mf:{bands}", f"banded-toeplitz:{bands}",
        *([f"band-mf:{bands}", f"noise-curve:{bands}"] if bands > 1 else []),
    ]  # fmt: skip


def theory(asked: TheoryOptions) -> None:
    """Show what the noise of each mechanism adds to the loss on a quadratic with a given spectrum, least first."""
    check_plot(asked.plot)
    found = Spectrum.load(asked.spectrum)
    if found.largest == 0:
        raise ValueError(
            f"{asked.spectrum} has no curvature: all its eigenvalues are 0; give one that `fedcgd curve` measured"
        )
    quadratic = Quadratic(found, 1 / found.largest if asked.learning_rate is None else asked.learning_rate)
    texts = list(dict.fromkeys(asked.mechanism or default_mechanisms(asked.apart)))
    runs = [asked.with_mechanism(text) for text in texts]
    for one in runs:
        one.spelling()  # refuses what is misspelled before any work
    plain = Participation(rounds=asked.rounds, min_separation=asked.apart, max_participations=asked.participations)
    rows: list[dict[str, Any]] = []
    curves: list[Curve] = []
    with progress(len(runs) + (0 if asked.plot is None else _CURVE_POINTS), quiet=asked.json) as step:
        for one in runs:
            step(one.mechanism)
            rows += _rows(one, asked.rounds, quadratic, asked.epsilon, asked.delta)
        if asked.plot is not None:
            curves = _curves(plain, quadratic, step)
    summary = _summary(quadratic, runs[0].run(asked.rounds), asked.epsilon, asked.delta)
    rows.sort(key=lambda row: row.get("loss", math.inf))
    if asked.plot is not None:
        draw(asked.plot, curves)
    if asked.json:
        print_json({**summary, "mechanisms": rows, "curves": [asdict(curve) for curve in curves]})
    else:
        show(rows, summary)


def _rows(run: RunOptions, rounds: int, quadratic: Quadratic, epsilon: float, delta: float) -> list[dict[str, Any]]:
    """A row for the mechanism as it is without a curvature, and one for it fitted; a row with "error" for what is not covered."""
    spelling, found = run.spelling(), []
    for fitted in _variants(spelling):
        label = run.mechanism + (", fitted" if fitted else "")
        try:
            participation = run.run(rounds)
            made = select_mechanism(
                run.mechanism, participation, epsilon=epsilon, delta=delta, curvature=quadratic if fitted else None
            )
            sigma = calibrate(made, participation, epsilon=epsilon, delta=delta).noise_multiplier
        except ValueError as reason:
            found.append({"label": label, "fitted": fitted, "error": str(reason)})
            continue
        numbers = {
            each.symbol: value for each, value in zip(spelling.row.parameters, spelling.row.numbers(made), strict=True)
        }
        if spelling.is_open:
            label += " → " + ", ".join(f"{each.symbol} = {numbers[each.symbol]:.4g}" for each in spelling.open)
        found.append(
            {
                "label": label,
                "fitted": fitted,
                "mechanism": made.name,
                "numbers": numbers,
                "noise_multiplier": sigma,
                "loss": final_loss(made, rounds, quadratic, stddev=sigma),
                "gradient_norm": gradient_norm(made, rounds, quadratic, stddev=sigma),
                "stationary": _stationary(made, quadratic, epsilon, delta),
            }
        )
    return found


def _variants(spelling: MechanismSpec) -> list[bool]:
    """Whether to show it as it is, fitted, or both."""
    row = spelling.row
    if spelling.made is not None or row.fit is None or (row.finds_number and not spelling.is_open):
        return [False]
    return [False, True] if row.optimise is not None or row.parameters == (LAMBDA,) else [True]


def _stationary(mechanism: Mechanism, quadratic: Quadratic, epsilon: float, delta: float) -> float | None:
    """At (ε, δ) for a user who takes part once; None for a mechanism that is made for a number of rounds."""
    try:
        return _once(epsilon, delta) ** 2 * stationary_error(mechanism, quadratic)
    except ValueError:
        return None


def _once(epsilon: float, delta: float) -> float:
    """σ_{ε,δ}: of sensitivity 1."""
    return calibrate(DPSGD(), Participation(rounds=1), epsilon=epsilon, delta=delta).noise_multiplier


def _summary(quadratic: Quadratic, participation: Participation, epsilon: float, delta: float) -> dict[str, Any]:
    """What holds for all rows, and the least that stationary noise can cost."""
    spectrum, square = quadratic.spectrum, _once(epsilon, delta) ** 2
    summary: dict[str, Any] = {
        "measured_on": dict(spectrum.measured_on),
        "dimension": spectrum.dimension,
        "effective_dimension": spectrum.effective_dimension,
        "largest_eigenvalue": spectrum.largest,
        "learning_rate": quadratic.learning_rate,
        **budget(epsilon, delta),
        **when_figures(participation),
        "stationary_optimum": square * optimal_error(quadratic),
    }
    if quadratic.learning_rate * spectrum.largest <= 1:
        found = bounds(quadratic)
        summary["stationary_bounds"] = {
            "independent": [square * bound for bound in found.independent],
            "any_noise": square * found.any_noise,
            "damped": square * found.damped,
            "damped_nu": found.nu,
        }
    return summary


def _curves(participation: Participation, quadratic: Quadratic, step: "Callable[[str], None]") -> list[Curve]:
    """At equal privacy without a sampling, so that every point is found by its sensitivity alone."""
    return [
        curves.against_rounds(_CURVES, participation, quadratic, step),
        curves.against_dimension(_CURVES, participation, quadratic, step),
        curves.against_effective_dimension(_CURVES, participation, quadratic, step),
        curves.against_nu(participation, quadratic),
    ]


def show(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The rows as a table, with the spectrum above and the least possible below."""
    title = (
        f"d = {summary['dimension']}, d_eff = {number(summary['effective_dimension'])}, "
        f"‖H‖ = {number(summary['largest_eigenvalue'])}, η = {number(summary['learning_rate'])}; "
        f"ε ≤ {summary['epsilon']:g} at δ = {summary['delta']:g}; adjacency: {summary['adjacency']}; "
        f"sampling: {summary['sampling']}; n = {summary['rounds']}"
    )
    caption = (
        "Loss: after all rounds; gradient norm: mean over rounds; per (clip norm / cohort)². Stationary: a run without end, in "
        f"which a user takes part once; the least of all Toeplitz noise is {number(summary['stationary_optimum'])}"
    )
    if any(str(row["label"]).startswith("noise-curve") and "error" not in row for row in rows):
        caption += (
            ". noise-curve: with the barrier that suits networks, so above the least loss of its problem (digits, 8 bands: "
            "by 38 %)"
        )
    table = Table(title=title, caption=caption)
    table.add_column("mechanism", no_wrap=True)
    for column in _HEADINGS:
        table.add_column(_HEADINGS[column], justify="right")
    done = [row for row in rows if "error" not in row]
    for row in done:
        table.add_row(escape(row["label"]), *(number(row[column]) for column in _HEADINGS))
    console.print(table)
    print_refusals(rows)


def draw(path: Path, curves: list[Curve]) -> None:
    """A panel for each curve."""
    from matplotlib.ticker import NullFormatter

    with drawn(path, 11, 7.5) as figure:
        for axes, curve in zip(figure.subplots(2, 2).flat, curves, strict=True):
            for name, losses in curve.losses.items():
                axes.plot(curve.x, losses, marker=".", label=name)
            axes.set(xscale="log", yscale="log", xlabel=curve.what, ylabel="loss at equal privacy")
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.legend(fontsize=8)
