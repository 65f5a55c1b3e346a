"""`fedcgd compare`: mechanisms side by side at one budget."""

import re
from pathlib import Path
from typing import Any

from rich.table import Table

from fedcgd.accounting import calibrate
from fedcgd.cli.commands import CompareOptions
from fedcgd.cli.printing import (
    check_plot,
    console,
    drawn,
    figures,
    number,
    print_json,
    print_refusals,
    progress,
    sensitivity_text,
)
from fedcgd.cli.usage import in_options
from fedcgd.optimisation.catalogue import spelling_of

_COLUMNS = ("noise_multiplier", "sensitivity", "rmse", "max_se")


def default_mechanisms(separation: int, rounds: int) -> list[str]:
    """The rows of Table 4 of arXiv:2601.22334 that make sense here: bandwidths up to b, and λ for few and many rounds.

    The mechanisms whose matrix is dense are left out; name them to include them.
    """
    bandwidths = sorted({p for p in (2, 4, 16, 64) if p < separation} | ({separation} if separation > 1 else set()))
    names = ["dp-sgd", *(f"lambda-cgd:{lam}" for lam in (0.9, 0.95, 0.975))]
    for name in ("bisr", "bsr", "banded-toeplitz", "band-inv-mf"):
        names += [f"{name}:{p}" for p in bandwidths]
    return [*names, "blt:4"] if rounds > 1 else names


def compare(asked: CompareOptions) -> None:
    """Compare mechanisms: σ, sensitivity and errors at one budget, best RMSE first; with --curvature, least loss first."""
    check_plot(asked.plot)
    workload, curvature = asked.workload(asked.rounds), asked.quadratic()
    texts = asked.mechanism or default_mechanisms(asked.apart, asked.rounds)
    runs = [(text, asked.with_mechanism(text)) for text in texts]
    for _, one in runs:
        one.spelling()  # refuses what is misspelled before any work
    rows: list[dict[str, Any]] = []
    with progress(len(runs), quiet=asked.json) as step:
        for text, one in runs:
            step(text)
            try:
                participation = one.run(asked.rounds)
                made = one.chosen(participation, epsilon=asked.epsilon, delta=asked.delta, error=asked.error)
                guarantee = calibrate(made, participation, epsilon=asked.epsilon, delta=asked.delta)
                label = f"{text} → {spelling_of(made)}" if one.spelling().is_open else text
                rows.append({"label": label, **figures(made, participation, guarantee, workload, curvature)})
            except ValueError as reason:
                if len(runs) == 1:
                    raise
                rows.append({"label": text, "error": in_options(str(reason))})
    if all("error" in row for row in rows):
        reasons = dict.fromkeys(row["error"] for row in rows)
        raise ValueError("no mechanism could be calibrated: " + "; ".join(reasons))
    rows.sort(key=lambda row: row.get("loss", row.get("rmse", float("inf"))))
    if asked.plot is not None:
        draw(asked.plot, rows)
    if asked.json:
        print_json(rows)
    else:
        show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """The rows, one of which at least is no error, as a table whose title says what holds for all of them."""
    done = [row for row in rows if "error" not in row]
    own = len({_participation(row) for row in done}) > 1  # groups of their own, with cyclic Poisson sampling
    first = done[0]
    title = (
        f"ε ≤ {number(first['epsilon'])} at δ = {number(first['delta'])}; adjacency: {first['adjacency']}; "
        f"sampling: {first['sampling']}; {' or '.join(dict.fromkeys(row['method'] for row in done))}; n = {first['rounds']}"
        + ("" if own else f", {_participation(first)}")
    )
    if unsure := max(row["failure_probability"] for row in done):
        title += f"; δ includes {number(unsure)} for draws that mislead"
    caption = "RMSE and MaxSE include σ; per unit of clip norm. The sensitivity of C is exact, or an upper bound where it has ≤"
    if "loss" in first:
        caption += "; loss is what the noise adds at the end, per (clip norm / cohort)²"
    table = Table(title=title, caption=caption)
    table.add_column("mechanism", no_wrap=True)
    if own:
        table.add_column("participation")
    columns = _COLUMNS + (("loss",) if "loss" in first else ())
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in done:
        shown = {column: number(row[column]) for column in columns} | {"sensitivity": sensitivity_text(row)}
        label = re.sub(r"0\.\d{5,}", lambda digits: f"{float(digits[0]):.4f}", row["label"])  # JSON has all digits
        table.add_row(label, *([_participation(row)] if own else []), *shown.values())
    console.print(table)
    print_refusals(rows)


def _participation(row: dict[str, Any]) -> str:
    """k and b of a row, or q and b."""
    often = f"k ≤ {row['participations']}" if row["sampling_rate"] is None else f"q = {row['sampling_rate']:.6g}"
    return f"{often}, b = {row['min_separation']}"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """RMSE of each mechanism as a horizontal bar."""
    done = [row for row in rows if "error" not in row][::-1]
    with drawn(path, 7, 0.8 + 0.3 * len(done)) as figure:
        axes = figure.add_subplot(xlabel="RMSE of the noise, per unit of clip norm")
        bars = axes.barh([row["label"] for row in done], [row["rmse"] for row in done], color="0.6", edgecolor="black")
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.margins(x=0.12)
