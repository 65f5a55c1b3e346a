"""The table of mechanisms: their names, their classes, the numbers they take, and what finds those.

To add a mechanism, write its class and add its row. How rows are spelled is in `catalogue`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fedcgd import mechanisms
from fedcgd.mechanisms import Mechanism, Normalized, Toeplitz
from fedcgd.mechanisms.toeplitz import BandedToeplitzMechanism
from fedcgd.optimisation import banded, fitted, toeplitz
from fedcgd.optimisation.noise_curve import noise_curve

NORMALIZED = "normalized"
"""Behind a name and its numbers: with unit columns."""
FILE = "file"
"""Before the path of a mechanism that a file holds."""


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


def row_of(name: str, parts: Sequence[str] = ()) -> Row:
    """The row of a mechanism, which is spelled with `parts` behind it. Raises ValueError for an unknown name."""
    if name not in TABLE:
        close = get_close_matches(name.lower().replace("_", "-"), TABLE, n=1)
        hint = f"did you mean {':'.join([close[0], *parts])}? T" if close else "t"
        raise ValueError(f"unknown mechanism {name!r}; {hint}he mechanisms are {', '.join(TABLE)}, and {FILE}:PATH")
    return TABLE[name]


def with_unit_columns(mechanism: Mechanism) -> Normalized:
    """The normalised form. Raises ValueError unless the mechanism is Toeplitz."""
    if isinstance(mechanism, Toeplitz):
        return Normalized(mechanism)
    raise no_normalisation(mechanism.name)


def no_normalisation(name: str) -> ValueError:
    """What refuses a normalisation that would not keep C⁻¹Z cheap."""
    return ValueError(f"{name} cannot be normalised: only Toeplitz mechanisms can; leave :{NORMALIZED} out")
