"""`fedcgd account`: of σ, ε and δ the third from two, and why it holds."""

from dataclasses import asdict
from typing import Any

from fedcgd.accounting import Guarantee, accountant
from fedcgd.accounting.accountant import Progress
from fedcgd.accounting.explain import Step
from fedcgd.accounting.explain import explain as reasoning
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.cli.commands import AccountOptions
from fedcgd.cli.printing import (
    console,
    figures,
    key_value_table,
    number,
    print_json,
    sensitivity_text,
    status,
)
from fedcgd.mechanisms.mechanism import Mechanism
from fedcgd.optimisation.catalogue import spelling_of
from fedcgd.participation import Participation
from fedcgd.support.numbers import as_clip_norm


def account(asked: AccountOptions) -> None:
    """Print what is missing of σ, ε and δ, the errors that such noise causes, and the reasons if they are asked for."""
    _check(asked)
    participation, workload, curvature = asked.run(asked.rounds), asked.workload(asked.rounds), asked.quadratic()
    budget = {"epsilon": asked.epsilon, "delta": asked.delta} if asked.noise_multiplier is None else {}
    with status(asked.json) as say:
        mechanism = asked.chosen(
            participation,
            epsilon=budget.get("epsilon"),
            delta=budget.get("delta"),
            curvature=curvature,
            progress=say,
        )
        guarantee = _guarantee(asked, mechanism, participation, say)
    steps = _reasons(asked, mechanism, participation, guarantee) if asked.explain else ()
    values = figures(mechanism, participation, guarantee, workload, curvature)
    if asked.json:
        print_json(values | ({"reasoning": [asdict(step) for step in steps]} if asked.explain else {}))
    else:
        show(mechanism, participation, guarantee, values, steps)


def _check(asked: AccountOptions) -> None:
    """Raise ValueError, before any work, for options that do not go together."""
    as_clip_norm(asked.clip_norm)
    given = {"--noise-multiplier": asked.noise_multiplier, "--epsilon": asked.epsilon, "--delta": asked.delta}
    if list(given.values()).count(None) != 1:
        named = " and ".join(f"{name} {value:g}" for name, value in given.items() if value is not None) or "none"
        raise ValueError(f"give two of {', '.join(given)}, and the third is the answer; got {named}")
    if asked.noise_multiplier is None and asked.released is not None:
        raise ValueError("--released is for ε and δ of a given --noise-multiplier: σ is that of the whole run")
    if asked.explain and asked.released is not None:
        raise ValueError("--explain is of the whole run: leave --released out")


def _guarantee(asked: AccountOptions, mechanism: Mechanism, participation: Participation, say: Progress) -> Guarantee:
    """What holds of the two that are given and the third."""
    ask = accountant(mechanism, participation)
    match asked.noise_multiplier, asked.epsilon, asked.delta:
        case None, float(epsilon), float(delta):
            return ask.noise_multiplier(epsilon=epsilon, delta=delta, progress=say)
        case float(sigma), None, float(delta):
            return ask.epsilon(noise_multiplier=sigma, delta=delta, released=asked.released, progress=say)
        case float(sigma), float(epsilon), None:
            return ask.delta(noise_multiplier=sigma, epsilon=epsilon, released=asked.released, progress=say)
    raise AssertionError("two of three are given")


def _reasons(
    asked: AccountOptions, mechanism: Mechanism, participation: Participation, guarantee: Guarantee
) -> tuple[Step, ...]:
    """Every assumption and every number between a user's updates and the ε that is reported."""
    known: dict[str, Any] = (
        {"epsilon": asked.epsilon} if asked.noise_multiplier is None else {"noise_multiplier": asked.noise_multiplier}
    )
    return reasoning(
        mechanism,
        participation,
        clip_norm=asked.clip_norm,
        delta=guarantee.delta,
        rho=asked.damping(participation, mechanism),
        **known,
    )


def show(
    mechanism: Mechanism,
    participation: Participation,
    guarantee: Guarantee,
    values: dict[str, Any],
    steps: tuple[Step, ...] = (),
) -> None:
    """One guarantee and the errors of its noise as a table, and the reasons below."""
    of_what = " of the whole run" if guarantee.condition else ""
    rows = [
        ("guarantee", str(guarantee)),
        ("noise multiplier σ", rounded_up(guarantee.noise_multiplier, 6)),
        ("participation", str(participation)),
        ("sensitivity of C", sensitivity_text(values) + " (exact)" * bool(values["sensitivity_exact"])),
        ("RMSE" + of_what, number(values["rmse"])),
        ("MaxSE" + of_what, number(values["max_se"])),
    ]
    if "loss" in values:
        rows.append(("loss" + of_what, f"{number(values['loss'])} · (clip norm / cohort)², at the end"))
    console.print(key_value_table(f"{spelling_of(mechanism)}, {guarantee.rounds} rounds", rows))
    for count, step in enumerate(steps, start=1):
        console.print(f"[bold]{count}. {step.title}[/bold]", highlight=False)
        console.print(f"{step.statement}\n", highlight=False, markup=False)
