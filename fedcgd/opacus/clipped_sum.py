"""Σ_i min(1, ζ′/‖g_i‖)·g_i over the examples of a batch, from gradients as Opacus leaves them, with a proven bound.

Guarantee: leaving one example out of a round (of a size that `check_size` allows) moves the round's sum by at most ζ in L2 norm,
also after rounding to a grid whose step is at most 2⁻¹⁷·ζ/√d for d coordinates. The sum aims at
ζ′ = ζ·(1 − `MARGIN`), and MARGIN = 6.1e-5 covers, relative to ζ:

- 0.8e-5: norms. Squares are summed in float32 over blocks of 256 entries, in whatever order: at most 258 roundings of 2⁻²⁴
  each, halved by the root; everything after that is float64. 0.4e-5: entries whose squares underflow, below 2⁻⁶³ each, as
  ζ is at least 2⁻³⁰ and a gradient has less than 2³⁰ entries. For a smaller ζ, and where squares overflow, squares are
  float64.
- 1.5e-5 = 2⁻¹⁶: the sum, made in float64. With k additions to a coordinate, in any order, its error is at most
  k·2⁻⁵³·Σ_i ‖term i‖; it counts twice, with and without the example. 2¹⁸ examples give 2·2³⁶·2⁻⁵³.
- 0.8e-5: the grid. Rounding to the nearest moves each of the two sums by half a step in each coordinate. Where a batch comes in
  parts (`accumulation_steps`, ranks), each part's sum is rounded, and an example is in one of them; adding them up is exact.

Nothing here depends on the precision in which the gradients were computed (bfloat16, TF32): they are clipped as they are, and
products of matrices, where they are needed, are made in float64.

With ghost clipping the gradients of linear layers are not there, but the factors that they are products of. On sequences
g_i = Σ_t b_t a_tᵀ may be far smaller than its terms, and what rounds are the terms. So to the square of the norm, a Gram sum in
float64, 2⁻¹⁸·(Σ_t ‖b_t‖‖a_t‖)² is added: more than the Gram sum can lose, and enough that the terms are at most 2⁹ times the
norm. For m examples of length T the sum has k ≤ 4096 + m·T/4096 + m, and m·k ≤ 2²⁷ makes 2·2²⁷·2⁹·2⁻⁵³ = 2⁻¹⁶ again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

MARGIN = 2.0**-14

_MOST_EXAMPLES = 2**18
_MOST_TERMS = 2**27
_LEAST_FAST_NORM = 2.0**-30

ROWS_AT_ONCE = 4096
_GRAM_FLOOR = 2.0**-18
_BLOCK = 256
_FLOATS_AT_ONCE = 2**18  # what a processor's cache holds
_FLOATS_AT_ONCE_ON_A_GPU = 2**26  # half a gibibyte as float64: each part costs some launches


class PerSampleGradients(Protocol):
    """The gradients of a batch's examples for one parameter, in whatever form."""

    examples: int
    length: int
    """How many terms, which may cancel, a row is the sum of; 1 where it is there itself."""

    def norms(self, fast: bool) -> Tensor:
        """Norms, or parts of them along the last dimension, shape (examples, parts), float64; not less than the true ones but
        for the rounding that `MARGIN` covers. A row that is not finite, or too large for `fast`, has a norm that is not."""
        ...

    def add_to(self, total: Tensor, factors: Tensor, usable: Tensor | None) -> None:
        """total += Σ_i factors[i]·row i over the rows that are `usable` (None: all); `total` is flat, float64."""
        ...

    def averaged(self, copies: int) -> "PerSampleGradients":
        """Of each `copies` rows that follow one another their mean, as one row: `examples` is divisible by `copies`."""
        ...


@dataclass
class DenseGradients:
    """Gradients themselves: `values` has shape (examples, *shape of the parameter)."""

    values: Tensor

    def __post_init__(self) -> None:
        self.examples, self.length = len(self.values), 1
        self.values = self.values.detach().reshape(self.examples, -1 if self.examples else 0)

    def norms(self, fast: bool) -> Tensor:
        few = self.values.shape[1] < _BLOCK  # then a GPU waits for launches only
        if not self.examples or not fast or few or self.values.dtype == torch.float64:
            norms: Tensor = torch.linalg.vector_norm(
                self.values, dim=1, keepdim=True, dtype=torch.float64
            )  # slow, no copy
            return norms
        whole = self.values.shape[1] // _BLOCK
        blocks = self.values[:, : whole * _BLOCK].reshape(self.examples, whole, _BLOCK)
        parts = [torch.linalg.vector_norm(blocks, dim=2, dtype=torch.float32)]
        parts.append(
            torch.linalg.vector_norm(self.values[:, whole * _BLOCK :], dim=1, keepdim=True, dtype=torch.float32)
        )
        return norm(torch.cat(parts, dim=1))[:, None]

    def add_to(self, total: Tensor, factors: Tensor, usable: Tensor | None) -> None:
        values = self.values if usable is None else self.values[usable]
        factors = factors if usable is None else factors[usable]
        if not len(values):
            return
        if (add := gpu_add_rows(values.device)) is not None:
            add(total, values.contiguous(), factors.contiguous())
            return
        at_once = _FLOATS_AT_ONCE if values.device.type == "cpu" else _FLOATS_AT_ONCE_ON_A_GPU
        columns = max(1024, at_once // len(values))
        for start in range(0, values.shape[1], columns):  # in parts, because they are copied to float64
            part = total[start : start + columns]
            part += torch.mv(values[:, start : start + columns].double().T, factors)

    def averaged(self, copies: int) -> "DenseGradients":
        return DenseGradients(self.values.view(-1, copies, *self.values.shape[1:]).mean(1))


@cache
def gpu_add_rows(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """(total, values, factors): total += Σ_i factors[i]·values[i] on `device`; None on a CPU, and where Triton cannot do it."""
    if device.type == "cpu":
        return None
    try:
        from fedcgd.opacus.gpu_code import add_rows

        values = torch.sin(torch.arange(3 * 2077, device=device, dtype=torch.float32)).view(3, -1)
        factors = torch.tensor([0.1, 1e6, -0.7], dtype=torch.float64, device=device)
        total, expected = (torch.ones(2077, dtype=torch.float64, device=device) for _ in range(2))
        add_rows(total, values, factors)
        expected += torch.mv(values.double().T, factors)
        return add_rows if torch.allclose(total, expected, rtol=1e-12, atol=1e-9) else None
    except Exception:  # whatever a compiler can raise for a device that it does not know; `gpu_kernels` warns of it
        return None


@dataclass
class FactoredGradients:
    """Row i is Σ_t b_it a_itᵀ: `b` has shape (examples, T, outputs), `a` (examples, T, inputs)."""

    b: Tensor
    a: Tensor

    def __post_init__(self) -> None:
        self.examples, self.length, _ = self.b.shape

    def norms(self, fast: bool) -> Tensor:
        if self.length > 1:
            if self.b.device.type == "cpu":
                few = max(1, _FLOATS_AT_ONCE // self.length**2)
            else:  # the copies, too, are to fit
                wide = max(self.length, self.b.shape[2] + self.a.shape[2])
                few = max(1, _FLOATS_AT_ONCE_ON_A_GPU // (self.length * wide))
            parts = zip(torch.split(self.b, few), torch.split(self.a, few), strict=True)
            return torch.cat([_gram_norms(b.double(), a.double()) for b, a in parts])[:, None]
        return norm(self.b) * norm(self.a)

    def add_to(self, total: Tensor, factors: Tensor, usable: Tensor | None) -> None:
        b, a = (self.b, self.a) if usable is None else (self.b[usable], self.a[usable])
        factors = factors if usable is None else factors[usable]
        scaled = (b.double() * factors[:, None, None]).flatten(0, 1)
        matrix = total.view(b.shape[2], a.shape[2])
        parts = (torch.split(x, ROWS_AT_ONCE) for x in (scaled, a.flatten(0, 1)))
        for left, right in zip(*parts, strict=True):
            matrix.addmm_(left.T, right.double())

    def averaged(self, copies: int) -> "FactoredGradients":
        b, a = (factor.reshape(-1, copies * self.length, factor.shape[2]) for factor in (self.b, self.a))
        return FactoredGradients(b / copies, a)


@dataclass
class SparseGradients:
    """Row i is zero but for the rows of the parameter that example i looked up.

    `values[j]` belongs to example `example[j]` and to row `index[j]` of the parameter, each pair at most once.
    """

    example: Tensor
    index: Tensor
    values: Tensor
    examples: int

    def __post_init__(self) -> None:
        self.length = 1

    def norms(self, fast: bool) -> Tensor:
        squares = DenseGradients(self.values).norms(fast).squeeze(1) ** 2
        total = torch.zeros(self.examples, dtype=torch.float64, device=squares.device)
        return total.index_add_(0, self.example, squares).sqrt()[:, None]

    def add_to(self, total: Tensor, factors: Tensor, usable: Tensor | None) -> None:
        example, index, values = self.example, self.index, self.values
        if usable is not None:
            kept = usable[example]
            example, index, values = example[kept], index[kept], values[kept]
        scaled = values.double() * factors[example][:, None]
        total.view(-1, values.shape[1]).index_add_(0, index, scaled)

    def averaged(self, copies: int) -> "SparseGradients":
        size = int(self.index.max()) + 1 if len(self.index) else 1
        pairs, places = torch.unique(self.example // copies * size + self.index, return_inverse=True)
        values = self.values.new_zeros(len(pairs), self.values.shape[1]).index_add_(0, places, self.values / copies)
        return SparseGradients(pairs // size, pairs % size, values, self.examples // copies)


def _gram_norms(b: Tensor, a: Tensor) -> Tensor:
    """Bounds on the norms of Σ_t b_it a_itᵀ and a 512th of the norms of its terms; float64."""
    terms = (norm(b) * norm(a)).sum(1)
    gram = (torch.bmm(b, b.mT) * torch.bmm(a, a.mT)).sum((1, 2))
    squares: Tensor = gram.clamp(min=0) + _GRAM_FLOOR * terms**2
    return squares.sqrt()


def norm(values: Tensor) -> Tensor:
    """Norms along the last dimension, float64."""
    norms: Tensor = torch.linalg.vector_norm(values.double(), dim=-1)
    return norms


def copy_of(rows: Any) -> PerSampleGradients:
    """`rows`, whom nobody else can change."""
    copy: PerSampleGradients = replace(rows, **{name: value.clone() for name, value in _tensors_of(rows).items()})
    return copy


def octets_of(rows: Any) -> int:
    """How much memory `rows` take."""
    return sum(value.numel() * value.element_size() for value in _tensors_of(rows).values())


def _tensors_of(rows: Any) -> dict[str, Tensor]:
    return {name: value for name, value in vars(rows).items() if isinstance(value, Tensor)}


def passes_of(parameter: Any) -> list[PerSampleGradients]:
    """The gradients of the examples for `parameter`, one entry for each backward pass."""
    found = getattr(parameter, "grad_sample", None)
    passes = found if isinstance(found, list) else [] if found is None else [found]
    return [DenseGradients(one) if isinstance(one, Tensor) else one for one in passes]


def check_passes(
    module: nn.Module, parameters: Sequence[nn.Parameter], rows: Sequence[PerSampleGradients], copies: int
) -> list[PerSampleGradients]:
    """`rows` of one backward pass, an entry for each of `parameters`, with the mean of each `copies` rows in their place.

    Raises:
        RuntimeError: if there are other numbers of rows for some parameters than for others, or no multiple of `copies`.
    """
    counts = [row.examples for row in rows]
    examples = max(counts)
    if min(counts) != examples:
        odd = {p for p, count in zip(parameters, counts, strict=True) if count != examples}
        names = [name for name, p in module.named_parameters() if p in odd]
        raise RuntimeError(
            f"the parameters have gradients of different numbers of examples, {names[0]!r} and {len(names) - 1} others "
            f"of fewer than {examples}: the batch must be the first dimension (or batch_first=False) of the input of "
            "every layer. Position ids that a model makes itself have one row for all; give it position_ids with a row "
            "for each example, or freeze that layer"
        )
    if copies == 1:
        return list(rows)
    if examples % copies:
        raise RuntimeError(
            f"the model was given {examples} rows, no multiple of augmentation_multiplicity={copies}: give it all rows of the "
            "loader's batch, in their order; all copies of an example are in it already, one after the other"
        )
    return [row.averaged(copies) for row in rows]


class Clipped(NamedTuple):
    """The gradients of the examples of one backward pass, and what clips them (`clip_factors`)."""

    rows: Sequence[PerSampleGradients]
    """An entry for each trained parameter."""
    factors: Tensor
    usable: Tensor | None

    def add_to(self, total: Tensor, parameter: int) -> None:
        """Add the clipped sum of that parameter to `total`, flat, float64."""
        self.rows[parameter].add_to(total, self.factors, self.usable)


def clip_factors(rows: Sequence[PerSampleGradients], clip_norm: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """(norms, factors, usable): with the last two, each of `rows` adds its part of Σ_i min(1, ζ′/‖g_i‖)·g_i (`add_to`).

    Norms are over all of `rows`, which hold one parameter each; shape (examples,), float64. An example with an entry that is not
    finite has a norm that is not, and adds zero; what the others add is as without it. `usable` is None if all are finite.
    """
    aim = clip_norm * (1 - MARGIN)
    fast = clip_norm >= _LEAST_FAST_NORM
    norms = _norms(rows, fast)
    finite = torch.isfinite(norms)
    all_finite = bool(finite.all())  # for which a GPU has to be waited for
    if fast and not all_finite:
        norms = torch.where(finite, norms, _norms(rows, False))
        finite = torch.isfinite(norms)
        all_finite = bool(finite.all())
    factors = torch.where(finite, (aim / norms).clamp(max=1.0), 0.0)
    return norms, factors, None if all_finite else finite  # 0·NaN is NaN: a factor of zero is not enough


def _norms(rows: Sequence[PerSampleGradients], fast: bool) -> Tensor:
    return norm(torch.cat([row.norms(fast) for row in rows], dim=1))


def check_size(examples: int, length: int) -> None:
    """Raise ValueError unless the sum over `examples` examples, of sequences of at most `length`, is within `MARGIN`."""
    additions = ROWS_AT_ONCE + examples * length // ROWS_AT_ONCE + examples
    if examples > _MOST_EXAMPLES or (length > 1 and examples * additions > _MOST_TERMS):
        raise ValueError(
            f"a batch may have {_MOST_EXAMPLES} examples, and with ghost clipping of sequences about 8000: in larger sums "
            "rounding could exceed the clip norm; take more and smaller batches"
        )
