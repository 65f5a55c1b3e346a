"""`python -m fedcgd_experiments.curvature`: does noise that is fitted to a model's curvature train better models?

Five kinds of noise at the same budgets, on the same batches: independent, λ-CGD with the λ of the practical rule and with the λ
fitted to a spectrum, banded matrices that are best for prefix sums, and those fitted to the spectrum (NoiseCurve). The fitted
ones depend on the learning rate, so each is found again for each rate that is tried. The spectrum is that of `fedcgd curve`.
"""

import math
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import click
import numpy as np
from rich.console import Console
from torch import nn

from fedcgd.cli.declare import Argument, Option
from fedcgd.curvature.dominance import Reference
from fedcgd.curvature.public import pretrained
from fedcgd_experiments.central import CentralTrainer, claim, plan_of, train_engine
from fedcgd_experiments.curvature_design import ARMS, NOISE_CURVE, Design, check_one_design
from fedcgd_experiments.curvature_report import Tuned, compare, to_point, tuned
from fedcgd_experiments.point import TEST_SEEDS, CentralPoint
from fedcgd_experiments.results import Results, claims
from fedcgd_experiments.runner import carry_out
from fedcgd_experiments.tables import markdown, spread
from fedcgd_simulations.commands import group_of
from fedcgd_simulations.public import public_examples

PRIVATE = "private examples, for the experiment alone: covered by no ε"

console = Console()


def run_command(
    design: Design,
    output: Annotated[Path, Option(help="JSON lines; what is there already is not run again")],
    arm: Annotated[list[str] | None, Option(help=f"of {', '.join(ARMS)}; all if not given")] = None,
    epsilon: Annotated[list[float] | None, Option()] = None,
    learning_rate: Annotated[list[float] | None, Option()] = None,
    tuning_seeds: Annotated[int, Option(min=1)] = 2,
    seeds: Annotated[int, Option(min=0, help="for the test; 0: only tune")] = 10,
) -> None:
    """Tune the learning rate of each kind of noise at each ε by validation examples, then judge it by the test's."""
    results = Results(output)
    rates = learning_rate or [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0]
    study = design.study(arm or ARMS, epsilon or [1.0, 2.0, 4.0, 8.0], rates, tuning_seeds=tuning_seeds, seeds=seeds)
    points = [point for setting in study.settings for one in study.arms for point in study.points(one, setting)]
    check_one_design([*map(to_point, results.rows()), *(p for p in points if isinstance(p, CentralPoint))])
    done = carry_out(study, results, CentralTrainer(), console=console)
    for line in done.failures:
        console.print(line, style="red", markup=False)
    if done.failures:
        raise SystemExit(1)


def certificate_command(
    design: Design,
    output: Annotated[Path, Option(help="JSON lines, appended")],
    arm: Annotated[str, Option(help=f"one of {', '.join(ARMS)}")] = NOISE_CURVE,
    epsilon: Annotated[float, Option()] = 8.0,
    learning_rate: Annotated[float, Option()] = 0.5,
    examples: Annotated[int, Option(min=1, help="whose Hessian is looked at")] = 180,
    eigenvalues: Annotated[int, Option(min=1, help="of the bound")] = 10,
    seed: Annotated[int, Option(type=click.IntRange(0, TEST_SEEDS - 1))] = 0,
    every: Annotated[int, Option(min=1, help="steps between two looks")] = 21,
    also_private: Annotated[
        bool, Option("--also-private", help="look at private examples too: for experiments alone, no ε covers it")
    ] = False,
) -> None:
    """Whether the Hessian that noise was fitted to bounds those along a run: ρ, and the ratio of eigenvalues.

    The bound is of public examples at the model that has learned random labels, as `fedcgd curve` has it. The Hessians are of the
    same examples with labels that the model in training gives them.
    """
    task, data = design.loaded
    point = design.point(arm, epsilon, learning_rate, seed)
    facts = design.fitted_to.measured_on
    public = public_examples(design.task, model=design.model, public=facts["public"], examples=examples)
    unsure = pretrained(
        public, epochs=facts["pretraining_epochs"], learning_rate=facts["pretraining_rate"], seed=facts["seed"]
    )
    bound = Reference.from_hessian(unsure.hessian(clip_norm=facts["clip_norm"]), eigenvalues=eigenvalues)
    plan = plan_of(point, claim(point.setup))
    results = Results(output)

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
            looked_at = {"arm": arm, "step": step, "on": on, "eigenvalues": eigenvalues}
            results.append([asdict(point) | looked_at | found])
            note = "" if found["rho"] <= 1 else "; the bound does not hold"
            console.print(f"step {step}, {on}: ratio {found['ratio']:.2f}, ρ {found['rho']:.2f}{note}")

    train_engine(point, task, data.train, plan, physical_batch=512, watch=look)


def tuned_command(results: Annotated[list[Path], Argument(help="files that `run` wrote")]) -> None:
    """Validation accuracy of each kind of noise of each file at its best η: all that a choice between designs may look at."""
    found = {path: tuned(Results(path).rows()) for path in results}
    epsilons = sorted({epsilon for of_arms in found.values() for _, epsilon in of_arms})
    lines = []
    for path, of_arms in found.items():
        for each in [arm for arm in ARMS if any(arm == of for of, _ in of_arms)]:
            row = [one.validation if (one := of_arms.get((each, e))) else math.nan for e in epsilons]
            lines.append([path.name, each, *(f"{100 * value:.1f}" for value in [*row, fmean(row)])])
    click.echo(markdown(["file", "noise", *(f"ε = {epsilon:g}" for epsilon in epsilons), "mean"], lines))


def compare_command(results: Annotated[list[Path], Argument(help="files that `run` wrote")]) -> None:
    """Mean test accuracy of each kind of noise at each ε, and the tests of which is better."""
    runs = [row for path in results for row in Results(path).rows()]
    for task in dict.fromkeys(row["task"] for row in runs):
        own = [row for row in runs if row["task"] == task]
        found = tuned(own)
        epsilons = sorted({epsilon for _, epsilon in found})
        click.echo(f"{task}: test accuracy, ± standard deviation, at the tuned η. {claims(own)}\n")
        lines = [[each, *(_cell(found.get((each, epsilon))) for epsilon in epsilons)] for each in ARMS]
        click.echo(markdown(["noise", *(f"ε = {epsilon:g}" for epsilon in epsilons)], lines))
        head = ["ε", "noise", "against", "difference", "p (permutation)", "Holm", "p (paired t)", "seeds"]
        lines = [
            [
                f"{row.epsilon:g}", row.better, row.than, f"{100 * row.difference:+.2f}", f"{row.p_permutation:.2g}",
                f"{row.corrected:.2g}", f"{row.p_paired:.2g}", str(row.seeds),
            ]
            for row in compare(own)
        ]  # fmt: skip
        click.echo(markdown(head, lines))


def _cell(one: Tuned | None) -> str:
    found = spread(one.tests.values()) if one else ""
    return f"{found} (η {one.learning_rate:g})" if one and found else "–"


app = group_of(
    {"run": run_command, "certificate": certificate_command, "tuned": tuned_command, "compare": compare_command},
    help=__doc__ or "",
)

if __name__ == "__main__":
    app()
