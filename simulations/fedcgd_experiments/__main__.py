"""`python -m fedcgd_experiments`: sweeps and their plots."""

from collections.abc import Callable
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Annotated, cast

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fedcgd.optimisation.catalogue import Spelling
from fedcgd.participation import Sampling
from fedcgd_experiments import plots
from fedcgd_experiments.experiment import Point, Record, Setup, identity
from fedcgd_experiments.flower_command import flower_command
from fedcgd_experiments.significance import compare_paired
from fedcgd_experiments.sweep import ResultsFile, on_ray, sweep, tuned
from fedcgd_simulations.tasks import get_task

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console()


class ImageFormat(StrEnum):
    """What a plot is written as."""

    PNG = "png"
    SVG = "svg"


@app.command("sweep")
def sweep_command(
    output: Annotated[Path, typer.Option(help="JSON lines; what is there already is not run again")],
    task: Annotated[str, typer.Option(help="digits, fashion-mnist, cifar10, imdb, tweets")] = "digits",
    model: Annotated[str | None, typer.Option(help="one of the task's models; its default if not given")] = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(help="as for `fedcgd compare`: dp-sgd, lambda-cgd:0.9, bisr:16:normalized; repeat it"),
    ] = None,
    epsilon: Annotated[list[float] | None, typer.Option()] = None,
    learning_rate: Annotated[list[float] | None, typer.Option()] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    tuning_seeds: Annotated[
        int | None, typer.Option(min=1, help="seeds for tuning, if fewer than for the test")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="expected examples in a step")] = 500,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    clip_norm: Annotated[float, typer.Option()] = 1.0,
    delta: Annotated[float, typer.Option()] = 1e-5,
    sampling: Annotated[str, typer.Option(help="none, balls-in-bins, poisson, cyclic-poisson")] = "none",
    data_dir: Annotated[str | None, typer.Option(help="folder of the task's files")] = None,
    address: Annotated[str | None, typer.Option(help="a Ray cluster; this machine alone if not given")] = None,
    cpus: Annotated[float, typer.Option(help="CPUs of one run")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of one run; 0.25 lets four share one")] = 0,
    test: Annotated[bool, typer.Option(help="judge the tuned points by the test examples at the end")] = True,
) -> None:
    """Tune learning rate and λ of every (mechanism, ε) on validation examples, then judge the best by test examples."""
    train = get_task(task, model=model, data_dir=data_dir).load().train
    steps = -(-len(train) // batch)
    points = [
        Point(setup=setup, task=task, model=model, clip_norm=clip_norm, learning_rate=rate, seed=seed)
        for setup in (
            Setup(
                mechanism=str(Spelling.parse(text)),
                sampling=cast(Sampling, sampling),
                epsilon=budget,
                delta=delta,
                steps=steps,
                epochs=epochs,
            )
            for budget in epsilon or [1.0, 2.0, 4.0, 8.0]
            for text in mechanism or ["dp-sgd", "lambda-cgd:0.5", "lambda-cgd:0.7", "lambda-cgd:0.9"]
        )
        for rate, seed in product(learning_rate or [0.5, 1.0, 2.0, 4.0], range(tuning_seeds or seeds))
    ]
    results = ResultsFile(output)
    mapper = on_ray(address, cpus=cpus, gpus=gpus)
    failures = sweep(points, results, mapper, data_dir=data_dir, console=console)
    if test and not failures:
        runs = list(results.runs().values())
        wanted = {point.setup for point in points} & plots.best_lambda(runs)
        chosen = [point for point in tuned(runs, range(seeds)) if point.setup in wanted]
        failures = sweep(chosen, results, mapper, data_dir=data_dir, console=console)
    for line in failures:
        console.print(line, style="red", markup=False)
    console.print(f"{len(results.records)} records in {output}")
    if failures:
        raise typer.Exit(1)


@app.command("plot")
def plot_command(
    results: Annotated[
        list[Path], typer.Argument(help="files that `sweep` wrote, or benchmarks/runtime.py", exists=True)
    ],
    output: Annotated[Path, typer.Option(help="folder of the plots")] = Path("results/plots"),
    format: Annotated[ImageFormat, typer.Option(help="of the files")] = ImageFormat.PNG,
) -> None:
    """Draw all plots that the results have figures for."""
    records = [record for path in results for record in ResultsFile(path).records]
    kinds: dict[str, list[Record]] = {kind: [] for kind in ("run", "calibration", "runtime")}
    for record in records:
        kinds[record["kind"]].append(record)
    calibrations = {identity(Setup(**record["setup"])): record for record in kinds["calibration"]}
    tasks = {str(record["point"]["task"]): None for record in kinds["run"]}
    drawn: list[Path] = []
    for task in tasks:
        runs = [record for record in kinds["run"] if record["point"]["task"] == task]
        for name, draw in (
            ("accuracy-lambda", lambda runs=runs: plots.accuracy_against_lambda(runs, calibrations)),
            ("accuracy-epsilon", lambda runs=runs: plots.accuracy_against_epsilon(runs)),
            ("rmse-ratios", lambda runs=runs: plots.error_ratios(runs, calibrations)),
        ):
            drawn += _draw(output / f"{task}-{name}.{format.value}", draw)
    if kinds["runtime"]:
        drawn += _draw(output / f"runtime.{format.value}", lambda: plots.runtime_bars(kinds["runtime"]))
    for path in drawn:
        console.print(str(path), markup=False)
    if not drawn:
        raise typer.Exit(1)


@app.command("compare")
def compare_command(
    results: Annotated[list[Path], typer.Argument(help="files that `sweep` wrote", exists=True)],
    baseline: Annotated[str, typer.Option(help="the mechanism to compare with")] = "dp-sgd",
) -> None:
    """Test accuracy of each mechanism against that of `baseline` on the same seeds, with a paired t-test."""
    runs = [record for path in results for record in ResultsFile(path).runs().values()]
    for task in dict.fromkeys(str(record["point"]["task"]) for record in runs):
        table = Table(title=f"{task}: test accuracy")
        for heading in ("sampling", "ε", "mechanism", "accuracy", baseline, "difference", "p (paired t)", "seeds"):
            table.add_column(heading)
        for row in compare_paired([record for record in runs if record["point"]["task"] == task], baseline):
            table.add_row(
                row.setup.sampling,
                f"{row.setup.epsilon:g}",
                row.setup.mechanism,
                f"{row.accuracy:.4f} ± {row.spread:.4f}",
                f"{row.baseline:.4f}",
                f"{row.difference:+.4f}",
                f"{row.p_value:.2g}",
                str(row.seeds),
            )
        console.print(table)


@app.command("federated")
def federated_command(
    results: Annotated[Path, typer.Argument(help="a file that `sweep` wrote", exists=True)],
    gpus: Annotated[float, typer.Option(help="GPUs of one node; 0.25 lets four share one")] = 0,
    data_dir: Annotated[str | None, typer.Option(help="folder of the task's files")] = None,
) -> None:
    """For each tuned point the `flwr run` command that trains the same federated, one user per example.

    Where the steps divide the examples, without sampling or with Balls-in-Bins, it releases the same models.
    """
    sizes: dict[tuple[str, str | None], int] = {}
    for point in tuned(ResultsFile(results).runs().values()):
        kind = (point.task, point.model)
        if kind not in sizes:
            sizes[kind] = len(get_task(point.task, model=point.model, data_dir=data_dir).load().train)
        typer.echo(flower_command(point, users=sizes[kind], gpus=gpus, data_dir=data_dir))


def _draw(path: Path, draw: Callable[[], Figure]) -> list[Path]:
    try:
        plots.save(draw(), path)
    except ValueError as error:  # figures for this plot are missing; the others can still be drawn
        console.print(f"no {path.name}: {error}", style="yellow", markup=False)
        return []
    return [path]


if __name__ == "__main__":
    app()
