"""`fedcgd select-lambda`: which λ."""

from contextlib import nullcontext
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcgd.cli.options import DeltaOption, EpsilonOption, JsonOption, RoundsOption, WhenOptions, takes
from fedcgd.cli.report import check_plot, complaints, console, explained_errors, key_value_table, number, print_json

if TYPE_CHECKING:
    from fedcgd.accounting.selection import LambdaSelection


class ObjectiveName(StrEnum):
    """What λ is chosen for."""

    RMSE = "rmse"
    MAX_SE = "max-se"
    AMPLIFIED_RMSE = "amplified-rmse"
    PRACTICAL = "practical"


@takes(WhenOptions)
def select_lambda_command(
    when: WhenOptions,
    rounds: RoundsOption,
    epsilon: EpsilonOption,
    delta: DeltaOption,
    objective: Annotated[
        ObjectiveName,
        typer.Option(
            help="rmse and max-se ignore the sampling; amplified-rmse counts it in; practical is a third of that on 1/(1 − λ)."
        ),
    ] = ObjectiveName.PRACTICAL,
    normalized: Annotated[bool, typer.Option("--normalized", help="Of C_λ with unit columns.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the objective over 1/(1 − λ) into this PNG file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Choose λ of lambda-cgd from public numbers, never from data.

    Example: fedcgd select-lambda --objective rmse --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5
    """
    with explained_errors():
        from fedcgd.accounting.selection import select_lambda

        check_plot(plot)
        participation = when.participation(rounds)
        with nullcontext() if json else complaints.status("searching") as status:
            found = select_lambda(
                participation,
                objective=objective.value,
                epsilon=epsilon,
                delta=delta,
                normalize=normalized,
                progress=None if status is None else lambda text: status.update(f"calibrating {text}"),
            )
    if plot is not None:
        draw(plot, found)
    if json:
        print_json(asdict(found))
        return
    rows = [
        ("λ", number(found.lam)),
        ("1/(1 − λ)", number(1 / (1 - found.lam))),
        ("error", f"{number(found.value)} per unit of clip norm"),
        ("error of λ = 0", number(found.values[0])),
    ]
    console.print(key_value_table(f"λ by {found.objective}, {rounds} rounds, sampling {when.sampling.value}", rows))


def draw(path: Path, found: "LambdaSelection") -> None:
    """The objective over 1/(1 − λ), both logarithmic, with the choice marked, into the image file `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", yscale="log", xlabel="1/(1 − λ)", ylabel=f"{found.objective}, per unit of clip norm"
    )
    axes.plot([1 / (1 - lam) for lam in found.lams], found.values, color="black", marker=".")
    axes.plot(1 / (1 - found.lam), found.value, "o", markersize=9, label=f"λ = {found.lam:.4g}")
    axes.legend()
    figure.savefig(path, dpi=150)
