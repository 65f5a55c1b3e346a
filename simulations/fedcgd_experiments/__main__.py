"""`python -m fedcgd_experiments`: sweeps and their plots."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fedcgd.cli.report import explained_errors
from fedcgd.curvature import Spectrum
from fedcgd.mechanisms.schedule import Schedule
from fedcgd.optimisation.catalogue import MechanismSpec
from fedcgd.participation import Sampling
from fedcgd_experiments import plots
from fedcgd_experiments.claims import claims_of_runs
from fedcgd_experiments.descent import Optimizer
from fedcgd_experiments.experiment import TEST_SEEDS, Point, Record, Setup, identity
from fedcgd_experiments.federated import points_of, train_federated
from fedcgd_experiments.flower_command import flower_command
from fedcgd_experiments.rules import (
    CURVATURE,
    NAMES,
    RULES,
    budgets,
    chosen_lambdas,
    curvature_record,
    rule_points,
    rule_record,
)
from fedcgd_experiments.significance import compare_paired
from fedcgd_experiments.sweep import (
    ResultsFile,
    best_of_families,
    best_rates,
    gather,
    here,
    named,
    on_ray,
    runs_of,
    sweep,
    to_point,
    tune,
    tuned,
)
from fedcgd_experiments.tables import fill
from fedcgd_simulations.tasks import get_task

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
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
    learning_rate: Annotated[
        list[float] | None, typer.Option(help="those tried first, the same for all mechanisms")
    ] = None,
    extensions: Annotated[
        int,
        typer.Option(min=0, help="how often the rates are extended by 2 where the best one is the first or the last"),
    ] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="for the test; none of them tunes")] = 10,
    tuning_seeds: Annotated[int, typer.Option(min=1, max=TEST_SEEDS, help="for tuning; none of them tests")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="expected examples in a step")] = 500,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    clip_norm: Annotated[float, typer.Option()] = 1.0,
    optimizer: Annotated[str, typer.Option(help=", ".join(get_args(Optimizer)))] = "sgd",
    momentum: Annotated[float, typer.Option(help="of sgd")] = 0.0,
    schedule: Annotated[str, typer.Option(help=f"of the learning rate: {', '.join(get_args(Schedule))}")] = "constant",
    delta: Annotated[float, typer.Option()] = 1e-5,
    sampling: Annotated[str, typer.Option(help="none, balls-in-bins, poisson, cyclic-poisson")] = "none",
    data_dir: Annotated[str | None, typer.Option(help="folder of the task's files")] = None,
    physical_batch: Annotated[
        int, typer.Option(min=1, help="per-example gradients at a time; changes the memory, not the result")
    ] = 512,
    address: Annotated[
        str | None,
        typer.Option(help="a Ray cluster; this machine alone if not given; `here`: this process, without Ray"),
    ] = None,
    cpus: Annotated[float, typer.Option(help="CPUs of one run")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of one run; 0.25 lets four share one")] = 0,
    test: Annotated[bool, typer.Option(help="judge the tuned points by the test examples at the end")] = True,
) -> None:
    """Tune learning rate and number of every (mechanism, ε) on validation examples, then judge the best by test examples.

    Example: sweep --output digits.jsonl --batch 60 --epsilon 1 --mechanism dp-sgd --mechanism blt:2 --mechanism blt:4
    """
    train = get_task(task, model=model, data_dir=data_dir).load().train
    steps = -(-len(train) // batch)
    try:
        points = [
            Point(
                setup=setup,
                task=task,
                model=model,
                clip_norm=clip_norm,
                learning_rate=rate,
                optimizer=cast(Optimizer, optimizer),
                momentum=momentum,
                schedule=cast(Schedule, schedule),
                seed=seed,
            )
            for setup in (
                Setup(
                    mechanism=str(MechanismSpec.parse(text)),
                    sampling=cast(Sampling, sampling),
                    epsilon=budget,
                    delta=delta,
                    steps=steps,
                    epochs=epochs,
                )
                for budget in epsilon or [1.0, 2.0, 4.0, 8.0]
                for text in mechanism or ["dp-sgd", "lambda-cgd:0.5", "lambda-cgd:0.7", "lambda-cgd:0.9"]
            )
            for rate, seed in product(learning_rate or [0.5, 1.0, 2.0, 4.0], range(tuning_seeds))
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    results = ResultsFile(output)
    mapper = here if address == "here" else on_ray(address, cpus=cpus, gpus=gpus)
    options: dict[str, Any] = {"data_dir": data_dir, "console": console, "physical_batch": physical_batch}
    failures = tune(points, results, mapper, extensions=extensions, **options)
    if test and not failures:
        runs = list(results.runs().values())
        wanted = {point.setup for point in points} & best_of_families(runs)
        chosen = [point for point in tuned(runs, seeds) if point.setup in wanted]
        failures = sweep(chosen, results, mapper, **options)
    for line in failures:
        console.print(line, style="red", markup=False)
    console.print(f"{len(results.records)} records in {output}")
    if failures:
        raise typer.Exit(1)


@app.command("plot")
def plot_command(
    results: Annotated[
        list[Path], typer.Argument(help="files that `sweep` and `rules` wrote, or benchmarks/runtime.py", exists=True)
    ],
    output: Annotated[Path, typer.Option(help="folder of the plots")] = Path("results/plots"),
    format: Annotated[ImageFormat, typer.Option(help="of the files")] = ImageFormat.PNG,
) -> None:
    """Draw all plots that the results have figures for."""
    files = [ResultsFile(path).records for path in results]
    records = [record for file in files for record in file]
    kinds: dict[str, list[Record]] = {kind: [] for kind in ("calibration", "runtime")}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record)
    # The λ of a rule was not tried by the sweep that tuned λ.
    swept = [file for file in files if not any(record["kind"] == "rule" for record in file)]
    all_runs = [run for file in swept for run in runs_of(file)]
    calibrations = {identity(Setup(**record["setup"])): record for record in kinds["calibration"]}
    chosen = chosen_lambdas(records)
    tasks = {named(record): None for record in all_runs}
    drawn: list[Path] = []
    for task in tasks:
        runs = [record for record in all_runs if named(record) == task]
        for name, draw in (
            ("accuracy-lambda", lambda runs=runs: plots.accuracy_against_lambda(runs, chosen)),
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
@explained_errors()
def compare_command(
    results: Annotated[list[Path], typer.Argument(help="files that `sweep` wrote", exists=True)],
    baseline: Annotated[str, typer.Option(help="the mechanism to compare with, without its number")] = "dp-sgd",
    under: Annotated[
        str | None, typer.Option(help="sampling of the baseline (poisson, …); that of the other if not given")
    ] = None,
) -> None:
    """Test accuracy of each mechanism against that of `baseline` on the same seeds: paired t-tests.

    p (Holm) is corrected for the number of tests in the table.
    """
    files = [ResultsFile(path) for path in results]
    runs = [record for file in files for record in file.runs().values()]
    calibrations = {name: record for file in files for name, record in file.calibrations().items()}
    for task in dict.fromkeys(map(named, runs)):
        own = [record for record in runs if named(record) == task]
        table = Table(title=f"{task}: test accuracy", caption=claims_of_runs(own, calibrations))
        headings = (
            "sampling",
            "ε",
            "mechanism",
            "accuracy",
            baseline,
            "difference",
            "p (paired t)",
            "p (Holm)",
            "seeds",
        )
        for heading in headings:
            table.add_column(heading)
        for row in compare_paired(own, baseline, under=cast(Sampling | None, under)):
            table.add_row(
                row.setup.sampling,
                f"{row.setup.epsilon:g}",
                row.setup.mechanism,
                f"{row.accuracy:.4f} ± {row.spread:.4f}",
                f"{row.baseline:.4f}",
                f"{row.difference:+.4f}",
                f"{row.p_value:.2g}",
                f"{row.corrected:.2g}",
                str(row.seeds),
            )
        console.print(table)


@app.command("rules")
def rules_command(
    results: Annotated[Path, typer.Argument(help="a file that `sweep` wrote, with DP-λCGD in it", exists=True)],
    output: Annotated[Path, typer.Option(help="JSON lines; what is there already is not run again")],
    spectrum: Annotated[
        Path | None,
        typer.Option(help="what `fedcgd curve` measured for the model: also judge the λ fitted to it", exists=True),
    ] = None,
    rule: Annotated[list[str] | None, typer.Option(help=f"{', '.join(NAMES)}; all if not given; repeat it")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="for the test, as in the sweep")] = 10,
    extensions: Annotated[int, typer.Option(min=0, help="as of `sweep`")] = 4,
    data_dir: Annotated[str | None, typer.Option(help="folder of the task's files")] = None,
    physical_batch: Annotated[int, typer.Option(min=1, help="as of `sweep`")] = 512,
    address: Annotated[str | None, typer.Option(help="as of `sweep`")] = None,
    cpus: Annotated[float, typer.Option(help="CPUs of one run")] = 1,
    gpus: Annotated[float, typer.Option(help="GPUs of one run")] = 0,
) -> None:
    """Train DP-λCGD at the λ of each rule, at every budget of `results`, with the learning rate tuned as there.

    With a spectrum also at the λ that is fitted to it for the learning rate that DP-SGD was tuned to, where `results` has that.
    Example: rules digits.jsonl --output digits-rules.jsonl --spectrum spectrum.json
    """
    asked = rule or list(NAMES)
    if unknown := [name for name in asked if name not in NAMES]:
        raise typer.BadParameter(f"unknown rule {unknown[0]!r}; the rules are {', '.join(NAMES)}")
    runs, ruled = list(ResultsFile(results).runs().values()), ResultsFile(output)
    mapper = here if address == "here" else on_ray(address, cpus=cpus, gpus=gpus)
    known = {budget: set(lams) for budget, lams in chosen_lambdas(ruled.records).items()}
    missing = [(name, s) for s in budgets(runs) for name in RULES if name in asked and name not in known.get(s, ())]
    failures = gather("choose λ", rule_record, missing, ruled, mapper, console)
    if spectrum is not None and CURVATURE in asked:
        rates = best_rates(runs)
        fitted = [setup for setup in budgets(runs) if setup in rates and CURVATURE not in known.get(setup, ())]
        fit = partial(curvature_record, spectrum=Spectrum.load(spectrum))
        failures += gather("fit λ", fit, [(setup, rates[setup]) for setup in fitted], ruled, mapper, console)
    options: dict[str, Any] = {"data_dir": data_dir, "console": console, "physical_batch": physical_batch}
    points = rule_points(runs, ruled.records)
    failures += tune(points, ruled, mapper, extensions=extensions, **options)
    if not failures:
        failures = sweep(tuned(ruled.runs().values(), seeds), ruled, mapper, **options)
    for line in failures:
        console.print(line, style="red", markup=False)
    if failures:
        raise typer.Exit(1)


@app.command("page")
def page_command(
    page: Annotated[Path, typer.Argument(help="a Markdown file with <!-- table: NAME --> … <!-- end -->", exists=True)],
    results: Annotated[Path, typer.Option(help="folder of the files that `sweep` and `rules` wrote", exists=True)],
) -> None:
    """Write the tables of a page anew from results.

    Example: page docs/results.md --results benchmarks/results
    """
    page.write_text(fill(page.read_text(), results))


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
    for point in tuned(ResultsFile(results).runs().values(), seeds=1):
        kind = (point.task, point.model)
        if kind not in sizes:
            sizes[kind] = len(get_task(point.task, model=point.model, data_dir=data_dir).load().train)
        typer.echo(flower_command(point, users=sizes[kind], gpus=gpus, data_dir=data_dir))


@app.command("federate")
def federate_command(
    results: Annotated[Path, typer.Argument(help="a file that `sweep` wrote", exists=True)],
    output: Annotated[Path, typer.Option(help="JSON lines; what is there already is not run again")],
    seeds: Annotated[int, typer.Option(min=1, help="the first so many of the test's")] = 1,
    family: Annotated[list[str] | None, typer.Option(help="mechanisms without their numbers; all if not given")] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="budgets; all if not given")] = None,
    data_dir: Annotated[str | None, typer.Option(help="folder of the task's files")] = None,
) -> None:
    """Train tuned points by the app as well, as the commands of `federated` do, in this process: one user per example.

    Example: federate digits-cnn.jsonl --output digits-cnn-federated.jsonl --seeds 3 --family dp-sgd --family lambda-cgd
    """
    sweeps, kept = ResultsFile(results), ResultsFile(output)
    calibrations, done = sweeps.calibrations(), {identity(to_point(record)) for record in kept.records}
    points = points_of(list(sweeps.runs().values()), seeds, families=family or (), epsilons=epsilon or ())
    missing = [point for point in points if identity(point) not in done]

    def train(point: Point) -> Record:
        return train_federated(point, calibrations[identity(point.setup)], data_dir=data_dir)

    failures = gather("train", train, missing, kept, here, console)
    for line in failures:
        console.print(line, style="red", markup=False)
    if failures:
        raise typer.Exit(1)


def _draw(path: Path, draw: Callable[[], Figure]) -> list[Path]:
    try:
        plots.save(draw(), path)
    except ValueError as error:  # figures for this plot are missing; the others can still be drawn
        console.print(f"no {path.name}: {error}", style="yellow", markup=False)
        return []
    return [path]


if __name__ == "__main__":
    app()
