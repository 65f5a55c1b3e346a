"""`fedcgd explain`: why ε holds, and what it demands."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedcgd.accounting.explain import explain
from fedcgd.accounting.tradeoff import trade_off
from fedcgd.accounting.tradeoff_plot import plot_trade_off
from fedcgd.cli.options import DeltaOption, JsonOption, RoundsOption, RunOptions, takes, usual
from fedcgd.cli.printing import check_plot, console, print_json


@takes(RunOptions)
def explain_command(
    run: RunOptions,
    rounds: RoundsOption,
    delta: DeltaOption,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", callback=usual, help="Budget ε; or give --noise-multiplier.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option("--noise-multiplier", help="σ: noise per unit of clip norm; or give --epsilon.")
    ] = None,
    clip_norm: Annotated[float, typer.Option("--clip-norm", help="ζ: L2 bound on a user's update of a round.")] = 1.0,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the run's trade-off curve (f-DP) into this PNG file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the chain of reasoning behind ε, in words and numbers, with what each assumption demands of a deployment.

    Example: fedcgd explain --mechanism lambda-cgd:0.9 --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5
    """
    check_plot(plot)
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError("give --epsilon or --noise-multiplier: one of the two")
    participation = run.run(rounds)
    if epsilon is None and run.spelling().is_open:
        raise ValueError(
            f"--noise-multiplier belongs to one mechanism: write --mechanism {run.spelling().row.spelling} with its number, "
            "or give --epsilon, for which the number is chosen"
        )
    chosen = run.chosen(participation, epsilon=epsilon, delta=delta)
    steps = explain(
        chosen,
        participation,
        clip_norm=clip_norm,
        delta=delta,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        rho=run.damping(participation, chosen),
    )
    if plot is not None:
        sigma = next(step.value for step in steps if step.title == "noise")
        assert sigma is not None
        curve = trade_off(chosen, participation, noise_multiplier=sigma)
        plot_trade_off(plot, {f"{chosen.name}, σ = {sigma:.4g}": curve})
    if json:
        print_json([asdict(step) for step in steps])
        return
    for count, step in enumerate(steps, start=1):
        console.print(f"[bold]{count}. {step.title}[/bold]", highlight=False)
        console.print(f"{step.statement}\n", highlight=False, markup=False)
