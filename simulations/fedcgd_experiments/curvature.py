"""`python -m fedcgd_experiments.curvature`: does noise that is fitted to a model's curvature train better models?

Five kinds of noise at the same budgets, on the same batches: independent, λ-CGD with the λ of the practical rule and with the λ
fitted to a spectrum, banded matrices that are best for prefix sums, and those fitted to the spectrum (NoiseCurve). The fitted
ones depend on the learning rate, so each is found again for each rate that is tried. The spectrum is that of `fedcgd curve`.
"""

import math
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from fedcgd.cli.options import takes
from fedcgd.cli.report import explained_errors
from fedcgd.curvature.dominance import Reference
from fedcgd.curvature.public import pretrained
from fedcgd.optimisation.catalogue import from_description
from fedcgd.plan import Plan
from fedcgd_experiments.claims import claims_of_runs
from fedcgd_experiments.curvature_design import ARMS, NOISE_CURVE, DesignOptions, check_one_design
from fedcgd_experiments.curvature_report import best_rates, compare, judged, tuned
from fedcgd_experiments.experiment import TEST_SEEDS, calibrate_setup, train_engine
from fedcgd_experiments.sweep import ResultsFile, here, sweep, to_point
from fedcgd_simulations.public import public_examples

PRIVATE = "private examples, for the experiment alone: covered by no ε"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console()


@app.command("run")
@takes(DesignOptions)
@explained_errors()
def run_command(
    common: DesignOptions,
    output: Annotated[Path, typer.Option(help="JSON lines; what is there already is not run again")],
    arm: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(ARMS)}; all if not given")] = None,
    epsilon: Annotated[list[float] | None, typer.Option()] = None,
    learning_rate: Annotated[list[float] | None, typer.Option()] = None,
    tuning_seeds: Annotated[int, typer.Option(min=1)] = 2,
    seeds: Annotated[int, typer.Option(min=0, help="for the test; 0: only tune")] = 10,
) -> None:
    """Tune the learning rate of each kind of noise at each ε by validation examples, then judge it by the test's."""
    design = common.design(common.get_task().load())
    results = ResultsFile(output)
    failures: list[str] = []
    for budget, each in product(epsilon or [1.0, 2.0, 4.0, 8.0], arm or ARMS):
        rates = learning_rate or [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0]
        points = [design.point(each, budget, rate, seed) for rate in rates for seed in range(tuning_seeds)]
        check_one_design([*map(to_point, results.runs().values()), *points])
        failed = sweep(points, results, here, data_dir=None, console=console)
        if not failed:
            best = best_rates(results.runs().values())[each, budget]
            chosen = design.point(each, budget, best, 0)
            tests = [replace(chosen, seed=TEST_SEEDS + seed, split="test") for seed in range(seeds)]
            failed = sweep(tests, results, here, data_dir=None, console=console)
        failures += failed
    for line in failures:
        console.print(line, style="red", markup=False)
    if failures:
        raise typer.Exit(1)


@app.command("certificate")
@takes(DesignOptions)
@explained_errors()
def certificate_command(
    common: DesignOptions,
    output: Annotated[Path, typer.Option(help="JSON lines, appended")],
    arm: Annotated[str, typer.Option(help=f"one of {', '.join(ARMS)}")] = NOISE_CURVE,
    epsilon: Annotated[float, typer.Option()] = 8.0,
    learning_rate: Annotated[float, typer.Option()] = 0.5,
    examples: Annotated[int, typer.Option(min=1, help="whose Hessian is looked at")] = 180,
    eigenvalues: Annotated[int, typer.Option(min=1, help="of the bound")] = 10,
    seed: Annotated[int, typer.Option(min=0, max=TEST_SEEDS - 1)] = 0,
    every: Annotated[int, typer.Option(min=1, help="steps between two looks")] = 21,
    also_private: Annotated[
        bool, typer.Option("--also-private", help="look at private examples too: for experiments alone, no ε covers it")
    ] = False,
) -> None:
    """Whether the Hessian that noise was fitted to bounds those along a run: ρ, and the ratio of eigenvalues.

    The bound is of public examples at the model that has learned random labels, as `fedcgd curve` has it. The Hessians are of the
    same examples with labels that the model in training gives them.
    """
    whole = common.get_task()
    data = whole.load()
    design = common.design(data)
    point = design.point(arm, epsilon, learning_rate, seed)
    calibration = calibrate_setup(point.setup)
    facts = design.spectrum.measured_on
    public = public_examples(design.task, model=design.model, public=facts["public"], examples=examples)
    unsure = pretrained(
        public, epochs=facts["pretraining_epochs"], learning_rate=facts["pretraining_rate"], seed=facts["seed"]
    )
    bound = Reference.of(unsure.hessian(clip_norm=facts["clip_norm"]), eigenvalues=eigenvalues)
    plan = Plan(
        mechanism=from_description(calibration["mechanism"]), participation=point.setup.participation(),
        clip_norm=design.clip_norm, noise_multiplier=calibration["noise_multiplier"], delta=design.delta,
    )  # fmt: skip
    results = ResultsFile(output)

    def look(step: int, trained: nn.Module) -> None:
        if step % every:
            return
        looked = {"public": public.at(trained.state_dict()).self_labelled()}
        if also_private:
            part = data.train.take(np.arange(min(examples, len(data.train))))
            private = replace(public, inputs=part.inputs, targets=part.targets, classes=None)
            looked[PRIVATE] = private.at(trained.state_dict())
        for on, those in looked.items():
            hessian = those.hessian(clip_norm=facts["clip_norm"])
            found = {"ratio": bound.eigenvalue_ratio(hessian), "rho": bound.dominance(hessian, warn=False)}
            record = {"kind": "certificate", "arm": arm, "point": asdict(point), "step": step, "on": on}
            results.append(record | {"eigenvalues": eigenvalues} | found)
            note = "" if found["rho"] <= 1 else "; the bound does not hold"
            console.print(f"step {step}, {on}: ratio {found['ratio']:.2f}, ρ {found['rho']:.2f}{note}")

    train_engine(point, whole, data.train, plan, physical_batch=512, watch=look)


@app.command("tuned")
@explained_errors()
def tuned_command(results: Annotated[list[Path], typer.Argument(help="files that `run` wrote", exists=True)]) -> None:
    """Validation accuracy of each kind of noise of each file at its best η: all that a choice between designs may look at."""
    found = {path: tuned(ResultsFile(path).runs().values()) for path in results}
    epsilons = sorted({epsilon for accuracies in found.values() for _, epsilon in accuracies})
    table = Table("file", "noise", *(f"ε = {epsilon:g}" for epsilon in epsilons), "mean")
    for path, accuracies in found.items():
        for each in [arm for arm in ARMS if any(arm == of for of, _ in accuracies)]:
            row = [accuracies.get((each, epsilon), math.nan) for epsilon in epsilons]
            table.add_row(path.name, each, *(f"{100 * value:.1f}" for value in [*row, fmean(row)]))
    console.print(table)


@app.command("compare")
@explained_errors()
def compare_command(results: Annotated[list[Path], typer.Argument(help="files that `run` wrote", exists=True)]) -> None:
    """Mean test accuracy of each kind of noise at each ε, and the tests of which is better."""
    files = [ResultsFile(path) for path in results]
    runs = [record for file in files for record in file.runs().values()]
    calibrations = {name: record for file in files for name, record in file.calibrations().items()}
    for task in dict.fromkeys(str(record["point"]["task"]) for record in runs):
        own = [record for record in runs if record["point"]["task"] == task]
        accuracies, rates = judged(own), best_rates(own)
        epsilons = sorted({epsilon for _, epsilon in accuracies})
        table = Table(
            "noise",
            *(f"ε = {epsilon:g}" for epsilon in epsilons),
            title=f"{task}: test accuracy, ± standard deviation, at the tuned η",
            caption=claims_of_runs(own, calibrations),
        )
        for each in ARMS:
            cells = [
                (list(accuracies.get((each, epsilon), {}).values()), rates.get((each, epsilon))) for epsilon in epsilons
            ]
            table.add_row(
                each,
                *(
                    f"{100 * fmean(v):.1f} ± {100 * stdev(v):.1f} (η {rate:g})" if len(v) > 1 else "–"
                    for v, rate in cells
                ),
            )
        console.print(table)
        table = Table("ε", "noise", "against", "difference", "p (permutation)", "Holm", "p (paired t)", "seeds")
        for row in compare(own):
            table.add_row(
                f"{row.epsilon:g}", row.better, row.than, f"{100 * row.difference:+.2f}", f"{row.p_permutation:.2g}",
                f"{row.corrected:.2g}", f"{row.p_paired:.2g}", str(row.seeds),
            )  # fmt: skip
        console.print(table)


if __name__ == "__main__":
    app()
