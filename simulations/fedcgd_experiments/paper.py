"""CIFAR-10 and IMDB as in arXiv:2601.22334, for whoever has the data and a GPU: `simulations/paper.sh` runs this.

    python -m fedcgd_experiments.paper --data-dir ~/data --results results/paper --stage figure-4 --minutes 10

What the results hold already is not run again. The `seconds` of each row say, after a few minutes, how long all of it will take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from fedcgd.participation import Sampling
from fedcgd_experiments.central import CentralTrainer
from fedcgd_experiments.comparison import compare, tuned
from fedcgd_experiments.point import TEST_SEEDS, CentralPoint
from fedcgd_experiments.results import Results
from fedcgd_experiments.runner import carry_out, within
from fedcgd_experiments.study import Log, Study, Values
from fedcgd_experiments.tables import gain

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()

EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_LAMBDAS = tuple(f"lambda-cgd:{lam:g}" for lam in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.975))
_OTHERS = ("bisr:2", "bisr:4", "bisr:16", "band-inv-mf:2", "band-inv-mf:4", "band-inv-mf:16", "blt:3", "blt:4")
_CIFAR_RATES, _IMDB_RATES = (0.02, 0.5), (0.05, 1.0)
EXAMPLES = {"cifar10": 45_000, "imdb": 22_500}
"""That are trained on; a tenth of the training examples is for validation."""

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

    def study(self) -> Study:
        """All mechanisms have as many candidates."""
        steps = -(-EXAMPLES[self.task] // self.batch)
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


def chosen(names: Sequence[str] | None) -> tuple[Stage, ...]:
    """The stages whose names begin with one of `names`."""
    found = tuple(stage for stage in STAGES if not names or any(stage.name.startswith(name) for name in names))
    if not found:
        raise typer.BadParameter(
            f"no stage begins with {', '.join(names or ())}; they are {', '.join(s.name for s in STAGES)}"
        )
    return found


@app.command(help=__doc__)
def run(
    data_dir: Annotated[
        str, typer.Option(help="folder of the files of CIFAR-10 and IMDB; empty: the usual places")
    ] = "",
    results: Annotated[Path, typer.Option(help="folder of the results, which says what need not be run again")] = Path(
        "results/paper"
    ),
    stage: Annotated[
        list[str] | None, typer.Option(help="a stage, or how several begin; repeat it; all if not given")
    ] = None,
    physical_batch: Annotated[
        int, typer.Option(min=1, help="per-example gradients at a time; less needs less memory")
    ] = 64,
    minutes: Annotated[float | None, typer.Option(help="stop after so many; call again to go on")] = None,
) -> None:
    """Run what is missing of the stages, and print what they show."""
    failures: list[str] = []
    late = within(minutes)
    trainer = CentralTrainer(data_dir=data_dir or None, physical_batch=physical_batch)
    for one in chosen(stage):
        console.rule(f"{one.name}: {one.shows}")
        study, kept = one.study(), Results(results / f"{one.name}.jsonl")
        failures += carry_out(study, kept, trainer, console=console, late=late).failures
        for row in compare(study, tuned(study, kept.rows(), CentralPoint)):
            console.print(f"ε = {row.epsilon:g}, {row.ours.arm}: {gain(row)} points over dp-sgd", highlight=False)
    for line in failures:
        console.print(line, style="red", markup=False)
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
