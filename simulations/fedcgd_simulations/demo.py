"""`make simulate`: DP-SGD and DP-λCGD at the same (ε, δ), federated on this machine, side by side."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedcgd_simulations.flower_runs import local_superlink, run_app
from fedcgd_simulations.report import plot_accuracy, summary


def table(runs: list[dict[str, Any]]) -> Table:
    """The runs as a table whose title says under which promise they ran."""
    first = runs[0]
    budget = f"(ε, δ) = ({first['epsilon']:.3g}, {first['delta']:g})"
    promise = f"{budget}, adjacency: {first['adjacency']}, sampling: {first['sampling']}"
    result = Table(title=f"{first['task']}, {first['users']} users, {first['cohort']} a round\n{promise}")
    for column in ("mechanism", "noise multiplier", "RMSE of the noise", "rounds", "test accuracy", "seconds"):
        first_column = column == "mechanism"
        result.add_column(column, justify="left" if first_column else "right", no_wrap=first_column)
    for run in runs:
        result.add_row(
            run["label"],
            f"{run['noise_multiplier']:.3f}",
            f"{run['rmse']:.2f}",
            f"{run['releases']}",
            f"{run['accuracy'][-1]:.4f}",
            f"{run['seconds']:.0f}",
        )
    return result


def main(
    results: Annotated[Path, typer.Option(help="Folder for the JSON files and the plot.")] = Path("results"),
    lam: Annotated[float, typer.Option(help="λ of DP-λCGD.")] = 0.8,
    epsilon: Annotated[float, typer.Option(help="Budget ε of each run.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Simulation seed: the runs can be repeated, and are not private.")] = 0,
) -> None:
    """Train both mechanisms with `flwr run` and compare them.

    Example: python -m fedcgd_simulations.demo --results results --epsilon 2
    """
    console = Console()
    folder = results.resolve()
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with (
            tempfile.TemporaryDirectory(prefix="fedcgd-flwr-") as home,
            Progress(*columns, console=console) as bars,
            local_superlink(Path(home)) as environment,
        ):
            for name, mechanism in (("dp-sgd", "dp-sgd"), ("lambda-cgd", f"lambda-cgd:{lam}")):
                bar = bars.add_task(f"{mechanism}: rounds released", total=None)
                path = folder / f"digits-{name}.json"
                options: dict[str, str | int | float] = {"epsilon": epsilon, "seed": seed, "results": str(path)}
                config = {"mechanism": mechanism, **options}
                runs.append(run_app(environment, config, progress=partial(_show, bars, bar)))
    except RuntimeError as error:
        console.print(f"Failed: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    plot = folder / "digits-demo.png"
    plot_accuracy(plot, runs)
    console.print(table(runs))
    for run in runs:
        console.print(summary(run), soft_wrap=True, highlight=False)
    console.print(f"Plot: {plot}", soft_wrap=True)


def _show(bars: Progress, bar: TaskID, round: int, rounds: int) -> None:
    bars.update(bar, completed=round, total=rounds)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
