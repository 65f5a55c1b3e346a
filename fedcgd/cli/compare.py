"""`fedcgd compare`: mechanisms side by side at one budget, and what their noise costs on a quadratic."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedcgd.accounting import calibrate
from fedcgd.cli.commands import CompareOptions
from fedcgd.cli.options import RunOptions
from fedcgd.cli.printing import (
    budget,
    console,
    figures,
    number,
    print_json,
    print_refusals,
    sensitivity_text,
    status,
)
from fedcgd.cli.usage import in_options
from fedcgd.optimisation.catalogue import MechanismSpec, spelling_of
from fedcgd.optimisation.table import LAMBDA
from fedcgd.quadratic import Quadratic
from fedcgd.quadratic.loss import gradient_norm


@dataclass(frozen=True)
class Candidate:
    """A row that is asked for: a mechanism, who takes part when, and the curvature it is fitted to."""

    run: RunOptions
    fitted_to: Quadratic | None

    @property
    def label(self) -> str:
        """The mechanism as it is asked for."""
        return self.run.mechanism + ", fitted" * (self.fitted_to is not None)


def default_mechanisms(separation: int, rounds: int, *, fitted: bool) -> list[str]:
    """What is compared where nothing is named: with a curvature, one or two mechanisms of each kind.

    Without one, the rows of Table 4 of arXiv:2601.22334 that make sense here: bandwidths up to b, and λ for few and many rounds.
    The mechanisms whose matrix is dense are left out; name them to include them.
    """
    if fitted:
        bands = min(8, separation)
        return [
            "dp-sgd", "lambda-cgd", "nu-dp-ftrl", "bisr:4", "toeplitz", "tree", "blt:2",
            f"band-inv-mf:{bands}", f"banded-toeplitz:{bands}",
            *([f"band-mf:{bands}", f"noise-curve:{bands}"] if bands > 1 else []),
        ]  # fmt: skip
    bandwidths = sorted({p for p in (2, 4, 16, 64) if p < separation} | ({separation} if separation > 1 else set()))
    names = ["dp-sgd", *(f"lambda-cgd:{lam}" for lam in (0.9, 0.95, 0.975))]
    for name in ("bisr", "bsr", "banded-toeplitz", "band-inv-mf"):
        names += [f"{name}:{p}" for p in bandwidths]
    return [*names, "blt:4"] if rounds > 1 else names


def compare(asked: CompareOptions) -> None:
    """Compare mechanisms at one budget: σ, sensitivity and errors, best RMSE first; with --curvature, least loss first."""
    quadratic = asked.quadratic()
    if asked.plot is not None and (asked.plot.suffix not in (".png", ".svg", ".pdf") or not asked.plot.parent.is_dir()):
        raise ValueError(f"--plot is a .png, .svg or .pdf file in a folder that is there, got {asked.plot}")
    candidates = list(_candidates(asked, quadratic))
    rows: list[dict[str, Any]] = []
    with status(asked.json) as say:
        for place, one in enumerate(candidates, 1):

            def step(text: str, what: str = f"{one.label}, {place} of {len(candidates)}") -> None:
                say(f"{what}: {text}")

            try:
                rows.append(_row(one, asked, quadratic, step))
            except ValueError as reason:
                if len(candidates) == 1:
                    raise
                rows.append({"label": one.label, "error": in_options(str(reason))})
    if all("error" in row for row in rows):
        reasons = dict.fromkeys(row["error"] for row in rows)
        raise ValueError("no mechanism could be calibrated: " + "; ".join(reasons))
    rows.sort(key=lambda row: row.get("loss", row.get("rmse", float("inf"))))
    summary = {} if quadratic is None else _summary(quadratic)
    if asked.plot is not None:
        draw(asked.plot, [row for row in rows if "error" not in row], "rmse" if quadratic is None else "loss")
    if asked.json:
        print_json(budget(asked.epsilon, asked.delta) | summary | {"mechanisms": rows})
    else:
        show(rows, summary)


def _candidates(asked: CompareOptions, quadratic: Quadratic | None) -> Iterator[Candidate]:
    """What is asked for, a row each. Raises ValueError, before any work, for what is misspelled."""
    texts = asked.mechanism or default_mechanisms(asked.separation or 1, asked.rounds, fitted=quadratic is not None)
    for text in dict.fromkeys(texts):
        run = asked.with_mechanism(text)
        yield from (Candidate(run, fitted_to) for fitted_to in _fits(run.spelling(), quadratic))


def _fits(spec: MechanismSpec, quadratic: Quadratic | None) -> list[Quadratic | None]:
    """None to show it as it is, the quadratic to show it fitted, or both."""
    row = spec.row
    if quadratic is None or spec.made is not None or row.fit is None or (row.finds_number and not spec.is_open):
        return [None]
    return [None, quadratic] if row.optimise is not None or row.parameters == (LAMBDA,) else [quadratic]


def _row(
    one: Candidate, asked: CompareOptions, quadratic: Quadratic | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """What is reported of a mechanism. Raises ValueError for what is not covered."""
    participation, workload = one.run.run(asked.rounds), asked.workload(asked.rounds)
    target = {"epsilon": asked.epsilon, "delta": asked.delta}
    say("choosing")
    made = one.run.chosen(participation, **target, curvature=one.fitted_to, progress=say)
    guarantee = calibrate(made, participation, **target, progress=say)
    label = f"{one.label} → {spelling_of(made)}" if one.run.spelling().is_open else one.label
    row = {"label": label, **figures(made, participation, guarantee, workload, quadratic)}
    if quadratic is None:
        return row
    loss = gradient_norm(made, asked.rounds, quadratic, stddev=guarantee.noise_multiplier)
    return row | {"fitted": one.fitted_to is not None, "gradient_norm": loss}


def _summary(quadratic: Quadratic) -> dict[str, Any]:
    """The spectrum that noise is fitted to."""
    spectrum = quadratic.spectrum
    return {
        "measured_on": dict(spectrum.measured_on),
        "dimension": spectrum.dimension,
        "effective_dimension": spectrum.effective_dimension,
        "largest_eigenvalue": spectrum.largest,
        "learning_rate": quadratic.learning_rate,
    }


def show(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
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
        title += f"; δ includes {number(unsure)} for Monte Carlo samples that mislead"
    caption = "RMSE and MaxSE include σ; per unit of clip norm. The sensitivity of C is exact, or an upper bound where it has ≤"
    columns: tuple[str, ...] = ("noise_multiplier", "sensitivity", "rmse", "max_se")
    if summary:
        columns = ("noise_multiplier", "rmse", "loss", "gradient_norm")
        title += (
            f"; d = {summary['dimension']}, d_eff = {number(summary['effective_dimension'])}, "
            f"‖H‖ = {number(summary['largest_eigenvalue'])}, η = {number(summary['learning_rate'])}"
        )
        caption = (
            "RMSE includes σ. Loss: what the noise adds after all rounds; gradient norm: to its mean over rounds; per "
            "(clip norm / cohort)². noise-curve: with the barrier that suits networks, so above the least loss"
        )
    table = Table(title=title, caption=caption)
    table.add_column("mechanism", overflow="fold")
    if own:
        table.add_column("participation")
    for column in columns:
        table.add_column(
            "σ" if column == "noise_multiplier" else column.replace("_", " "), justify="right", no_wrap=True
        )
    for row in done:
        shown = {column: number(row[column]) for column in columns}
        if "sensitivity" in shown:
            shown["sensitivity"] = sensitivity_text(row)
        label = re.sub(r"0\.\d{5,}", lambda digits: f"{float(digits[0]):.4f}", row["label"])  # JSON has all digits
        table.add_row(escape(label), *([_participation(row)] if own else []), *shown.values())
    console.print(table)
    print_refusals(rows)


def draw(path: Path, rows: list[dict[str, Any]], measure: str) -> None:
    """The rows' RMSE or loss as bars, the best at the top, with what ε holds for."""
    from matplotlib.figure import Figure  # of the extra `simulation`

    figure = Figure(figsize=(7, 1.2 + 0.3 * len(rows)), layout="constrained")
    label = {"rmse": "RMSE of the noise, per unit of clip norm", "loss": "loss by the noise, per (clip norm / cohort)²"}
    budget = "ε ≤ {epsilon:g}, δ = {delta:g}, {adjacency}\nsampling: {sampling}, n = {rounds}, {method}"
    axes = figure.add_subplot(xlabel=label[measure], title=budget.format(**rows[0]))
    bars = axes.barh([row["label"] for row in rows], [row[measure] for row in rows], color="0.6", edgecolor="black")
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    figure.savefig(path, dpi=150)


def _participation(row: dict[str, Any]) -> str:
    """k and b of a row, or q and b."""
    often = f"k ≤ {row['participations']}" if row["sampling_rate"] is None else f"q = {row['sampling_rate']:.6g}"
    return f"{often}, b = {row['min_separation']}"
