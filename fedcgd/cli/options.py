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
from fedcgd.optimisation.catalogue import TABLE, MechanismSpec, mechanism, spelling_of
from fedcgd.optimisation.damping import DAMPED, damping
from fedcgd.participation import SAMPLINGS, Participation
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.support.choices import Method

SPELLINGS = ", ".join(row.spelling for row in TABLE.values())


def completed_mechanisms(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """What a shell completes after --mechanism."""
    return [name for name in TABLE if name.startswith(typed)]


ErrorOption = Annotated[Objective, Option("--error", help="What optimised mechanisms minimise.")]
RoundsOption = Annotated[int, Option("--rounds", help="Number of releases n.")]


def _warned(delta: float) -> float:
    """δ, and a word on standard error if it is so large that ε means little."""
    if LARGE_DELTA <= delta < 1:
        click.echo(
            f"Warning: δ = {delta:g} is large. To publish the data of one user in {max(1, round(1 / delta)):,}, drawn at random, "
            f"as they are is (0, {delta:g})-private too. Take a δ well below 1 / number of users.",
            err=True,
        )
    return delta


LARGE_DELTA = 1e-2
DeltaOption = Annotated[
    float, Option("--delta", check=_warned, help="Failure probability δ; well below 1 / number of users.")
]


def usual(epsilon: float | None) -> float | None:
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


EpsilonOption = Annotated[float, Option("--epsilon", check=usual, help="Budget ε; 0.1 to 10 is usual.")]
NoiseMultiplierOption = Annotated[float, Option("--noise-multiplier", help="σ: noise per unit of clip norm.")]
ReleasedOption = Annotated[
    int | None,
    Option(
        "--released",
        help="For the first rounds only; holds if their number does not depend on what they released.",
    ),
]
MethodOption = Annotated[
    Method | None,
    Option(
        "--method",
        help="Of balls-in-bins: by draws, that mislead with probability 1e-12 (part of δ); or without any, in minutes. "
        "Default: without any for dp-sgd, where that takes seconds, and else by draws.",
    ),
]
JsonOption = Annotated[
    bool,
    Option("--json", help="Print JSON for machines, and nothing else; an infinite figure is the text 'inf'."),
]


MechanismOption = Annotated[
    str,
    Option(
        "--mechanism",
        shell_complete=completed_mechanisms,
        help=f"One of {SPELLINGS}; behind it :normalized gives C unit columns. Or file:PATH, as `fedcgd curve` writes. "
        "Where there is a budget numbers may be left out, from the right: they are then chosen (not d of blt, nor ν without a "
        "--curvature).",
    ),
]


def rate(text: str | float) -> float:
    """A probability written as a number or a fraction, such as 128/50000. Raises click.BadParameter for anything else."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise click.BadParameter(f"a number or a fraction such as 128/50000, got {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class WhenOptions:
    """Who takes part when: all but the number of rounds."""

    participations: Annotated[
        int | None,
        Option(
            "--participations",
            help="A user takes part at most k times (Poisson, b-min-sep: in expectation; random-allocation: once in each of k "
            "epochs). Default: ⌈rounds / separation⌉.",
        ),
    ] = None
    sampling_rate: Annotated[
        float | None,
        Option(
            "--sampling-rate",
            type=rate,
            metavar="Q",
            help="Poisson: the probability q with which a user (cyclic-poisson: of the round's group; b-min-sep: one that may "
            "take part again) takes part in a round, as a number or like 128/50000; in place of --participations.",
        ),
    ] = None
    separation: Annotated[
        int | None,
        Option(
            "--separation",
            help="Any two participations of a user are at least b rounds apart. Default: 1; b-min-sep has none.",
        ),
    ] = None
    sampling: Annotated[
        str,
        Option(
            "--sampling",
            type=click.Choice(tuple(SAMPLINGS)),
            help="How a user's rounds are chosen; what is assumed must be done.",
        ),
    ] = "none"
    cold_start: Annotated[
        bool,
        Option(
            "--cold-start",
            help="b-min-sep: every user may take part from the first round; without, the round from which it may is "
            "drawn, so that cohorts are as large at the start as later.",
        ),
    ] = False

    @property
    def apart(self) -> int:
        """b, 1 where it is not given."""
        return 1 if self.separation is None else self.separation

    def with_mechanism(self, mechanism: str) -> "RunOptions":
        """The options that these share with those of one run, and the mechanism."""
        shared = {each.name: getattr(self, each.name) for each in fields(RunOptions) if hasattr(self, each.name)}
        return RunOptions(**shared | {"mechanism": mechanism})

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
    """Who takes part when, how the model moves, and what mechanisms are fitted to."""

    momentum: Annotated[
        float,
        Option("--momentum", help="Heavy-ball momentum of the SGD that λ, p and what is optimised are for."),
    ] = 0.0
    schedule: Annotated[
        Schedule,
        Option("--schedule", help="Its learning rate: constant, or down to zero over the rounds. Costs no privacy."),
    ] = "constant"
    warmup: Annotated[int, Option("--warmup", help="So many first rounds in which the rate rises.")] = 0

    curvature: Annotated[
        Path | None,
        Option(
            "--curvature",
            help="A spectrum of public data, as `fedcgd curve` writes it, with --learning-rate: what is optimised "
            "loses least on it, and so do λ and ν that are left out.",
        ),
    ] = None
    learning_rate: Annotated[
        float | None, Option("--learning-rate", help="η of the descent that --curvature is about; below 2/‖H‖.")
    ] = None

    def workload(self, rounds: int) -> Workload:
        """What the noise of so many rounds is summed by."""
        return scheduled_workload(self.schedule, rounds, momentum=self.momentum, warmup=self.warmup)

    def quadratic(self) -> Quadratic | None:
        """What is fitted to, if anything. Raises ValueError, before any work, for one of the two options alone."""
        if self.curvature is None and self.learning_rate is None:
            return None
        if self.curvature is None or self.learning_rate is None:
            raise ValueError("--curvature and --learning-rate belong together: give both, or none")
        return Quadratic(Spectrum.load(self.curvature), self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class RunOptions(FitOptions):
    """A mechanism, and who takes part when."""

    mechanism: MechanismOption = "lambda-cgd"

    def spelling(self) -> MechanismSpec:
        """The mechanism that was asked for. Raises ValueError if it is misspelled."""
        return MechanismSpec.parse(self.mechanism)

    def run(self, rounds: int) -> Participation:
        """The participation, with as many groups as the mechanism has bands where the sampling has groups."""
        return self.participation(rounds, self.spelling().bands)

    def chosen(
        self,
        participation: Participation,
        *,
        epsilon: float | None,
        delta: float,
        error: Objective = "rmse",
        progress: Callable[[str], None] | None = None,
    ) -> Mechanism:
        """The mechanism, chosen for the budget by `select_mechanism`; without a budget, as it is without a sampling.

        Raises ValueError if there is none.
        """
        from fedcgd.accounting.search import iterations
        from fedcgd.accounting.selection import select_mechanism

        fitted_to: dict[str, Any] = {
            "error": error,
            "workload": self.workload(participation.rounds),
            "curvature": self.quadratic(),
        }
        if epsilon is None:
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
    if bands is not None and bands > rounds >= 1:
        raise ValueError(
            f"the mechanism has {bands} bands, and a run of {rounds} rounds has use for {rounds} at most: "
            f"write {rounds}, or fewer"
        )
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
