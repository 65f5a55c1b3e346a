"""The options that commands share, and what they mean together."""

from enum import StrEnum
from typing import Annotated

import typer

from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload, momentum_workload
from fedcgd.participation import Participation, Sampling


class SamplingName(StrEnum):
    """How a user's rounds are chosen."""

    NONE = "none"
    BALLS_IN_BINS = "balls-in-bins"
    POISSON = "poisson"
    CYCLIC_POISSON = "cyclic-poisson"


class ErrorName(StrEnum):
    """Which error a mechanism is optimised for."""

    RMSE = "rmse"
    MAX_SE = "max-se"


class MethodName(StrEnum):
    """How Balls-in-Bins is bounded."""

    MONTE_CARLO = "monte-carlo"
    DETERMINISTIC = "deterministic"


MechanismOption = Annotated[
    str, typer.Option("--mechanism", help="Mechanism by name; `fedcgd compare --help` lists them.")
]
LamOption = Annotated[float | None, typer.Option("--lam", help="λ of lambda-cgd, in [0, 1).")]
BandwidthOption = Annotated[int | None, typer.Option("--bandwidth", help="Bands p of a banded mechanism.")]
DegreeOption = Annotated[int | None, typer.Option("--degree", help="Buffers d of blt.")]
NuOption = Annotated[float | None, typer.Option("--nu", help="ν of nu-dp-ftrl, in [0, 1).")]
NormalizeOption = Annotated[bool, typer.Option("--normalize/--no-normalize", help="Give C unit columns.")]
MomentumOption = Annotated[float, typer.Option("--momentum", help="Momentum of the workload whose error is reported.")]
ErrorOption = Annotated[ErrorName, typer.Option("--error", help="What optimised mechanisms minimise.")]
RoundsOption = Annotated[int, typer.Option("--rounds", help="Number of releases n.")]
ParticipationsOption = Annotated[
    int | None,
    typer.Option(
        "--participations",
        help="A user takes part at most k times (Poisson: in expectation). Default: ⌈rounds / separation⌉.",
    ),
]
SeparationOption = Annotated[
    int, typer.Option("--separation", help="Any two participations of a user are at least b rounds apart.")
]
DeltaOption = Annotated[float, typer.Option("--delta", help="Failure probability δ; well below 1 / number of users.")]
EpsilonOption = Annotated[float, typer.Option("--epsilon", help="Budget ε.")]
NoiseMultiplierOption = Annotated[float, typer.Option("--noise-multiplier", help="σ: noise per unit of clip norm.")]
ReleasedOption = Annotated[
    int | None,
    typer.Option(
        "--released", help="For the first rounds only; holds if their number does not depend on what they released."
    ),
]
SamplingOption = Annotated[
    SamplingName, typer.Option("--sampling", help="How a user's rounds are chosen; what is assumed must be done.")
]
MethodOption = Annotated[
    MethodName | None,
    typer.Option(
        "--method",
        help="Of balls-in-bins: by draws, that mislead with probability 1e-12 (part of δ); or without any, in minutes. "
        "Default: without any for dp-sgd, where that takes seconds, and else by draws.",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print JSON for machines, and nothing else; an infinite figure is the text 'inf'."),
]


def participation_of(
    sampling: Sampling, rounds: int, separation: int, participations: int | None, bandwidth: int | None
) -> Participation:
    """The participation that the options describe.

    For Poisson sampling k = `participations` is a user's expected number, so q = k/n; with p groups (cyclic) a user is in the
    drawn group in n/p rounds, so q = p·k/n.
    """
    if sampling in ("none", "balls-in-bins"):
        return Participation(
            rounds=rounds, min_separation=separation, max_participations=participations, sampling=sampling
        )
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if participations is None:
        raise ValueError(f"{sampling} sampling needs --participations, the expected number of a user's participations")
    if separation != 1 and sampling == "poisson":
        raise ValueError(f"poisson sampling has no separation, got {separation}; leave --separation out")
    groups = 1 if sampling == "poisson" else (separation if separation > 1 else bandwidth or 1)
    if not 1 <= participations <= rounds // groups:
        most = f"{rounds // groups}, the rounds" + (f" of each of the {groups} groups" if groups > 1 else "")
        raise ValueError(f"participations must be in 1 … {most}; got {participations}")
    return Participation(
        rounds=rounds, min_separation=groups, sampling=sampling, sampling_rate=groups * participations / rounds
    )


def workload_of(momentum: float) -> Workload:
    """What the noise is summed by: prefix sums, or heavy-ball momentum."""
    return momentum_workload(momentum) if momentum else PREFIX_SUMS
