"""`fedcgd plan`: whole recipes, best first."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedcgd.accounting.guarantee import ADJACENCY
from fedcgd.cli.commands import PlanOptions
from fedcgd.cli.options import function_named
from fedcgd.cli.printing import budget, console, print_json, status
from fedcgd.mechanisms.mechanism import Matrix
from fedcgd.planning import (
    LinearModel,
    PlannedRecipe,
    PlanningProblem,
    RehearsedRecipe,
    as_command,
    as_python,
    as_run_config,
    expectation,
    is_hopeless,
    plan_recipes,
    recommended,
    rehearse,
    verdict,
)
from fedcgd.planning.planner import as_part, as_ratio
from fedcgd.planning.rehearsal import Train
from fedcgd.quadratic import Spectrum
from fedcgd.support.numbers import as_clip_norm

METHOD = "that of the sampling's accountant, which plan.guarantee() names"
"""Of ε, in the table and in the JSON: recipes of several samplings stand there."""


def plan(asked: PlanOptions) -> None:
    """Rank whole recipes for a budget, DP-SGD among them: mechanism, sampling, cohort, rounds, schedule, rate."""
    as_clip_norm(asked.clip_norm)
    question = PlanningProblem(
        users=asked.users, epsilon=asked.epsilon, delta=asked.delta, secret=tuple(asked.secret or ()),
        participations=asked.participations, max_cohort=asked.max_cohort, max_rounds=asked.max_rounds, buffers=asked.buffers,
        spectrum=_public(asked.spectrum, sure=asked.spectrum_is_public),
        model=_linear(asked),
        hidden_layers=asked.hidden_layers,
    )  # fmt: skip
    if asked.proxy is None and (asked.record is not None or asked.repeats != 1 or asked.processes != 1):
        raise ValueError(
            "--record, --repeats and --processes are of rehearsals on a proxy: give --proxy, or leave them out"
        )
    train = None if asked.proxy is None else _proxy(asked.proxy, sure=asked.proxy_is_public)
    with status(asked.json) as say:
        ranked: Sequence[PlannedRecipe] = (
            plan_recipes(question, progress=say)
            if train is None
            else rehearse(
                question,
                train,
                public=True,
                repeats=asked.repeats,
                record=asked.record,
                processes=asked.processes,
                progress=say,
            )
        )
    simplest = None if is_hopeless(ranked) else recommended(ranked)
    chosen = simplest if train is None else ranked[0]
    if asked.json:
        print_json(
            budget(asked.epsilon, asked.delta)
            | {"method": METHOD}
            | (
                {}
                if train is not None
                else {"verdict": verdict(ranked), "expectation": expectation(recommended(ranked))}
            )
            | {"users": asked.users, "recommended": chosen and figures(chosen, question, asked.clip_norm)}
            | {"recipes": [figures(one, question, asked.clip_norm) for one in ranked]}
        )
    else:
        show(ranked, chosen, question, asked.clip_norm)


def _linear(asked: PlanOptions) -> LinearModel | None:
    """The model of the options, if they describe one."""
    match asked.classes, asked.features, asked.inputs:
        case None, None, None if not asked.uncentred:
            return None
        case int(classes), int(features), None:
            return LinearModel(classes=classes, features=features, mean_share=asked.uncentred)
        case int(classes), None, Path() as inputs if not asked.uncentred:
            _check_public(str(inputs), "--inputs-are-public", asked.inputs_are_public)
            return LinearModel.of_public_inputs(_numbers(inputs), classes=classes)
    raise ValueError(
        "a linear model is described by --classes and --features together, or --classes and --inputs, and --uncentred is of "
        "one without --inputs: give one of the two pairs, or none of the four"
    )


def _numbers(path: Path) -> Matrix:
    """The array in a `.npy` file."""
    try:
        return np.asarray(open_memmap(path, mode="r"), np.float64)
    except ValueError as error:
        raise ValueError(f"{path} holds no numbers that numpy.save wrote: {error}") from error


def _public(path: Path | None, *, sure: bool) -> Spectrum | None:
    """The spectrum in `path`, if it is said to be public."""
    if path is None:
        return None
    _check_public(str(path), "--spectrum-is-public", sure)
    return Spectrum.load(path)


def _proxy(name: str, *, sure: bool) -> Train:
    """What is called so, if it is said to train on public data."""
    _check_public(name, "--proxy-is-public", sure)
    found: Train = function_named(name)
    return found


def _check_public(what: str, option: str, sure: bool) -> None:
    if not sure:
        raise ValueError(
            f"{what} decides how private data are trained on, so it must not come from them: tuning on private data costs "
            f"privacy that ε would not count. If it is of public data, say so with {option}; else leave it out"
        )


def figures(planned: PlannedRecipe, question: PlanningProblem, clip_norm: float) -> dict[str, Any]:
    """A recipe as the JSON has it."""
    recipe = planned.recipe
    return {
        "kind": planned.kind,
        **asdict(recipe),
        "cohort": recipe.cohort,
        "rounds": recipe.rounds,
        "noise_multiplier": planned.noise_multiplier,
        "clip_norm": clip_norm,
        "learning_rate": planned.outcome.learning_rate / clip_norm,
        "progress": planned.outcome.progress,
        "noise": planned.outcome.noise,
        "signal_to_noise": planned.outcome.signal_to_noise,
        "unlearned": planned.outcome.unlearned,
        "loss": planned.outcome.loss,
        **(
            {"score": planned.score, "score_error": planned.error, "rehearsals": planned.rehearsals}
            if isinstance(planned, RehearsedRecipe)
            else {}
        ),
        "python": as_python(planned, question, clip_norm=clip_norm),
        "run_config": as_run_config(planned, question, clip_norm=clip_norm),
    }


def _model(question: PlanningProblem) -> str:
    """What the loss is taken for, in words."""
    if question.spectrum is not None:
        return "as the spectrum says"
    if question.model is not None:
        like = "" if question.model.shares is None else " like the public ones"
        return f"linear, {question.model.features} inputs{like}, {question.model.classes} classes"
    if question.hidden_layers is None:
        return "at most one hidden layer is assumed (set --hidden-layers, or --classes and --features)"
    return f"a network, hidden layers: {question.hidden_layers}"


def show(
    ranked: Sequence[PlannedRecipe], chosen: PlannedRecipe | None, question: PlanningProblem, clip_norm: float
) -> None:
    """The recipes as a table, and the chosen one as Python and as a run configuration."""
    secret = " or ".join(question.secret) or "none"
    console.print(
        f"{question.users} users, at most {question.participations} participations each; samplings that can be secret: {secret}; "
        f"the model: {_model(question)}.\n"
        f"Each recipe is calibrated for ε = {question.epsilon:g} at δ = {question.delta:g} ({ADJACENCY}; "
        f"sampling: the one named with it, else none; method: {METHOD}).",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    rehearsed = any(isinstance(one, RehearsedRecipe) for one in ranked)
    what = (
        "score: on the proxy, and the number of rehearsals whose mean it is"
        if rehearsed
        else "s/n: how far a steady gradient of norm 1 moves the model, over the noise in a weight; one scale for all models"
    )
    table = Table(
        caption="cohort: users in a round. k: participations of a user (poisson, b-min-sep: on average). rate: first learning "
        "rate. schedule: of the rate (constant, or linear to 0), and the momentum. σ: noise for each unit of clip "
        "norm, in a round's sum. "
        f"{what}. loss: what theory expects the last model to keep of the loss that training can remove (1: all, 0: none)",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,  # so that a name fits into 80 columns unbroken
        pad_edge=False,
    )
    last = ("loss", "score") if rehearsed else ("s/n", "loss")
    for column in ("recipe", "cohort", "rounds", "k", "rate", "schedule", "σ", *last):
        table.add_column(column, justify="left" if column in ("recipe", "schedule") else "right", overflow="fold")
    for one in ranked:
        recipe = one.recipe
        who = ", full batch" if recipe.steps == 1 else f", {recipe.sampling}" * recipe.is_secret
        schedule = "const" if recipe.schedule == "constant" else recipe.schedule
        loss = as_part(one.outcome.loss)
        table.add_row(
            f"{recipe.mechanism}{who}", str(recipe.cohort), str(recipe.rounds), str(recipe.participations),
            f"{one.outcome.learning_rate / clip_norm:.3g}", f"{schedule}, {recipe.momentum:g}",
            f"{one.noise_multiplier:.4g}",
            *(
                (loss, f"{one.score:.3g} ({one.rehearsals})")
                if isinstance(one, RehearsedRecipe)
                else (as_ratio(one.outcome.signal_to_noise), loss)
            ),
        )  # fmt: skip
    console.print(table)
    if not rehearsed:
        console.print(verdict(ranked), soft_wrap=True, highlight=False)
    if chosen is None:
        console.print("No recipe is recommended, so none is printed as a program. --json prints all.")
        return
    if not rehearsed:
        console.print(expectation(chosen), soft_wrap=True, highlight=False)
    which = "The first recipe" if chosen is ranked[0] else f"The simplest recipe that is as good ({chosen.kind})"
    for title, text in (
        (f"{which} as Python:", as_python(chosen, question, clip_norm=clip_norm)),
        (
            f"The same for the simulation app, with a task of {question.users} users:",
            as_command(chosen, question, clip_norm=clip_norm),
        ),
    ):
        console.print(f"\n[bold]{title}[/bold]")
        console.print(text, soft_wrap=True, highlight=False, markup=False)
