"""CIFAR-10 and IMDB as in arXiv:2601.22334, for whoever has the data and a GPU: `simulations/paper.sh` runs this.

    python -m fedcgd_experiments.paper plan --data-dir ~/data
    python -m fedcgd_experiments.paper run --data-dir ~/data --results results/paper
    python -m fedcgd_experiments.paper run --data-dir ~/data --results results/paper --stage figure-4

`plan` measures a few steps of every training that the stages need, on this machine, and says the hours and the memory; `run` does
so first, and then runs the stages, the cheapest first. What the results hold already is not run again.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from fedcgd.participation import Sampling
from fedcgd_experiments.central import CentralTrainer, plan_of, train_engine
from fedcgd_experiments.comparison import compare, tuned
from fedcgd_experiments.point import TEST_SEEDS, CentralPoint
from fedcgd_experiments.results import Results
from fedcgd_experiments.runner import carry_out
from fedcgd_experiments.study import Log, Study, Values
from fedcgd_experiments.tables import gain
from fedcgd_simulations.report import write_json
from fedcgd_simulations.tasks import get_task

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console()

EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_LAMBDAS = tuple(f"lambda-cgd:{lam:g}" for lam in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.975))
_OTHERS = ("bisr:2", "bisr:4", "bisr:16", "band-inv-mf:2", "band-inv-mf:4", "band-inv-mf:16", "blt:3", "blt:4")
_CIFAR_RATES, _IMDB_RATES = (0.02, 0.5), (0.05, 1.0)
CANDIDATES, FINALISTS = 20, 3
"""Of each mechanism at each ε: its number and its rate drawn together."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One sweep of the paper: each mechanism at each ε and learning rate, with tuning seeds, and then on test examples."""

    name: str
    shows: str
    task: str
    model: str
    batch: int
    epochs: int = 10
    sampling: str = "none"
    mechanisms: tuple[str, ...]
    epsilons: tuple[float, ...] = EPSILONS
    rates: tuple[float, float]
    """The lowest learning rate and the highest."""
    clip_norm: float = 8.0
    tuning_seeds: int = 3
    test_seeds: int = 3

    @property
    def families(self) -> dict[str, tuple[str, ...]]:
        """The mechanisms by their names without a number, which is tuned."""
        found: dict[str, list[str]] = {}
        for spelling in self.mechanisms:
            found.setdefault(spelling.split(":")[0], []).append(spelling)
        return {name: tuple(some) for name, some in found.items()}

    @property
    def trainings(self) -> int:
        """How many models are trained."""
        tuned = CANDIDATES + FINALISTS * (self.tuning_seeds - 1)
        return len(self.epsilons) * len(self.families) * (tuned + self.test_seeds)

    def study(self, examples: int) -> Study:
        """The stage as a study of data with so many examples: all mechanisms have as many candidates."""
        steps = -(-examples // self.batch)
        return Study(
            name=self.name,
            title=self.shows,
            make=partial(_point, self, steps),
            settings=tuple({"epsilon": epsilon, "epochs": self.epochs} for epsilon in self.epsilons),
            axes={"learning_rate": Log(*self.rates)},
            arms={name: {"mechanism": some} for name, some in self.families.items()},
            candidates=CANDIDATES,
            finalists=FINALISTS,
            tuning=tuple(range(self.tuning_seeds)),
            tests=tuple(range(TEST_SEEDS, TEST_SEEDS + self.test_seeds)),
            baselines={"nothing": ("dp-sgd",)} if "dp-sgd" in self.families else {},
            work="epochs",
            unit="epochs",
        )


def _point(stage: Stage, steps: int, values: Values) -> CentralPoint:
    made: dict[str, Any] = {**values, "learning_rate": float(f"{values['learning_rate']:.3g}"), "steps": steps}
    return CentralPoint(
        **made, task=stage.task, model=stage.model, clip_norm=stage.clip_norm, sampling=cast(Sampling, stage.sampling)
    )


def _lambdas(name: str, shows: str, task: str, batch: int, *, epochs: int = 10, sampling: str = "none") -> Stage:
    """A sweep over λ: of the CNN on CIFAR-10, of BERT-tiny on IMDB."""
    model, rates = ("cnn", _CIFAR_RATES) if task == "cifar10" else ("bert-tiny", _IMDB_RATES)
    return Stage(
        name=name, shows=shows, task=task, model=model, batch=batch, epochs=epochs, sampling=sampling,
        mechanisms=("dp-sgd", *_LAMBDAS), epsilons=(1.0, 4.0, 8.0), rates=rates,
    )  # fmt: skip


STAGES: tuple[Stage, ...] = (
    *(_lambdas(f"figure-2-cifar10-{b}", "Figure 2 a–c", "cifar10", b) for b in (128, 256, 1024)),
    *(_lambdas(f"figure-2-imdb-{b}", "Figure 2 d–f", "imdb", b) for b in (64, 128, 512)),
    _lambdas("figure-3-cifar10", "Figure 3", "cifar10", 128, sampling="balls-in-bins"),
    _lambdas("figure-3-imdb", "Figure 3", "imdb", 64, sampling="balls-in-bins"),
    Stage(
        name="figure-4-poisson", shows="Figure 4, Table 3", task="cifar10", model="cnn", batch=128,
        sampling="poisson", mechanisms=("dp-sgd",), rates=_CIFAR_RATES,
    ),
    Stage(
        name="figure-4", shows="Figure 4, Table 3", task="cifar10", model="cnn", batch=128, sampling="balls-in-bins",
        mechanisms=(*_LAMBDAS, *_OTHERS), rates=_CIFAR_RATES,
    ),
    *(_lambdas(f"figure-7-imdb-{k}", "Figure 7 a–c", "imdb", 512, epochs=k) for k in (20, 40, 80)),
    *(_lambdas(f"figure-7-cifar10-{k}", "Figure 7 d–f", "cifar10", 1024, epochs=k) for k in (20, 40, 80)),
    Stage(
        name="figure-8-poisson", shows="Figure 8", task="imdb", model="bert-base", batch=512, sampling="poisson",
        mechanisms=("dp-sgd",), rates=_IMDB_RATES,
    ),
    Stage(
        name="figure-8", shows="Figure 8", task="imdb", model="bert-base", batch=512, sampling="balls-in-bins",
        mechanisms=(*_LAMBDAS, *_OTHERS), rates=_IMDB_RATES,
    ),
)  # fmt: skip
"""The trainings of the paper. Figures 5 and 6 need none: `python -m fedcgd_experiments.paper_figures`."""

_FEW, _MORE = 1, 3  # steps of the two trainings whose difference is measured


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a training: seconds of one step, seconds besides, examples, and the most memory in use, in bytes."""

    step: float
    besides: float
    examples: int
    memory: int

    def hours(self, stage: Stage) -> float:
        """The estimate for all trainings of `stage`."""
        steps = stage.epochs * -(-self.examples // stage.batch)
        return stage.trainings * (self.besides + steps * self.step) / 3600


def measure(task: str, model: str, batch: int, *, data_dir: str, physical_batch: int) -> Cost:
    """What a training costs here, from two short ones with the real data, model, batch and engine."""
    examples = get_task(task, model=model, data_dir=data_dir).load().train
    batch = min(batch, len(examples))
    seconds = [_train(task, model, batch, steps, data_dir, physical_batch) for steps in (_FEW, _FEW, _MORE)][1:]
    step = max(0.0, seconds[1] - seconds[0]) / (_MORE - _FEW)  # the very first one warms up
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated()
    else:
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Cost(step=step, besides=max(0.0, seconds[0] - _FEW * step), examples=len(examples), memory=memory)


def _train(task: str, model: str, batch: int, steps: int, data_dir: str, physical_batch: int) -> float:
    """Seconds of `steps` epochs of one step each, over `batch` examples, by the sweeps' own code."""
    point = CentralPoint(
        task=task,
        model=model,
        mechanism="lambda-cgd:0.9",
        epsilon=8.0,
        steps=1,
        epochs=steps,
        learning_rate=0.01,
        seed=0,
    )
    made = get_task(task, model=model, data_dir=data_dir)
    train = made.load().train.take(np.arange(batch))
    plan = plan_of(point, {"noise_multiplier": 1.0})
    started = time.perf_counter()
    train_engine(point, made, train, plan, physical_batch=physical_batch)
    return time.perf_counter() - started


@app.command("measure", hidden=True)
def measure_command(task: str, model: str, batch: int, data_dir: str, physical_batch: int) -> None:
    """Print the cost of a training as JSON: in a process of its own, whose memory is its own."""
    typer.echo(json.dumps(vars(measure(task, model, batch, data_dir=data_dir, physical_batch=physical_batch))))


def measured(stages: Sequence[Stage], known: Path, *, data_dir: str, physical_batch: int) -> dict[str, Cost]:
    """The cost of each (task, model, batch) of `stages`, by name; kept in the file `known` for the next time."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    kept: dict[str, Any] = json.loads(known.read_text()) if known.exists() else {}
    costs = {}
    for stage in stages:
        name = cost_name(stage)
        full = f"{name}, {physical_batch} at a time, {device}"
        if full not in kept:
            console.print(f"measuring {name}", highlight=False)
            words = ["measure", stage.task, stage.model, str(stage.batch), data_dir, str(physical_batch)]
            done = subprocess.run(
                [sys.executable, "-m", "fedcgd_experiments.paper", *words], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{name} could not be measured: {done.stderr.strip()[-2000:]}")
            kept[full] = json.loads(done.stdout.splitlines()[-1])
            write_json(known, kept)
        costs[name] = Cost(**kept[full])
    return costs


def cost_name(stage: Stage) -> str:
    """What a stage's cost depends on."""
    return f"{stage.task} {stage.model} in batches of {stage.batch}"


def show(stages: Sequence[Stage], costs: dict[str, Cost]) -> None:
    """Print the plan: trainings, hours and memory of each stage."""
    table = Table(title="What is to be run, from nothing")
    for heading in ("stage", "shows", "trainings", "s a step", "hours", "memory"):
        table.add_column(heading)
    total = 0.0
    for stage in stages:
        cost = costs[cost_name(stage)]
        total += cost.hours(stage)
        table.add_row(
            stage.name,
            stage.shows,
            str(stage.trainings),
            f"{cost.step:.3g}",
            f"{cost.hours(stage):.2f}",
            f"{cost.memory / 2**30:.1f} GiB",
        )
    console.print(table)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "this CPU"
    console.print(
        f"about {total:.1f} hours on {device}, one training at a time, without the calibration of σ", highlight=False
    )


Data = Annotated[
    str, typer.Option("--data-dir", help="folder of the files of CIFAR-10 and IMDB; empty: the usual places")
]
Physical = Annotated[
    int, typer.Option("--physical-batch", min=1, help="per-example gradients at a time; less needs less memory")
]
Names = Annotated[
    list[str] | None, typer.Option("--stage", help="a stage, or how several begin; repeat it; all if not given")
]
Folder = Annotated[Path, typer.Option("--results", help="folder of the results, which says what need not be run again")]


def chosen(names: Sequence[str] | None) -> tuple[Stage, ...]:
    """The stages whose names begin with one of `names`."""
    found = tuple(stage for stage in STAGES if not names or any(stage.name.startswith(name) for name in names))
    if not found:
        raise typer.BadParameter(
            f"no stage begins with {', '.join(names or ())}; they are {', '.join(s.name for s in STAGES)}"
        )
    return found


@app.command("plan")
def plan_command(
    data_dir: Data = "", results: Folder = Path("results/paper"), stage: Names = None, physical_batch: Physical = 64
) -> None:
    """Measure, and say what the stages will take."""
    stages = chosen(stage)
    show(stages, measured(stages, results / "costs.json", data_dir=data_dir, physical_batch=physical_batch))


@app.command("run")
def run_command(
    data_dir: Data = "", results: Folder = Path("results/paper"), stage: Names = None, physical_batch: Physical = 64
) -> None:
    """Say what the stages will take, run them, the cheapest first, and print and draw what they show."""
    costs = measured(chosen(stage), results / "costs.json", data_dir=data_dir, physical_batch=physical_batch)
    stages = sorted(chosen(stage), key=lambda stage: costs[cost_name(stage)].hours(stage))
    show(stages, costs)
    failures: list[str] = []
    for i, one in enumerate(stages):
        console.rule(f"{one.name} ({i + 1} of {len(stages)}): {one.shows}")
        study = one.study(costs[cost_name(one)].examples)
        kept = Results(results / f"{one.name}.jsonl")
        trainer = CentralTrainer(data_dir=data_dir or None, physical_batch=physical_batch)
        failures += carry_out(study, kept, trainer, console=console).failures
        for row in compare(study, tuned(study, kept.rows(), CentralPoint)):
            console.print(f"ε = {row.epsilon:g}, {row.ours.arm}: {gain(row)} points over dp-sgd", highlight=False)
    for line in failures:
        console.print(line, style="red", markup=False)
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
