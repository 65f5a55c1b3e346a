"""How mechanisms are spelled, and made: `NAME`, `NAME:VALUE`, …, all also with `:normalized`, or `file:PATH`.

Command line, run configurations, sweeps and docs read it. The mechanisms are rows of `table`.
"""

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from fedcgd import mechanisms
from fedcgd.mechanisms import Mechanism, Normalized
from fedcgd.mechanisms.workload import PREFIX_SUMS, Objective, Workload
from fedcgd.native.threads import one_thread
from fedcgd.optimisation import PROGRESS, Progress
from fedcgd.optimisation.mechanism_json import describe, from_description, read_mechanism
from fedcgd.optimisation.table import (
    BANDS,
    FILE,
    NORMALIZED,
    Parameter,
    Row,
    no_normalisation,
    row_of,
    with_unit_columns,
)
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic
from fedcgd.support import cache

_FORMAT = 6  # raise it when an optimiser changes, so that older results are found no more


@dataclass(frozen=True)
class MechanismSpec:
    """What a text asks for: a row of the table, the first of its numbers (the rest is left open), and unit columns or not.

    Of a mechanism that was read from a file `path` is where, and `made` what: the rest says the same about it.
    """

    row: Row
    values: tuple[float, ...] = ()
    normalized: bool = False
    path: str | None = None
    made: Mechanism | None = None

    @staticmethod
    def parse(text: str) -> "MechanismSpec":
        """The meaning of `NAME`, `NAME:VALUE` or `NAME:VALUE:VALUE`, all also with `:normalized` behind it, or of `file:PATH`.

        Numbers are left open from the right: `bifr:3` leaves γ open, and `bifr` both p and γ.
        Raises ValueError for another text, and for a file that holds no mechanism.

        >>> MechanismSpec.parse("bifr:3:0.7").values
        (3, 0.7)
        """
        name, *parts = text.split(":")
        if name == FILE:
            return _from_file(text.partition(":")[2])
        row = row_of(name, parts)
        normalized = parts[-1:] == [NORMALIZED]
        values = parts[: len(parts) - normalized]
        if len(values) > len(row.parameters):
            raise ValueError(f"{name} is written {row.spelling} or {row.spelling}:{NORMALIZED}, got {text!r}")
        numbers = (_number(*pair, row, text) for pair in zip(row.parameters, values, strict=False))
        return MechanismSpec(row, tuple(numbers), normalized)

    def __str__(self) -> str:
        if self.path is not None:
            return f"{FILE}:{self.path}"
        return ":".join([self.row.name, *map(str, self.values), *([NORMALIZED] if self.normalized else [])])

    @property
    def bands(self) -> int | None:
        """The number of bands, where that is what the mechanism takes first and it is given."""
        return int(self.values[0]) if self.row.parameters[:1] == (BANDS,) and self.values else None

    def check_bands(self, rounds: int) -> None:
        """Raise ValueError for more bands than there are rounds: C would not change, and the number is a mistake."""
        if self.bands is not None and self.bands > rounds >= 1:
            raise ValueError(
                f"{self} has {self.bands} bands, and a run of {rounds} rounds has use for {rounds} at most: write {rounds}, or "
                "fewer"
            )

    @property
    def open(self) -> tuple[Parameter, ...]:
        """The numbers that the mechanism takes and that are not given."""
        return self.row.parameters[len(self.values) :] if self.made is None else ()

    @property
    def is_open(self) -> bool:
        """Whether the mechanism takes a number that is not given."""
        return bool(self.open)


def _number(parameter: Parameter, text: str, row: Row, spelling: str) -> float:
    """The number that `text` is. Raises ValueError if it is none of the parameter's type."""
    try:
        return parameter.type(text)
    except ValueError:
        what = "a whole number" if parameter.type is int else "a number"
        more = "" if len(row.parameters) == 1 else f"; write {row.spelling}, and leave numbers out from the right"
        raise ValueError(f"{parameter.symbol} of {row.name} must be {what}, got {spelling!r}{more}") from None


def _from_file(path: str) -> MechanismSpec:
    made = read_mechanism(path)
    plain = made.mechanism if isinstance(made, Normalized) else made
    row = row_of(plain.name)
    return MechanismSpec(row, row.numbers(plain), plain is not made, path, made)


def mechanism(
    spelling: str | MechanismSpec,
    participation: Participation,
    *,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    curvature: Quadratic | None = None,
    progress: Progress | None = None,
) -> Mechanism:
    """The mechanism that is spelled, for runs of `participation`; `error` and `workload` say what an optimised one is best at.

    With a `curvature` those rows that have a fit are best at its loss instead: `noise-curve:p`, which needs one; `band-inv-mf:p`,
    `banded-toeplitz:p` and `blt:d`; `lambda-cgd` and `nu-dp-ftrl` without a number. It must come from public data.
    Optimised mechanisms are kept in the cache folder (`fedcgd.support.cache`). `progress` is called every 20 iterations.
    Raises ValueError for an unknown name, for a number that is missing or impossible, for more bands than rounds, and for a
    normalisation that would not keep C⁻¹Z cheap.

    >>> mechanism("bisr:4", Participation(rounds=100))
    BISR(bands=4)
    """
    asked = MechanismSpec.parse(spelling) if isinstance(spelling, str) else spelling
    asked.check_bands(participation.rounds)
    if participation.spacing > participation.min_separation:
        # No optimiser knows of a sampling: as if turns were an epoch apart.
        participation = Participation(rounds=participation.rounds, min_separation=participation.spacing)
    row, optimise = asked.row, asked.row.optimise
    if asked.made is not None:
        asked.made.bandwidth(participation.rounds)  # refuses another number of rounds than a matrix was made for
        return asked.made
    if asked.normalized and row.cls is mechanisms.Dense:
        raise no_normalisation(row.name)
    fit = row.fit if curvature is not None and (asked.is_open or not row.finds_number) else None
    if asked.is_open and not (fit and row.finds_number):
        missing = ", and ".join(f"{parameter.symbol}, {parameter.meaning}" for parameter in asked.open)
        raise ValueError(f"{row.name} needs {missing}: write {row.spelling}")
    if row.fit and not fit and not optimise and not row.finds_number:
        raise ValueError(
            f"{row.name} is fitted to a curvature, and none is given: give a spectrum and a learning rate (--curvature and "
            "--learning-rate), or file:PATH of one that was fitted"
        )
    request: dict[str, Any] = {
        "format": _FORMAT,
        "name": row.name,
        "values": asked.values,
        "participation": (participation.rounds, participation.min_separation, participation.participations),
    }
    if fit and curvature is not None:
        if error != "rmse" or workload != PREFIX_SUMS:
            raise ValueError(
                f"{row.name} is fitted to the loss on a quadratic, of descent without momentum: leave the error (got {error}) "
                "and the workload out"
            )
        request["spectrum"], request["learning_rate"] = curvature.spectrum.digest, curvature.learning_rate
        options: dict[str, Any] = {"normalized": True} if asked.normalized else {}
        request |= options
        make: Callable[[], Mechanism] = partial(fit, *asked.values, participation, quadratic=curvature, **options)
    elif optimise:
        request["error"], request["workload"] = error, asdict(workload)
        make = partial(optimise, *asked.values, participation, error=error, workload=workload)
    else:
        made: Mechanism = row.cls(*asked.values)
        return with_unit_columns(made) if asked.normalized else made
    description = cache.load(request)
    if description is None:
        context = copy_context()
        if progress is not None:
            context.run(PROGRESS.set, progress)
        with one_thread():
            description = describe(context.run(make))
        cache.store(request, description)
    found = from_description(description)
    return with_unit_columns(found) if asked.normalized else found


def spelling_of(mechanism: Mechanism) -> str:
    """How `mechanism` is spelled. Raises ValueError if it is not of the table.

    >>> spelling_of(Normalized(mechanisms.LambdaCGD(0.9)))
    'lambda-cgd:0.9:normalized'
    """
    if isinstance(mechanism, Normalized):
        return f"{spelling_of(mechanism.mechanism)}:{NORMALIZED}"
    row = row_of(mechanism.name)
    return str(MechanismSpec(row, row.numbers(mechanism)))
