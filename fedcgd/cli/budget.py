"""`fedcgd calibrate`: budget → σ. `fedcgd epsilon`: σ → ε. `fedcgd delta`: σ and ε → δ."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedcgd.accounting import Accountant, Guarantee, accountant
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.cli.options import (
    DeltaOption,
    EpsilonOption,
    ErrorOption,
    JsonOption,
    MechanismOption,
    MethodOption,
    NoiseMultiplierOption,
    ReleasedOption,
    RoundsOption,
    RunOptions,
    takes,
)
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

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(RunOptions):
    """What the three commands share."""

    rounds: RoundsOption
    method: MethodOption = None
    error: ErrorOption = "rmse"
    json: JsonOption = False

    def report(
        self,
        ask: Callable[[Accountant, Progress], Guarantee],
        *,
        epsilon: float | None = None,
        delta: float = 0.0,
    ) -> None:
        """Print what `ask` gets from the accountant of the run, and the errors that its noise causes.

        What the mechanism's spelling leaves open is chosen for the budget (`epsilon`, `delta`), if there is one.
        """
        if self.method is not None and self.sampling != "balls-in-bins":
            raise ValueError(
                f"--method {self.method} is a way to bound balls-in-bins, and --sampling is {self.sampling}: "
                "leave --method out"
            )
        participation, workload = self.run(self.rounds), self.workload(self.rounds)
        with status(self.json) as say:
            mechanism = self.chosen(participation, epsilon=epsilon, delta=delta, error=self.error, progress=say)
            guarantee = ask(accountant(mechanism, participation, self.method), say)
        values = figures(mechanism, participation, guarantee, workload, self.quadratic())
        if self.json:
            print_json(values)
        else:
            show(mechanism, participation, guarantee, values)


@takes(BudgetOptions)
def calibrate_command(run: BudgetOptions, epsilon: EpsilonOption, delta: DeltaOption) -> None:
    """Find the smallest noise multiplier σ that keeps the whole run within (ε, δ).

    Example: fedcgd calibrate --mechanism lambda-cgd:0.9 --rounds 3900 --separation 390 --epsilon 8 --delta 1e-5
    """
    run.report(
        lambda accountant, say: accountant.noise_multiplier(epsilon=epsilon, delta=delta, progress=say),
        epsilon=epsilon,
        delta=delta,
    )


@dataclass(frozen=True, kw_only=True)
class KnownNoiseOptions(BudgetOptions):
    """Where σ is given the mechanism is too: without a budget there is nothing that λ or p could be chosen for."""

    mechanism: MechanismOption = field()


@takes(KnownNoiseOptions)
def epsilon_command(
    run: KnownNoiseOptions, noise_multiplier: NoiseMultiplierOption, delta: DeltaOption, released: ReleasedOption = None
) -> None:
    """Find an upper bound on ε for a given noise multiplier σ, for the whole run or the rounds released so far.

    Example: fedcgd epsilon --mechanism lambda-cgd:0.9 --rounds 3900 --separation 390 --noise-multiplier 4.36 --delta 1e-5
    """
    run.report(
        lambda accountant, say: accountant.epsilon(
            noise_multiplier=noise_multiplier, delta=delta, released=released, progress=say
        )
    )


@takes(KnownNoiseOptions)
def delta_command(
    run: KnownNoiseOptions,
    noise_multiplier: NoiseMultiplierOption,
    epsilon: EpsilonOption,
    released: ReleasedOption = None,
) -> None:
    """Find an upper bound on δ at some ε for a given noise multiplier σ, for the whole run or the rounds released so far.

    Example: fedcgd delta --mechanism lambda-cgd:0.9 --rounds 3900 --separation 390 --noise-multiplier 4.36 --epsilon 8
    """
    run.report(
        lambda accountant, say: accountant.delta(
            noise_multiplier=noise_multiplier, epsilon=epsilon, released=released, progress=say
        )
    )


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
