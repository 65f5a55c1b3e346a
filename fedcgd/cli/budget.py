"""`fedcgd calibrate`: budget → σ. `fedcgd epsilon`: σ → ε. `fedcgd delta`: σ and ε → δ."""

from collections.abc import Callable
from typing import Any

from fedcgd.accounting import Accountant, Guarantee, accountant
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.cli.commands import BudgetOptions, CalibrateOptions, DeltaOptions, EpsilonOptions
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
from fedcgd.participation import SAMPLINGS, Participation
from fedcgd.participation.samplings import Law

Progress = Callable[[str], None]


def calibrate(asked: CalibrateOptions) -> None:
    """Find the smallest noise multiplier σ that keeps the whole run within (ε, δ)."""
    _report(
        asked,
        lambda accountant, say: accountant.noise_multiplier(epsilon=asked.epsilon, delta=asked.delta, progress=say),
        epsilon=asked.epsilon,
        delta=asked.delta,
    )


def epsilon(asked: EpsilonOptions) -> None:
    """Find an upper bound on ε for a given noise multiplier σ, for the whole run or the rounds released so far."""
    _report(
        asked,
        lambda accountant, say: accountant.epsilon(
            noise_multiplier=asked.noise_multiplier, delta=asked.delta, released=asked.released, progress=say
        ),
    )


def delta(asked: DeltaOptions) -> None:
    """Find an upper bound on δ at some ε for a given noise multiplier σ, for the whole run or the rounds released so far."""
    _report(
        asked,
        lambda accountant, say: accountant.delta(
            noise_multiplier=asked.noise_multiplier, epsilon=asked.epsilon, released=asked.released, progress=say
        ),
    )


def _report(
    asked: BudgetOptions,
    ask: Callable[[Accountant, Progress], Guarantee],
    *,
    epsilon: float | None = None,
    delta: float = 0.0,
) -> None:
    """Print what `ask` gets from the accountant of the run, and the errors that its noise causes.

    What the mechanism's spelling leaves open is chosen for the budget (`epsilon`, `delta`), if there is one.
    """
    if asked.method is not None and SAMPLINGS[asked.sampling].law is not Law.ONE_BIN:
        raise ValueError(
            f"--method {asked.method} is a way to bound balls-in-bins, and --sampling is {asked.sampling}: "
            "leave --method out"
        )
    participation, workload = asked.run(asked.rounds), asked.workload(asked.rounds)
    with status(asked.json) as say:
        mechanism = asked.chosen(participation, epsilon=epsilon, delta=delta, error=asked.error, progress=say)
        guarantee = ask(accountant(mechanism, participation, asked.method), say)
    values = figures(mechanism, participation, guarantee, workload, asked.quadratic())
    if asked.json:
        print_json(values)
    else:
        show(mechanism, participation, guarantee, values)


def show(mechanism: Mechanism, participation: Participation, guarantee: Guarantee, values: dict[str, Any]) -> None:
    """One guarantee and the errors of its noise, as a table."""
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
