"""The sum of clipped per-example gradients of a model given as one flat vector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcgd.clipping import layerwise
from fedcgd.clipping.flat_models import Layout, layout, unflatten
from fedcgd.clipping.norms import ROUNDING
from fedcgd.native.vector_kernels import LANES, aligned, kernels_for
from fedcgd.noise.quantisation import Lattice

ExampleLoss = Callable[..., Tensor]
"""(flat parameters, *one example's tensors) → that example's loss, a scalar."""

CHUNK_ENTRIES = 2**23
"""Gradient entries held at once by default: 32 MiB."""


@dataclass(frozen=True)
class ModelLoss:
    """An `ExampleLoss` that knows its model. Make one with `example_loss`."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    parameters: Layout

    def __call__(self, flat: Tensor, *example: Tensor) -> Tensor:
        *inputs, target = (part.unsqueeze(0) for part in example)
        output = functional_call(self.model, unflatten(flat, self.parameters), tuple(inputs))
        return self.loss(output, target).sum()


def example_loss(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> ModelLoss:
    """(flat, *inputs, target) → `loss`(model(*inputs), target) of one example, for `clipped_gradient_sum`.

    Args:
        model: lends its structure, its constant buffers and its frozen parameters; the trained parameters come from the
            flat vector.
        loss: takes a batch of outputs and of targets, and returns one loss per example.

    Returns:
        The loss of one example, a scalar, as a function of a flat model of shape (d,) and the example's tensors.

    Raises:
        ValueError: if examples of a batch would influence each other (BatchNorm).
    """
    refuse_batch_statistics(model)
    return ModelLoss(model, loss, layout(model))


Parts = Sequence[Tensor]
"""Rows as they lie in memory: their first entries, the next ones, and so on; shapes (rows, d_j), with Σ d_j = d."""

_Gradients = Callable[..., Parts]
"""(flat, *examples) → ∇ loss(flat, example i) as row i."""


def _gradients_of(loss: ExampleLoss, examples: Sequence[Tensor]) -> _Gradients:
    """Layer by layer where the layers are known, else by vmap."""
    by_vmap = vmap(grad(loss), in_dims=(None, *(0 for _ in examples)))

    def mapped(flat: Tensor, *examples: Tensor) -> Parts:
        return [by_vmap(flat, *examples)]

    layers = layerwise.layers_of(loss.model) if isinstance(loss, ModelLoss) and len(examples) == 2 else None
    if layers is None or not isinstance(loss, ModelLoss):
        return mapped
    by_layers = partial(layerwise.gradients, layers, loss.loss)

    def gradients(flat: Tensor, *examples: Tensor) -> Parts:
        try:
            return by_layers(unflatten(flat, loss.parameters), *examples)
        except layerwise.UnusualShapeError:
            return mapped(flat, *examples)

    return gradients


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise ValueError if `model` keeps running statistics, which carry users' data around the clipping."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and (
            module.track_running_stats or isinstance(module, nn.modules.batchnorm._BatchNorm)
        ):
            raise ValueError(
                f"module {name!r} is {type(module).__name__}, whose statistics mix examples without clipping; "
                "use GroupNorm, or opacus.validators.ModuleValidator.fix(model)"
            )


def clipped_gradient_sum(
    loss: ExampleLoss,
    flat: Tensor,
    examples: Sequence[Tensor],
    *,
    clip_norm: float,
    grid: Lattice,
    chunk: int | None = None,
    counted: Sequence[bool] | None = None,
    unit: float = 1.0,
    indicator: int = 0,
) -> tuple[Tensor, int]:
    """(Σ_i min(1, clip_norm/‖g_i‖)·g_i in steps of `grid`, how many were finite) over examples i, g_i = ∇ loss(flat, example i).

    An example adds zero and is not counted if its gradient is not finite, if `counted` is False for it, or if its loss raises
    (a label out of range). What one example does leaves the others' terms as they are, bit by bit. (On a GPU, torch's losses
    end the use of CUDA by the process where a label is out of range: check labels before.)

    Guarantee: grid.step times each example's term has norm at most clip_norm (without the entry of `indicator`).

    Args:
        loss: of one example (`example_loss` makes one).
        flat: the model, shape (d,), float32.
        examples: tensors whose row i belongs to example i.
        clip_norm: in `unit`s of the gradients, L2.
        grid: the steps of the sum; each term is rounded towards zero.
        chunk: how many gradients exist at once (default: as many as fit in 32 MiB), so that memory is O(chunk·d).
        counted: which examples may take part; by default all.
        unit: gradients are measured in it: g_i / unit takes the place of g_i.
        indicator: if not zero, the sum has one entry more: each counted example adds `indicator` there if its gradient was
            within the norm, and takes as much away if it was scaled.

    Returns:
        The sum, int64, shape (d,) or (d + 1,), on the device of `flat`; and how many examples are in it.

    Raises:
        ValueError: for a clip norm that float32 cannot hold, or tensors with other numbers of rows.
        Exception: what the loss raises, where it raises for all examples.
    """
    if not clip_norm * unit >= 1e-20:
        raise ValueError(f"clip_norm must be positive, and at least 1e-20 for float32, got {clip_norm * unit}")
    if len({len(part) for part in examples}) != 1:
        raise ValueError(f"every tensor must have one row per example, got {[len(part) for part in examples]} rows")
    gradients = _gradients_of(loss, examples)
    size = chunk or max(1, min(CHUNK_ENTRIES // max(1, flat.numel()), 4096))
    total = torch.zeros(flat.numel() + bool(indicator), dtype=torch.int64, device=flat.device)
    finite = 0
    wanted = torch.tensor([True] * len(examples[0]) if counted is None else list(counted), dtype=torch.bool)
    failure: Exception | None = None
    computed = 0
    for start in range(0, len(examples[0]), size):
        chunk_examples = tuple(part[start : start + size] for part in examples)
        parts, defined, error = _gradient_rows(gradients, flat, chunk_examples)
        usable = (defined & wanted[start : start + size]).to(flat.device)
        parts = [part.detach() for part in parts]
        usable, scaled = add_clipped_rows(total[: flat.numel()], parts, usable, clip_norm, grid, unit)
        if indicator:
            total[-1] += indicator * (int(usable.sum()) - 2 * int(scaled.sum()))
        finite += int(usable.sum())
        computed += int(defined.sum())
        failure = error or failure
    if failure is not None and not computed:
        raise failure
    return total, finite


def _gradient_rows(
    gradients: _Gradients, flat: Tensor, examples: tuple[Tensor, ...]
) -> tuple[Parts, Tensor, Exception | None]:
    """(gradients of the examples as rows, which of them there are, what raised for the others)."""
    present = torch.ones(len(examples[0]), dtype=torch.bool)
    try:
        return gradients(flat, *examples), present, None
    except Exception as error:  # which examples it is about is found one by one
        failure = error
    alone: list[Tensor | None] = []
    for i in range(len(present)):
        try:
            alone.append(torch.cat([*gradients(flat, *(part[i : i + 1] for part in examples))], dim=1))
        except Exception:
            alone.append(None)
            present[i] = False
    if not present.any():
        return [flat.new_zeros(len(present), flat.numel())], present, failure
    # Again together, with another example in the place of each that raised: so the others' last bits are what they would be.
    stand_in = int(present.nonzero()[0])
    places = torch.where(present, torch.arange(len(present)), stand_in)
    try:
        return gradients(flat, *(part[places.to(part.device)] for part in examples)), present, failure
    except Exception:  # too many for the memory, perhaps
        rows = [flat.new_zeros(1, flat.numel()) if row is None else row for row in alone]
        return [torch.cat(rows)], present, failure


def add_clipped_rows(
    total: Tensor, parts: Parts, wanted: Tensor, clip_norm: float, grid: Lattice, unit: float = 1.0
) -> tuple[Tensor, Tensor]:
    """total += Σ_i min(1, clip_norm/‖g_i‖)·g_i in steps of `grid`, g_i = row i / unit, each rounded towards zero; in place.

    `total` is int64, shape (d,); `parts` are rows of float32, shape (m, d) together. The result says which rows took part (those
    that are `wanted` and finite), and which of these were scaled. Guarantee: grid.step times each row's term has norm at most
    clip_norm.
    """
    if total.device.type == "cpu" and all(part.dtype == torch.float32 for part in parts):
        return _add_where_they_lie(total, parts, wanted, clip_norm, grid, unit)
    return _add_anywhere(total, parts, wanted, clip_norm, grid, unit)


def _add_anywhere(
    total: Tensor, parts: Parts, wanted: Tensor, clip_norm: float, grid: Lattice, unit: float
) -> tuple[Tensor, Tensor]:
    """On any device, and for rows of any floating-point type."""
    rows = torch.cat([*parts], dim=1)
    clipped, usable = clip_rows(rows, clip_norm * unit)
    usable &= wanted
    total += sum_in_steps(torch.where(usable[:, None], clipped if unit == 1 else clipped / unit, 0.0), grid)
    return usable, usable & (rows != clipped).any(dim=1)


def _add_where_they_lie(
    total: Tensor, parts: Parts, wanted: Tensor, clip_norm: float, grid: Lattice, unit: float
) -> tuple[Tensor, Tensor]:
    """Parts are read twice where they lie, instead of a dozen passes over all: as `fedcgd_flower.update` clips one user's update.

    The norm is off by at most 2⁻²⁹ of itself (proved at `fedcgd.native.vector_kernels.squared_distance`), the factor aims 2⁻²²
    below the bound, and rounding towards zero makes no entry larger.
    """
    arrays = [aligned(part.numpy()) for part in parts]
    work, lanes = kernels_for(len(wanted) * len(total)), np.zeros((len(wanted), LANES))
    for rows in arrays:
        work.squares(rows, lanes)
    norms = np.sqrt(lanes.sum(axis=1)) / unit
    usable = wanted.numpy() & np.isfinite(norms)
    factors = np.where(usable, clip_norm * (1 - ROUNDING) / np.maximum(norms, clip_norm * (1 - ROUNDING)), 0.0)
    steps, begin = total.numpy(), 0
    for rows in arrays:  # a row whose factor is 0 is not read
        work.accumulate(rows, factors / unit, 1 / grid.step, steps[begin : begin + rows.shape[1]])
        begin += rows.shape[1]
    return torch.from_numpy(usable), torch.from_numpy(usable & (factors < 1))


def sum_in_steps(rows: Tensor, grid: Lattice) -> Tensor:
    """Σ_i rows[i] in steps of `grid`, each rounded towards zero, int64, shape (d,), for clipped rows (m, d): exact, in any order.

    The step is a power of two, so that the division is exact; each term is at most clip_norm / step, so that float64, in which
    the sum is made, holds it.
    """
    return torch.trunc_(rows / grid.step).sum(dim=0, dtype=torch.float64).to(torch.int64)


def clip_rows(rows: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """`rows` (m, d), float32, each scaled to L2 norm at most `clip_norm`, zero where not finite; and which were finite.

    Rows of 16 bits become rows of float32: their own factors would be too coarse for the bound.

    The squares are summed in float64, where those of finite float32 numbers cannot overflow: so a finite norm means
    finite entries.
    """
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    usable = torch.isfinite(norms)
    # Divisors, because a factor far below 1 would lose precision as a subnormal; an infinite divisor gives zeros.
    divisors = torch.clamp(norms / (clip_norm * (1 - ROUNDING)), min=1.0).to(
        torch.promote_types(rows.dtype, torch.float32)
    )
    # NaN/∞ is NaN: a row that is not finite has to be replaced, not scaled.
    return torch.where(usable[:, None], rows / divisors[:, None], 0.0), usable
