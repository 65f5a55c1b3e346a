"""`python -m fedcgd_experiments`: studies that tune all arms with equal budgets, their tables and their pictures."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import click
from matplotlib.figure import Figure
from rich.console import Console

from fedcgd.cli.declare import Argument, Option
from fedcgd.mechanisms.schedule import Schedule
from fedcgd.participation import SAMPLINGS
from fedcgd_experiments import plots, real_tables
from fedcgd_experiments.central import CentralTrainer
from fedcgd_experiments.comparison import epsilons, pick
from fedcgd_experiments.flower_command import flower_command
from fedcgd_experiments.paper_studies import PAPER_STUDIES
from fedcgd_experiments.people import PeopleTrainer
from fedcgd_experiments.people_point import PeoplePoint
from fedcgd_experiments.point import CentralPoint
from fedcgd_experiments.results import Results, write_table
from fedcgd_experiments.runner import Deadline, Outcome, Trainer, carry_out, within
from fedcgd_experiments.studies import STUDIES
from fedcgd_experiments.study import Study
from fedcgd_experiments.tables import Found, accuracy, fill, point_class
from fedcgd_experiments.training import outcome, planned_rates, training, widened
from fedcgd_simulations.commands import group_of

console = Console()

Names = Annotated[
    list[str] | None,
    Argument(help="studies (`list` names them), or how the names of figures begin; all but figures if not given"),
]
Folder = Annotated[Path, Option("--results", help="folder of the results, one file of JSON lines for each study")]
DataDir = Annotated[str, Option("--data-dir", help="folder of the task's files; the usual places if not given")]


def list_command() -> None:
    """The studies: what each is of, its arms and its budget. Those named `figure-…` are of a paper, for GPUs.

    Example: python -m fedcgd_experiments list
    """
    for study in [*STUDIES.values(), *PAPER_STUDIES.values()]:
        budget = f"{study.candidates} candidates for each of {len(study.arms)} arms at {len(study.settings)} settings"
        console.print(f"{study.name}: {study.title}; {budget}", highlight=False)


@dataclass(frozen=True, kw_only=True)
class Running:
    """Where trainings run, and for how long."""

    results: Folder = Path("results")
    data_dir: DataDir = ""
    processes: Annotated[int, Option(min=0, help="how many at once; 0: one for each core")] = 1
    nice: Annotated[int, Option(type=click.IntRange(0, 19), help="how far to stand back for other programs")] = 0
    minutes: Annotated[float | None, Option(help="stop after so many; call again to go on")] = None
    physical_batch: Annotated[int, Option(min=1, help="per-example gradients at a time; changes the memory")] = 512

    def trainer(self, late: Deadline) -> CentralTrainer:
        """What trains over examples."""
        return CentralTrainer(
            data_dir=self.data_dir or None, physical_batch=self.physical_batch, checkpoints=self.results / "checkpoints",
            late=late,
        )  # fmt: skip

    def carry_out(self, study: Study, found: Results, trainer: Trainer, late: Deadline) -> Outcome:
        """What `found` lacks of `study`."""
        processes = self.processes or os.cpu_count() or 1
        return carry_out(study, found, trainer, processes=processes, console=console, late=late)


@dataclass(frozen=True, kw_only=True)
class Private:
    """The budget of a training, and how often a user takes part."""

    epsilon: Annotated[list[float], Option(help="repeat it for several")]
    delta: float = 1e-5
    sampling: Annotated[
        str, Option(type=click.Choice(tuple(SAMPLINGS)), help="of the batches; none: anybody may know them")
    ] = "none"
    epochs: int = 10
    steps: Annotated[int, Option(help="rounds of an epoch")] = 20
    clip_norm: float = 1.0
    normalise: Annotated[
        float, Option(help="part of the budget for the mean and scale of a linear model's inputs, say 0.05")
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How a model is moved, and how often it is trained."""

    learning_rate: Annotated[
        list[float] | None,
        Option(
            help="repeat it to choose by validation; default: half, once and twice what theory expects, and on where that is best"
        ),
    ] = None
    momentum: float = 0.9
    schedule: Annotated[Schedule, Option(help="of the rate")] = "linear"
    average: Annotated[
        float, Option(help="decay of the average of models that is judged, say 0.99; 0: the last model")
    ] = 0.0
    augmentations: Annotated[int, Option(min=0, help="copies of a picture, changed at random, in its gradient")] = 0
    seeds: Annotated[int, Option(min=1, help="trainings whose test accuracies are averaged")] = 3


def run_command(running: Running, studies: Names = None) -> None:
    """Run what is missing of the studies, and print the accuracies of those that are complete.

    What the results hold is not run again, and each result is kept as it comes.

    Ends with 1 if a training failed, and with 3 if time was up before all was done.
    Example: python -m fedcgd_experiments run digits tweets-3000 --results benchmarks/results --processes 0 --nice 19
    """
    os.nice(running.nice)
    failures: list[str] = []
    late, left = within(running.minutes), 0
    for study in _chosen(studies):
        people = point_class(study) is PeoplePoint
        trainer = PeopleTrainer(data_dir=running.data_dir) if people else running.trainer(late)
        done = running.carry_out(study, Results(running.results / f"{study.name}.jsonl"), trainer, late)
        failures += done.failures
        left += done.left
        if not done.left:
            click.echo(accuracy(running.results, study.name))
    _end(failures, left)


def train_command(
    running: Running,
    private: Private,
    learning: Learning,
    task: Annotated[str, Argument(help="the data, for example cifar10")],
    model: Annotated[str, Argument(help="one of the task's models, for example scattering")],
    mechanism: Annotated[str, Argument(help="with its number: dp-sgd, lambda-cgd:0.95, bisr:16, …")],
) -> None:
    """Train one model by one mechanism at each ε: the rate by validation examples, accuracy on test examples.

    What the results hold is not run again, and a long training goes on from its last epoch: call again after an interruption.

    Example: python -m fedcgd_experiments train cifar10 scattering-4 lambda-cgd:0.95 --epsilon 3 --epochs 60 --data-dir /tmp/data
    """
    os.nice(running.nice)
    late = within(running.minutes)
    trainer = running.trainer(late)
    shared = {
        name: getattr(private, name) for name in ("delta", "sampling", "epochs", "steps", "clip_norm", "normalise")
    }
    point = CentralPoint(
        task=task, model=model, mechanism=mechanism, epsilon=private.epsilon[0], learning_rate=1.0,
        momentum=learning.momentum, schedule=learning.schedule, average=learning.average,
        augmentations=learning.augmentations, seed=0, **shared,
    )  # fmt: skip
    rates: dict[float, Sequence[float]] = {
        one: learning.learning_rate or planned_rates(replace(point, epsilon=one), trainer)
        for one in sorted(private.epsilon)
    }
    found = Results(running.results / f"{task}-{model}.jsonl")
    while not learning.learning_rate:  # until the best of the planned rates lies between others
        study = training(point, rates, seeds=0)
        done = running.carry_out(study, found, trainer, late)
        before, rates = rates, widened(study, rates, found.rows())
        if done.failures or done.left or rates == before:
            break
    study = training(point, rates, learning.seeds)
    done = running.carry_out(study, found, trainer, late)
    click.echo(outcome(study, found.rows()), nl=False)
    _end(list(done.failures), done.left)


def table_command(
    output: Annotated[Path, Argument(help="a CSV file to write")],
    studies: Names = None,
    results: Folder = Path("results"),
) -> None:
    """Write one line for each training run as CSV, for pandas.

    Example: python -m fedcgd_experiments table runs.csv digits --results benchmarks/results
    """
    rows = [
        {"study": study.name, **row}
        for study in _chosen(studies)
        for row in Results(results / f"{study.name}.jsonl").rows()
    ]
    write_table(rows, output)
    console.print(f"{len(rows)} runs in {output}", highlight=False)


def page_command(
    page: Annotated[Path, Argument(help="a Markdown file with <!-- table: NAME --> … <!-- end -->")],
    results: Folder = Path("results"),
) -> None:
    """Write the tables of a page anew from results.

    Example: python -m fedcgd_experiments page docs/results.md --results benchmarks/results
    """
    page.write_text(fill(page.read_text(), results))


def plot_command(
    results: Folder = Path("results"),
    output: Annotated[Path, Option(help="folder of the plots")] = Path("results/plots"),
    epsilon: Annotated[float, Option(help="of the picture of accuracy against work")] = 1.0,
    format: Annotated[Literal["png", "svg"], Option(help="of the files")] = "png",
) -> None:
    """Draw what correlated noise gains (a heat map) and accuracy against work; running times and λ where they were measured.

    Example: python -m fedcgd_experiments plot --results benchmarks/results --output benchmarks/results/plots
    """
    found = [Found.read(results, name) for name in STUDIES]
    times = results / "runtime.jsonl"
    timed = [json.loads(line) for line in times.read_text().splitlines()] if times.exists() else []
    figures: dict[str, Callable[[], Figure]] = {
        "gains": lambda: plots.gains(found),
        "frontier": lambda: plots.frontier(found, epsilon),
        "runtime": lambda: plots.runtime_bars(timed),
        **(
            {
                "real-data": partial(real_tables.picture, results),
                "real-data-lambdas": partial(real_tables.lambda_picture, results),
            }
            if (results / "real_data.jsonl").exists()
            else {}
        ),
        **{
            name: partial(plots.lambdas, Found.read(results, name))
            for name in PAPER_STUDIES
            if name.startswith(("figure-2", "figure-3", "figure-7")) and (results / f"{name}.jsonl").exists()
        },
    }
    for name, draw in figures.items():
        path = output / f"{name}.{format}"
        try:
            plots.save(draw(), path)
        except ValueError as error:  # what this plot shows is missing; the others can still be drawn
            console.print(f"no {path.name}: {error}", style="yellow", markup=False)
        else:
            console.print(str(path), markup=False)


def flower_commands(
    study: Annotated[str, Argument(help="a study over examples")],
    results: Folder = Path("results"),
    data_dir: DataDir = "",
    gpus: Annotated[float, Option(help="GPUs of one node; 0.25 lets four share one")] = 0,
) -> None:
    """For each tuned arm the `flwr run` command that trains the same federated, one user per example.

    Where the steps divide the examples, without sampling or with Balls-in-Bins, it releases the same models.
    Example: python -m fedcgd_experiments flower digits --results benchmarks/results
    """
    (chosen,) = _chosen([study])
    if point_class(chosen) is PeoplePoint:
        raise ValueError(f"{study} is of people: its points are `flwr run`'s settings already")
    found, trainer = Found.read(results, study), CentralTrainer(data_dir=data_dir or None)
    for epsilon in epsilons(chosen):
        for arm in chosen.arms:
            best = pick(chosen, found.tuned, epsilon, [arm])
            if best:
                point = replace(best.point, seed=chosen.tests[0], split="test")
                users = len(trainer.load(point).train)
                click.echo(flower_command(point, users=users, gpus=gpus, data_dir=data_dir or None))


def _end(failures: list[str], left: int) -> None:
    """Say what failed and how much is left, and exit with 1 or 3 then."""
    for line in failures:
        console.print(line, style="red", markup=False)
    if failures:
        raise SystemExit(1)
    if left:
        console.print(f"{left} trainings or more are left; call again to go on")
        raise SystemExit(3)


def _chosen(names: list[str] | None) -> list[Study]:
    known, chosen = STUDIES | PAPER_STUDIES, dict[str, Study]()
    for name in names or STUDIES:
        found = [name] if name in STUDIES else [figure for figure in PAPER_STUDIES if figure.startswith(name)]
        if not found:
            raise ValueError(f"unknown study {name}; the studies are {', '.join(known)}")
        chosen |= {one: known[one] for one in found}
    return list(chosen.values())


app = group_of(
    {
        "list": list_command,
        "run": run_command,
        "train": train_command,
        "table": table_command,
        "page": page_command,
        "plot": plot_command,
        "flower": flower_commands,
    },
    help=__doc__ or "",
)

if __name__ == "__main__":
    app()
