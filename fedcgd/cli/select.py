"""`fedcgd select-lambda`: which λ. `fedcgd select-bands`: how many bands."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedcgd.accounting.guarantee import ADJACENCY
from fedcgd.accounting.selection import LambdaSelection, Objective, select_bands, select_lambda
from fedcgd.cli.options import (
    DeltaOption,
    EpsilonOption,
    ErrorOption,
    FitOptions,
    JsonOption,
    RoundsOption,
    takes,
)
from fedcgd.cli.printing import (
    budget,
    check_plot,
    console,
    drawn,
    key_value_table,
    number,
    print_json,
    status,
)
from fedcgd.cli.printing import when as when_figures
from fedcgd.optimisation.catalogue import BANDS, MechanismSpec, spelling_of


@takes(FitOptions)
def select_lambda_command(
    when: FitOptions,
    rounds: RoundsOption,
    epsilon: EpsilonOption,
    delta: DeltaOption,
    objective: Annotated[
        Objective | None,
        typer.Option(
            help="rmse and max-se ignore the sampling; amplified-rmse counts it in; practical is a third of that on 1/(1 − λ), "
            "and excess on λ/(1 − λ); curvature is the root of the loss on --curvature. Default: excess, or "
            "curvature if there is one."
        ),
    ] = None,
    normalized: Annotated[bool, typer.Option("--normalized", help="Of C_λ with unit columns.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the objective over 1/(1 − λ) into this PNG file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Choose λ of lambda-cgd from public numbers, never from data.

    Example: fedcgd select-lambda --objective rmse --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5
    """
    check_plot(plot)
    participation, curvature = when.participation(rounds), when.quadratic()
    chosen = objective or ("excess" if curvature is None else "curvature")
    with status(json, "searching") as say:
        found = select_lambda(
            participation,
            objective=chosen,
            epsilon=epsilon,
            delta=delta,
            normalize=normalized,
            workload=when.workload(rounds),
            curvature=curvature,
            progress=say,
        )
    if plot is not None:
        draw(plot, found)
    if json:
        print_json(asdict(found) | {"normalized": normalized} | when_figures(participation) | budget(epsilon, delta))
        return
    rows = [
        ("λ", number(found.lam)),
        ("1/(1 − λ)", number(1 / (1 - found.lam))),
        ("error", f"{number(found.value)} per unit of clip norm"),
        ("error of λ = 0", number(found.values[0])),
        ("participation", str(participation)),
        ("budget", f"ε = {epsilon:g} at δ = {delta:g}; {ADJACENCY}; sampling: {when.sampling}"),
    ]
    console.print(key_value_table(f"λ by {found.objective}, {rounds} rounds, sampling {when.sampling}", rows))


@takes(FitOptions)
def select_bands_command(
    when: FitOptions,
    rounds: RoundsOption,
    epsilon: EpsilonOption,
    delta: DeltaOption,
    mechanism: Annotated[
        str,
        typer.Option(help="A mechanism with bands, without numbers: banded-toeplitz, bsr, bifr, bisr:normalized, …"),
    ] = "banded-toeplitz",
    error: ErrorOption = "rmse",
    json: JsonOption = False,
) -> None:
    """Choose the number of bands p of a mechanism: more cancel more noise, fewer leave more privacy to sampling.

    Tries p = 1, 2, 4, … and the longest. Under cyclic-poisson without --separation each p has its own p groups, and k =
    --participations; otherwise p is at most --separation.

    Example: fedcgd select-bands --sampling cyclic-poisson --rounds 128 --participations 8 --epsilon 2 --delta 1e-8
    """
    asked, workload, curvature = MechanismSpec.parse(mechanism), when.workload(rounds), when.quadratic()
    if asked.open[:1] != (BANDS,):
        raise ValueError(
            f"give a mechanism with bands, without their number, such as banded-toeplitz; got {mechanism!r}"
        )
    longest = when.apart
    if when.sampling == "cyclic-poisson" and when.apart == 1:
        if when.sampling_rate is not None:
            raise ValueError(
                "--sampling-rate is of a group of users, and each number of bands has groups of its own: give "
                "--participations, or --separation for one number of groups"
            )
        longest = max(1, rounds // (when.participations or rounds))
    with status(json, "searching") as say:
        found = select_bands(
            asked,
            lambda p: when.participation(rounds, p),
            longest,
            epsilon=epsilon,
            delta=delta,
            error=error,
            workload=workload,
            curvature=curvature,
            progress=say,
        )
    if json:
        chosen = {
            "bands": found.bandwidth,
            "mechanism": spelling_of(found.mechanism),
            "noise_multiplier": found.noise_multiplier,
            "errors": found.errors,
        }
        participation = when.participation(rounds, found.bandwidth)
        print_json(chosen | {"error": error} | when_figures(participation) | budget(epsilon, delta))
        return
    what = error if curvature is None else "loss"
    rows = [(f"p = {p}", f"{what} {number(value)}") for p, value in found.errors]
    rows.append(("least", f"{spelling_of(found.mechanism)}, σ = {number(found.noise_multiplier)}"))
    rows.append(("participation", str(when.participation(rounds, found.bandwidth))))
    rows.append(("budget", f"ε = {epsilon:g} at δ = {delta:g}; {ADJACENCY}; sampling: {when.sampling}"))
    console.print(key_value_table(f"{mechanism}, {rounds} rounds", rows))


def draw(path: Path, found: LambdaSelection) -> None:
    """The objective over 1/(1 − λ), both logarithmic, with the choice marked, into the image file `path`."""
    with drawn(path, 6, 4) as figure:
        axes = figure.add_subplot(
            xscale="log", yscale="log", xlabel="1/(1 − λ)", ylabel=f"{found.objective}, per unit of clip norm"
        )
        axes.plot([1 / (1 - lam) for lam in found.lams], found.values, color="black", marker=".")
        axes.plot(1 / (1 - found.lam), found.value, "o", markersize=9, label=f"λ = {found.lam:.4g}")
        axes.legend()
