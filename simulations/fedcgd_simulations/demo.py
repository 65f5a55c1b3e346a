"""`make simulate`: what correlated noise gains on this machine, at the same (ε, δ), against DP-SGD at its best."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedcgd.accounting import gaussian
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.cli.declare import Option
from fedcgd.planning import LinearModel, PlanningProblem, plan_recipes
from fedcgd.planning.render import run_configuration
from fedcgd_simulations.commands import of_function
from fedcgd_simulations.flower_runs import local_superlink, run_app
from fedcgd_simulations.report import plot_accuracy, summary

COHORT = 60
MODEL = LinearModel(classes=10, features=64, mean_share=0.9)
TASK = PlanningProblem(users=1260, epsilon=4.0, delta=1e-5, participations=10, max_cohort=COHORT, model=MODEL)
"""Softmax regression on pixels: 1260 users with one digit each, of whom a round reaches 60, each at most ten times."""


def best_dp_sgd(epsilon: float, sampling: str) -> dict[str, str | int | float]:
    """The run configuration of DP-SGD at its best on this task.

    The best of 24 by validation accuracy at ε = 4: four ways to descend (rates constant or falling, momentum 0 or 0.9), each at
    six rates. What a gradient that stays the same moves the model in all is then a quarter of n/σ₁ without a sampling, and n/σ₁
    with Poisson sampling, σ₁ the noise multiplier of one release; for another ε the rate is taken by the same rule.
    """
    signal = TASK.users / gaussian.sigma(epsilon=epsilon, delta=TASK.delta)
    rounds = TASK.participations * TASK.users // COHORT
    if sampling == "poisson":
        return {"learning-rate": round(2 * signal / (rounds + 1), 3), "schedule": "linear", "momentum": 0.0}
    return {"learning-rate": round(0.25 * signal / rounds, 3), "schedule": "constant", "momentum": 0.0}


def configurations(epsilon: float) -> dict[str, dict[str, str | int | float]]:
    """What is run, by its name: DP-SGD without and with a secret sampling, and the planner's recipe, without."""
    question = replace(TASK, epsilon=epsilon)
    planned = next(one for one in plan_recipes(question) if one.mechanism.name == "lambda-cgd")
    shared: dict[str, str | int | float] = {
        "epsilon": epsilon,
        "delta": TASK.delta,
        "cohort": COHORT,
        "participations": TASK.participations,
    }
    plain = {"mechanism": "dp-sgd", "sampling": "none"} | shared | best_dp_sgd(epsilon, "none")
    poisson = {"mechanism": "dp-sgd", "sampling": "poisson"} | shared | best_dp_sgd(epsilon, "poisson")
    return {"dp-sgd": plain, "dp-sgd-poisson": poisson, "plan": run_configuration(planned, question)}


def table(runs: list[dict[str, Any]]) -> Table:
    """The runs as a table whose title says under which promise they ran, and what the last one gains."""
    first = runs[0]
    budget = f"(ε, δ) = ({rounded_up(first['epsilon'])}, {first['delta']:g})"
    result = Table(title=f"{first['task']}, {first['users']} users\n{budget}, adjacency: {first['adjacency']}")
    for column in (
        "mechanism",
        "kept secret",
        "users a round",
        "rounds",
        "noise multiplier",
        "test accuracy",
        "seconds",
    ):
        left = column in ("mechanism", "kept secret")
        result.add_column(column, justify="left" if left else "right", no_wrap=column == "mechanism")
    for run in runs:
        result.add_row(
            run["label"],
            "nothing" if run["sampling"] == "none" else f"who is drawn ({run['sampling']})",
            f"{run['cohort']}",
            f"{run['releases']}",
            f"{run['noise_multiplier']:.3f}",
            f"{run['accuracy'][-1]:.4f}",
            f"{run['seconds']:.0f}",
        )
    return result


def gain(runs: list[dict[str, Any]]) -> str:
    """What the last run gains over the others, in points."""
    last = float(runs[-1]["accuracy"][-1])
    points = [f"{100 * (last - run['accuracy'][-1]):+.1f} points against {_named(run)}" for run in runs[:-1]]
    return (
        f"{runs[-1]['label']}, without amplification: "
        + ", ".join(points)
        + ". One run of each: noise alone moves them by one."
    )


def _named(run: dict[str, Any]) -> str:
    return str(run["label"]) + ("" if run["sampling"] == "none" else f" with {run['sampling']} sampling")


def main(
    results: Annotated[Path, Option(help="Folder for the JSON files and the plot.")] = Path("results"),
    epsilon: Annotated[float, Option(help="Budget ε of each run.")] = 4.0,
    seed: Annotated[int, Option(help="Simulation seed: the runs can be repeated, and are not private.")] = 0,
) -> None:
    """Train with DP-SGD at its best and with the planner's recipe, by `flwr run`, and compare them.

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
            for name, options in configurations(epsilon).items():
                bar = bars.add_task(f"{name}: rounds released", total=None)
                config = options | {"seed": seed, "results": str(folder / f"digits-{name}.json")}
                runs.append(run_app(environment, config, progress=partial(_show, bars, bar)))
    except RuntimeError as error:
        console.print(f"Failed: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(1) from error
    plot = folder / "digits-demo.png"
    plot_accuracy(plot, [run | {"label": _named(run)} for run in runs])
    console.print(table(runs))
    for run in runs:
        console.print(summary(run), soft_wrap=True, highlight=False)
    console.print(gain(runs), soft_wrap=True, highlight=False)
    console.print(f"Plot: {plot}", soft_wrap=True)


def _show(bars: Progress, bar: TaskID, round: int, rounds: int) -> None:
    bars.update(bar, completed=round, total=rounds)


if __name__ == "__main__":
    of_function(main)()
