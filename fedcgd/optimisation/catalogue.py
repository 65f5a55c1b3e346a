"""The table of mechanisms, and their one spelling: `NAME`, `NAME:VALUE`, …, all also with `:normalized`, or `file:PATH`.

Command line, run configurations, sweeps, ledgers and docs read this table. To add a mechanism, write its class and add its row.
"""

import base64
import json
import math
import zlib
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import Field, asdict, dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedcgd import mechanisms
from fedcgd.mechanisms import Mechanism, Normalized, Toeplitz
from fedcgd.mechanisms.mechanism import Matrix
from fedcgd.mechanisms.toeplitz import BandedToeplitzMechanism
from fedcgd.mechanisms.workload import PREFIX_SUMS, Objective, Workload
from fedcgd.native.threads import one_thread
from fedcgd.optimisation import PROGRESS, Progress, banded, fitted, toeplitz
from fedcgd.optimisation.effort import EFFORT
from fedcgd.optimisation.noise_curve import noise_curve
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic
from fedcgd.support import cache
from fedcgd.support.files import atomic_write
from fedcgd.support.untrusted import MalformedError, Optional, conform, inflate, parse_json

_FORMAT = 6  # raise it when an optimiser changes, so that older results are found no more


@dataclass(frozen=True)
class Parameter:
    """A number that a mechanism takes: its `symbol`, what it is, and its type."""

    symbol: str
    meaning: str
    type: type[int] | type[float]
    read: Callable[[Any], float]
    """The number of a mechanism that is made already."""
    least: Callable[[Sequence[float]], float] | None = None
    """Of a number below 1 that may be left open, to be searched for a run: the least value that is tried, given all numbers in
    order. None for one that has to be given, or has a rule of its own (bands, λ of `lambda-cgd`, what a curvature gives)."""


def _bands(mechanism: Any) -> int:
    if isinstance(mechanism, mechanisms.Dense):
        return int(mechanism.band.shape[1])
    return (
        len(mechanism.values)
        if isinstance(mechanism, mechanisms.BandInvMF | mechanisms.BandedToeplitz)
        else int(mechanism.bands)
    )


LAMBDA = Parameter("λ", "the part of the last round's noise that is cancelled, in [0, 1)", float, lambda m: m.lam)
NU = Parameter("ν", "how fast old noise is forgotten, in [0, 1)", float, lambda m: m.nu)
BANDS = Parameter("p", "the number of bands", int, _bands)
BUFFERS = Parameter("d", "the number of buffers", int, lambda m: len(m.scales))
GAMMA = Parameter("γ", "the power of 1 − x, in (0, 1]", float, lambda m: m.gamma, least=lambda _: 1e-3)
TWO_LAMBDAS = (
    Parameter("λ", "in [0, 1)", float, lambda m: m.lam, least=lambda numbers: max(0.0, -numbers[1] / 0.99)),
    Parameter("μ", "in [−λ, 1)", float, lambda m: m.mu, least=lambda numbers: -0.99 * numbers[0]),
)


@dataclass(frozen=True)
class Row:
    """A mechanism of the table: its name, its class, a line of help, and the numbers it takes, in the order of its spelling.

    Without `optimise` the numbers make the mechanism: `cls(0.9)`, `cls(3, 0.7)`. With it, the mechanism is found for a run:
    `optimise(*numbers, participation, error=…, workload=…)`. Where a curvature is known the mechanism is found for it by
    `fit(*numbers, participation, quadratic=…)`, with `normalized=True` for the best of those whose normalised form
    is used; one number alone that is no count (λ, ν) is what is found then, if it is left open.
    """

    name: str
    cls: type
    help: str
    parameters: tuple[Parameter, ...] = ()
    optimise: Callable[..., Mechanism] | None = None
    fit: Callable[..., Mechanism] | None = None

    @property
    def finds_number(self) -> bool:
        """Whether `fit` finds the number."""
        return self.fit is not None and [parameter.type for parameter in self.parameters] == [float]

    @property
    def is_banded(self) -> bool:
        """Whether C has no more bands than it is told."""
        return issubclass(self.cls, BandedToeplitzMechanism | mechanisms.Dense)

    @property
    def spelling(self) -> str:
        """How it is written: `blt:d`, `bifr:p:γ`."""
        return ":".join([self.name, *(parameter.symbol for parameter in self.parameters)])

    def numbers(self, mechanism: Mechanism) -> tuple[float, ...]:
        """The numbers of a `mechanism` of this row, with unit columns or without, in the order of its spelling."""
        plain = mechanism.mechanism if isinstance(mechanism, Normalized) else mechanism
        return tuple(parameter.read(plain) for parameter in self.parameters)


TABLE: dict[str, Row] = {
    row.name: row
    for row in (
        Row("dp-sgd", mechanisms.DPSGD, "independent noise"),
        Row("lambda-cgd", mechanisms.LambdaCGD, "cancels the part λ of the noise of the round before", (LAMBDA,),
            fit=fitted.lambda_cgd),
        Row("lambda-mu", mechanisms.LambdaMuCGD, "λ-CGD twice: cancels parts of the noise of two rounds before", TWO_LAMBDAS),
        Row("bisr", mechanisms.BISR, "the inverse square root, cut to p bands", (BANDS,)),
        Row("bifr", mechanisms.BIFR, "the inverse power γ, cut to p bands", (BANDS, GAMMA)),
        Row("band-inv-mf", mechanisms.BandInvMF, "an inverse of p bands, optimised", (BANDS,),
            toeplitz.band_inv_mf, toeplitz.band_inv_mf),
        Row("bsr", mechanisms.BSR, "the square root, cut to p bands", (BANDS,)),
        Row("band-mf", mechanisms.Dense, "p bands, every entry optimised", (BANDS,), banded.band_mf),
        Row("noise-curve", mechanisms.Dense, "p bands, every entry fitted to a curvature", (BANDS,),
            fit=noise_curve),
        Row("banded-toeplitz", mechanisms.BandedToeplitz, "p constant bands, optimised", (BANDS,),
            toeplitz.banded_toeplitz, toeplitz.banded_toeplitz),
        Row("blt", mechanisms.BLT, "a sum of d exponentials, optimised; keeps d buffers", (BUFFERS,),
            toeplitz.blt, toeplitz.blt),
        Row("toeplitz", mechanisms.SquareRootToeplitz, "the square root of the prefix sum"),
        Row("nu-dp-ftrl", mechanisms.NuDPFTRL, "the square root, damped by ν", (NU,), fit=fitted.nu_dp_ftrl),
        Row("tree", mechanisms.BinaryTree, "binary-tree aggregation"),
        Row("dense", mechanisms.Dense, "all entries optimised, for at most 2048 rounds", (), banded.dense),
        Row("diagonal", mechanisms.Diagonal, "independent noise that falls from round to round"),
    )
}  # fmt: skip

_NORMALIZED = "normalized"
_FILE = "file"


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
        if name == _FILE:
            return _from_file(text.partition(":")[2])
        row = row_of(name, parts)
        normalized = parts[-1:] == [_NORMALIZED]
        values = parts[: len(parts) - normalized]
        if len(values) > len(row.parameters):
            raise ValueError(f"{name} is written {row.spelling} or {row.spelling}:{_NORMALIZED}, got {text!r}")
        numbers = (_number(*pair, row, text) for pair in zip(row.parameters, values, strict=False))
        return MechanismSpec(row, tuple(numbers), normalized)

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_FILE}:{self.path}"
        return ":".join([self.row.name, *map(str, self.values), *([_NORMALIZED] if self.normalized else [])])

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


def row_of(name: str, parts: Sequence[str] = ()) -> Row:
    """The row of a mechanism, which is spelled with `parts` behind it. Raises ValueError for an unknown name."""
    if name not in TABLE:
        close = get_close_matches(name.lower().replace("_", "-"), TABLE, n=1)
        hint = f"did you mean {':'.join([close[0], *parts])}? T" if close else "t"
        raise ValueError(f"unknown mechanism {name!r}; {hint}he mechanisms are {', '.join(TABLE)}, and {_FILE}:PATH")
    return TABLE[name]


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
        raise _no_normalisation(row.name)
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
        return _normalized(made) if asked.normalized else made
    description = cache.load(request)
    if description is None:
        context = copy_context()
        if progress is not None:
            context.run(PROGRESS.set, progress)
        with one_thread():
            description = describe(context.run(make))
        cache.store(request, description)
    found = from_description(description)
    return _normalized(found) if asked.normalized else found


def spelling_of(mechanism: Mechanism) -> str:
    """How `mechanism` is spelled. Raises ValueError if it is not of the table.

    >>> spelling_of(Normalized(mechanisms.LambdaCGD(0.9)))
    'lambda-cgd:0.9:normalized'
    """
    if isinstance(mechanism, Normalized):
        return f"{spelling_of(mechanism.mechanism)}:{_NORMALIZED}"
    row = row_of(mechanism.name)
    return str(MechanismSpec(row, row.numbers(mechanism)))


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """`mechanism` as {"name": …, its numbers …, "normalize": …}, JSON-able; `from_description` makes it again, bit by bit."""
    if isinstance(mechanism, Normalized):
        return describe(mechanism.mechanism) | {"normalize": True}
    if mechanism.name not in TABLE or type(mechanism) is not TABLE[mechanism.name].cls:
        raise ValueError(
            f"mechanism {mechanism.name!r} is not one of {', '.join(TABLE)}, and no file or ledger can hold it; BandedToeplitz "
            "takes coefficients of your own, BandInvMF those of a C⁻¹ with few, and Dense a matrix"
        )
    if isinstance(mechanism, mechanisms.Dense):
        packed = zlib.compress(mechanism.band.astype("<f8").tobytes())
        return {"name": mechanism.name, "shape": list(mechanism.band.shape), "band": base64.b64encode(packed).decode()}
    numbers = {field.name: getattr(mechanism, field.name) for field in fields(TABLE[mechanism.name].cls)}
    return {"name": mechanism.name} | numbers


def from_description(description: dict[str, Any]) -> Mechanism:
    """The mechanism that `describe` described. Raises ValueError for an unknown name, and for what it cannot have written."""
    name = conform(description, {"name": str, str: object}, "a mechanism")["name"]
    cls = row_of(name).cls
    parts = (
        {"shape": [int], "band": str}
        if cls is mechanisms.Dense
        else {field.name: _form(field) for field in fields(cls)}
    )
    numbers = conform(description, {"name": str, "normalize": Optional(bool), **parts}, f"mechanism {name}")
    if cls is mechanisms.Dense:
        mechanism: Mechanism = mechanisms.Dense(name, _unpacked(numbers["band"], numbers["shape"]))
    else:
        values = (numbers[part] for part in parts)
        mechanism = cls(*(tuple(value) if isinstance(value, list) else value for value in values))
    return _normalized(mechanism) if numbers.get("normalize") else mechanism


def _form(field: Field[Any]) -> Any:
    """What a description has for a field of a mechanism: a number, or a list of them."""
    return [float] if "tuple" in str(field.type) else float


def _unpacked(band: str, shape: Sequence[int]) -> Matrix:
    size = math.prod(shape)
    if len(shape) != np.ndim([[]]) or min(shape) < 1 or size > EFFORT.entries_read:
        raise MalformedError(f"a band has two sizes and at most {EFFORT.entries_read} entries, got {list(shape)[:3]}")
    packed = inflate(base64.b64decode(band, validate=True), 8 * size, "a band")
    if len(packed) != 8 * size:
        raise MalformedError(f"a band of shape {list(shape)} has {8 * size} bytes, got {len(packed)}")
    return np.frombuffer(packed, "<f8").reshape(shape)


def write_mechanism(mechanism: Mechanism, path: Path | str) -> None:
    """Write what `describe` says of `mechanism` as JSON, so that it is spelled `file:PATH`."""
    text = json.dumps(describe(mechanism)) + "\n"
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")


def read_mechanism(path: Path | str) -> Mechanism:
    """The mechanism that `write_mechanism` wrote. Raises ValueError, which names the file, if there is none in it.

    A file is trusted to be what was wanted, not to be private: its noise is calibrated like that of any other mechanism.
    """
    try:
        return from_description(parse_json(Path(path).read_text(encoding="utf-8"), dict, "the file"))
    except OSError as error:
        raise ValueError(
            f"{_FILE}:{path} cannot be read: {error.strerror}; write {_FILE}: and the path of a file"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} describes no mechanism ({error!r}); `write_mechanism` and `fedcgd curve` write such files"
        ) from error


def _normalized(mechanism: Mechanism) -> Normalized:
    if isinstance(mechanism, Toeplitz):
        return Normalized(mechanism)
    raise _no_normalisation(mechanism.name)


def _no_normalisation(name: str) -> ValueError:
    return ValueError(f"{name} cannot be normalised: only Toeplitz mechanisms can; leave :{_NORMALIZED} out")
