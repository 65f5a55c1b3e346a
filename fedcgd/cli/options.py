"""The options that commands share, and what they mean together."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click

from fedcgd.cli.declare import Option
from fedcgd.mechanisms.mechanism import Mechanism
from fedcgd.mechanisms.schedule import Schedule, scheduled_workload
from fedcgd.mechanisms.workload import Objective, Workload
from fedcgd.optimisation.catalogue import MechanismSpec, mechanism, spelling_of
from fedcgd.optimisation.damping import DAMPED, damping
from fedcgd.optimisation.table import TABLE
from fedcgd.participation import SAMPLINGS, Participation
from fedcgd.quadratic import Quadratic, Spectrum

SPELLINGS = ", ".join(row.spelling for row in TABLE.values())


def completed_mechanisms(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """What a shell completes after --mechanism."""
    return [name for name in TABLE if name.startswith(typed)]


def _usual_delta(delta: float | None) -> float | None:
    """δ, and a word on standard error if it is so large that ε means little: one in 1/δ users may be published."""
    if delta is not None and 1e-2 <= delta < 1:
        click.echo(
            f"Warning: δ = {delta:g} is large. To publish the data of one user in {max(1, round(1 / delta)):,}, drawn at random, "
            f"as they are is (0, {delta:g})-private too. Take a δ well below 1 / number of users.",
            err=True,
        )
    return delta


def _usual_epsilon(epsilon: float | None) -> float | None:
    """ε, and a word on standard error if nobody trains with so little, or is protected by so much."""
    if epsilon is not None and 0 < epsilon < 0.1:
        click.echo(
            f"Note: ε = {epsilon:g} is small: noise grows as 1/ε, and few models learn anything below 0.1. 0.1 to 10 is usual.",
            err=True,
        )
    if epsilon is not None and 10 < epsilon < float("inf"):
        click.echo(
            f"Note: ε = {epsilon:g} is large: whether a user's data were used may be guessed nearly always. 0.1 to 10 is usual.",
            err=True,
        )
    return epsilon


def rate(text: str | float) -> float:
    """A probability written as a number or a fraction, such as 128/50000. Raises click.BadParameter for anything else."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise click.BadParameter(f"a number or a fraction such as 128/50000, got {text!r}") from None


Epsilon = Annotated[float, Option(check=_usual_epsilon)]
EpsilonIfAny = Annotated[float | None, Option(check=_usual_epsilon)]
Delta = Annotated[float, Option(check=_usual_delta)]
DeltaIfAny = Annotated[float | None, Option(check=_usual_delta)]
SpelledMechanism = Annotated[str, Option(shell_complete=completed_mechanisms)]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How a command prints.

    Options:
        json: Print JSON for machines, and nothing else; an infinite figure is the text 'inf'.
    """

    json: bool = False


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The budget of a whole run.

    Options:
        epsilon: Budget ε; 0.1 to 10 is usual.
        delta: Failure probability δ; well below 1 / number of users.
    """

    epsilon: Epsilon
    delta: Delta


@dataclass(frozen=True, kw_only=True)
class WhenOptions:
    """Who takes part when: all but the number of rounds.

    Options:
        participations: A user takes part at most k times (Poisson, b-min-sep: in expectation; random-allocation: once in each
            of k epochs). Default: ⌈rounds / separation⌉.
        sampling_rate: Poisson: the probability q with which a user (cyclic-poisson: of the round's group; b-min-sep: one that
            may take part again) takes part in a round, as a number or like 128/50000; in place of --participations.
        separation: Any two participations of a user are at least b rounds apart. Default: 1, where correlated
            noise gains least; b-min-sep: two thirds of rounds / participations.
        sampling: How a user's rounds are chosen; what is assumed must be done.
        cold_start: b-min-sep: every user may take part from the first round; without, the round from which it may is drawn, so
            that cohorts are as large at the start as later.
    """

    participations: int | None = None
    sampling_rate: Annotated[float | None, Option(type=rate, metavar="Q")] = None
    separation: int | None = None
    sampling: Annotated[str, Option(type=click.Choice(tuple(SAMPLINGS)))] = "none"
    cold_start: bool = False

    def participation(self, rounds: int, bands: int | None = None) -> Participation:
        """The participation that the options describe, for a mechanism with so many bands (None: it has no such number)."""
        return participation_of(
            self.sampling,
            rounds,
            self.separation,
            self.participations,
            bands,
            rate=self.sampling_rate,
            warm=not self.cold_start,
        )


@dataclass(frozen=True, kw_only=True)
class FitOptions(WhenOptions):
    """Who takes part when, how the model moves, and what mechanisms are fitted to.

    Options:
        momentum: Heavy-ball momentum of the SGD that λ, p and what is optimised are for.
        schedule: Its learning rate: constant, or down to zero over the rounds. Costs no privacy.
        warmup: So many first rounds in which the rate rises.
        error: What optimised mechanisms minimise.
        curvature: A spectrum of public data, as `fedcgd curve` writes it: what is optimised has the least loss on it, and so
            have λ and ν that are left out.
        learning_rate: With --curvature: η of the descent, below 2/‖H‖. Default: 1/‖H‖, where descent on the steepest direction
            is fastest.
    """

    momentum: float = 0.0
    schedule: Schedule = "constant"
    warmup: int = 0
    error: Objective = "rmse"
    curvature: Path | None = None
    learning_rate: float | None = None

    def workload(self, rounds: int) -> Workload:
        """What the noise of so many rounds is summed by."""
        return scheduled_workload(self.schedule, rounds, momentum=self.momentum, warmup=self.warmup)

    def quadratic(self) -> Quadratic | None:
        """What is fitted to, if anything. Raises ValueError, before any work, for what does not go with a curvature."""
        if self.curvature is None:
            if self.learning_rate is not None:
                raise ValueError("--learning-rate is of descent on a --curvature: give both, or leave it out")
            return None
        if (self.momentum, self.schedule, self.warmup) != (0, "constant", 0):
            raise ValueError(
                "--curvature is for descent at a constant rate without momentum: leave --momentum, --schedule and --warmup out"
            )
        spectrum = Spectrum.load(self.curvature)
        if spectrum.largest == 0:
            raise ValueError(
                f"{self.curvature} has no curvature: all its eigenvalues are 0; give one that `fedcgd curve` measured"
            )
        return Quadratic(spectrum, 1 / spectrum.largest if self.learning_rate is None else self.learning_rate)

    def with_mechanism(self, mechanism: str) -> "RunOptions":
        """The options that these share with those of one run, and the mechanism."""
        shared = {each.name: getattr(self, each.name) for each in fields(FitOptions)}
        return RunOptions(**shared | {"mechanism": mechanism})


@dataclass(frozen=True, kw_only=True)
class RunOptions(FitOptions):
    """A mechanism, and who takes part when."""

    mechanism: Annotated[
        str,
        Option(
            shell_complete=completed_mechanisms,
            help=f"One of {SPELLINGS}; behind it :normalized gives C unit columns. Or file:PATH, as `fedcgd curve` writes. "
            "Where there is a budget numbers may be left out, from the right: they are then chosen (not d of blt, nor ν without "
            "a --curvature).",
        ),
    ] = "lambda-cgd"

    def spelling(self) -> MechanismSpec:
        """The mechanism that was asked for. Raises ValueError if it is misspelled."""
        return MechanismSpec.parse(self.mechanism)

    def run(self, rounds: int) -> Participation:
        """The participation, with as many groups as the mechanism has bands where the sampling has groups."""
        spec = self.spelling()
        spec.check_bands(rounds)
        return self.participation(rounds, spec.bands)

    def chosen(
        self,
        participation: Participation,
        *,
        epsilon: float | None,
        delta: float | None,
        curvature: Quadratic | None,
        progress: Callable[[str], None] | None = None,
    ) -> Mechanism:
        """The mechanism, chosen for the budget by `select_mechanism`; without a budget, as it is without a sampling.

        Raises ValueError if there is none.
        """
        from fedcgd.accounting.search import iterations
        from fedcgd.accounting.selection import select_mechanism

        fitted_to: dict[str, Any] = {
            "error": self.error,
            "workload": self.workload(participation.rounds),
            "curvature": curvature,
        }
        if epsilon is None or delta is None:
            said = iterations(progress) if progress else None
            return mechanism(self.mechanism, participation, **fitted_to, progress=said)
        return select_mechanism(
            self.mechanism, participation, epsilon=epsilon, delta=delta, **fitted_to, progress=progress
        )

    def damping(self, participation: Participation, chosen: Mechanism) -> float:
        """ρ by which the `chosen` mechanism was damped for the sampling; 1 if it was not."""
        if self.spelling().made is not None or not isinstance(getattr(chosen, "mechanism", chosen), DAMPED):
            return 1.0
        plain = mechanism(
            spelling_of(chosen),
            participation,
            workload=self.workload(participation.rounds),
            error=self.error,
            curvature=self.quadratic(),
        )
        return damping(chosen, plain)


def participation_of(
    sampling: str,
    rounds: int,
    separation: int | None,
    participations: int | None,
    bands: int | None,
    *,
    rate: float | None = None,
    warm: bool = True,
) -> Participation:
    """The participation that the options describe, with as many groups as the mechanism has bands where there are groups.

    Where users take part by coins, `participations` is the expected number of a user's, and gives the probability of one.
    """
    scheme = SAMPLINGS[sampling]
    if scheme.takes_groups and separation in (None, 1):
        separation = bands
    if scheme.takes_rate and rounds >= 1:
        if (participations is None) == (rate is None):
            got = "neither" if rate is None else f"{rate} and {participations}"
            raise ValueError(
                f"{sampling} sampling needs --sampling-rate (q), or --participations, the expected number of a user's "
                f"participations: one of the two; got {got}"
            )
        if participations is not None:
            most = rounds // max(separation or 1, 1)
            if not 1 <= participations <= most:
                raise ValueError(
                    f"participations must be in 1 … {most}, the rounds that fit {separation or 1} apart; got {participations}: "
                    "fewer, more rounds or a smaller --separation"
                )
            return Participation.for_cohorts(
                sampling, rounds, users=rounds, cohort_size=participations, min_separation=separation, warm_start=warm
            )
    return Participation(
        rounds=rounds, min_separation=1 if separation is None else separation, max_participations=participations,
        sampling=sampling, sampling_rate=rate, warm_start=warm,
    )  # fmt: skip


def function_named(source: str, hint: str = "see PYTHONPATH") -> Callable[..., Any]:
    """The function MODULE:FUNCTION; the module may lie where the command is called.

    Args:
        source: its name.
        hint: what to do if there is no such module.

    Raises:
        ValueError: for another form, and if it is not there.
    """
    module_name, _, name = source.partition(":")
    if not module_name or not name:
        raise ValueError(f"a function is written MODULE:FUNCTION, got {source!r}; train in my_task.py is my_task:train")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        found = getattr(import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {error.name} for {source}; {hint}") from error
    except AttributeError as error:
        raise ValueError(f"{module_name} has no {name!r}") from error
    if not callable(found):
        raise ValueError(f"{source} is of type {type(found).__name__}, not a function")  # noqa: TRY004 — a value, on the command line
    function: Callable[..., Any] = found
    return function
