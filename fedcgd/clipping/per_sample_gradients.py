"""The sum of clipped per-example gradients of a model given as one flat vector."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcgd.clipping.flat_models import layout, unflatten
from fedcgd.clipping.norms import ROUNDING
from fedcgd.native.vector_kernels import aligned, kernels
from fedcgd.noise.quantisation import Lattice

ExampleLoss = Callable[..., Tensor]
"""(flat parameters, *one example's tensors) → that example's loss, a scalar."""

CHUNK_ENTRIES = 2**23
"""Gradient entries held at once by default in main memory, 32 MiB: more are in no cache, and no faster. Of larger models, up to
four times as many where that makes eight rows or fewer: each call of vmap takes milliseconds of Python."""

_PART_OF_A_GPU = 64
"""On a GPU one entry for so many bytes of its memory, a sixteenth of it: each part of a batch waits for the host."""

_COPIED = 4 * CHUNK_ENTRIES  # numbers that a GPU puts together in less time than it takes to begin a few passes more
_MOST_ROWS = 4096  # however few numbers are trained: what the model computes of an example takes memory, too


def rows_at_once(size: int, device: torch.device) -> int:
    """How many gradients of `size` numbers, one or more, exist at once by default."""
    if device.type == "cuda":
        rows = torch.cuda.get_device_properties(device).total_memory // _PART_OF_A_GPU // size
    else:
        rows = max(CHUNK_ENTRIES // size, min(8, 4 * CHUNK_ENTRIES // size))
    return max(1, min(rows, _MOST_ROWS))


def example_loss(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> ExampleLoss:
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
    parameters = layout(model)

    def of_one(flat: Tensor, *example: Tensor) -> Tensor:
        *inputs, target = (part.unsqueeze(0) for part in example)
        output = functional_call(model, unflatten(flat, parameters), tuple(inputs))
        return loss(output, target).sum()

    return of_one


Parts = Sequence[Tensor]
"""Rows as they lie in memory: their first entries, the next ones, and so on; shapes (rows, d_j), with Σ d_j = d."""


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise ValueError if a layer of `model` takes or keeps statistics of several examples, which nobody clips."""
    for name, layer in model.named_modules():
        batches = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if isinstance(layer, nn.modules.batchnorm._NormBase) and (
            (layer.training and layer.track_running_stats)
            or (batches and (layer.training or layer.running_mean is None))
        ):
            raise ValueError(
                f"module {name!r} is {type(layer).__name__}, whose statistics mix examples without clipping: take GroupNorm "
                "(opacus.validators.ModuleValidator.fix(model) does), or keep a pretrained one as it is by its eval(), after "
                "each train() of the model"
            )


def clipped_gradient_sum(
    loss: ExampleLoss,
    flat: Tensor,
    examples: Sequence[Tensor],
    *,
    clip_norm: float,
    grid: Lattice,
    counted: Sequence[bool] | None = None,
    unit: float = 1.0,
    indicator: int = 0,
) -> tuple[Tensor, int]:
    """(Σ_i min(1, clip_norm/‖g_i‖)·g_i in steps of `grid`, how many were finite) over examples i, g_i = ∇ loss(flat, example i).

    An example adds zero and is not counted if its gradient is not finite, if `counted` is False for it, or if its loss raises
    (a label out of range). What one example does leaves the others' terms as they are, bit by bit. As many gradients exist at
    once as `rows_at_once` says. (On a GPU, torch's losses end the use of CUDA by the process where a label is out of range: check
    labels before.)

    Guarantee: grid.step times each example's term has norm at most clip_norm (without the entry of `indicator`).

    Args:
        loss: of one example (`example_loss` makes one).
        flat: the model, shape (d,), float32.
        examples: tensors whose row i belongs to example i.
        clip_norm: in `unit`s of the gradients, L2.
        grid: the steps of the sum; each term is rounded towards zero.
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
    gradients = vmap(grad(loss), in_dims=(None, *(0 for _ in examples)))
    size = rows_at_once(flat.numel(), flat.device)
    total = torch.zeros(flat.numel() + bool(indicator), dtype=torch.int64, device=flat.device)
    finite = 0
    wanted = torch.tensor([True] * len(examples[0]) if counted is None else list(counted), dtype=torch.bool)
    failure: Exception | None = None
    computed = 0
    for start in range(0, len(examples[0]), size):
        chunk_examples = tuple(part[start : start + size] for part in examples)
        rows, defined, error = _gradient_rows(gradients, flat, chunk_examples)
        usable = (defined & wanted[start : start + size]).to(flat.device)
        factors = add_clipped_rows(total[: flat.numel()], [rows.detach()], usable, clip_norm, grid, unit)
        usable = factors > 0
        if indicator:
            total[-1] += indicator * (int(usable.sum()) - 2 * int((usable & (factors < 1)).sum()))
        finite += int(usable.sum())
        computed += int(defined.sum())
        failure = error or failure
    if failure is not None and not computed:
        raise failure
    return total, finite


def _gradient_rows(
    gradients: Callable[..., Tensor], flat: Tensor, examples: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Exception | None]:
    """(gradients of the examples as rows, which of them there are, what raised for the others)."""
    present = torch.ones(len(examples[0]), dtype=torch.bool)
    try:
        return gradients(flat, *examples), present, None
    except Exception as error:  # which examples it is about is found one by one
        failure = error
    rows = flat.new_zeros(len(present), flat.numel())
    for i in range(len(present)):
        try:
            rows[i] = gradients(flat, *(part[i : i + 1] for part in examples))[0]
        except Exception:
            present[i] = False
    if not present.any():
        return rows, present, failure
    # Again together, with another example in the place of each that raised: so the others' last bits are what they would be.
    stand_in = int(present.nonzero()[0])
    places = torch.where(present, torch.arange(len(present)), stand_in)
    try:
        return gradients(flat, *(part[places.to(part.device)] for part in examples)), present, failure
    except Exception:  # too many for the memory, perhaps
        return rows, present, failure


def add_clipped_rows(
    total: Tensor, parts: Parts, wanted: Tensor | None, clip_norm: float, grid: Lattice | None, unit: float = 1.0
) -> Tensor:
    """total += Σ_i min(1, clip_norm/‖g_i‖)·g_i in steps of `grid`, g_i = row i / unit, each rounded towards zero; in place.

    `total` is int64, shape (d,); `parts` are rows of any floating-point type, shape (m, d) together. The result is the factors: 0
    for a row that is not finite or not `wanted` (None: all are), which takes no part; 1 for one within the norm. Guarantee:
    grid.step times each row's term has norm at most clip_norm: the norm is off by at most 2⁻²⁸ of itself (as proved at
    `fedcgd.native.vector_kernels.squared_distance`), the factor aims 2⁻²² below the bound, and rounding towards zero makes no
    entry larger. Without a grid `total` is float64 and nothing is rounded, for comparisons without noise.
    """
    if total.device.type != "cpu" and sum(map(torch.numel, parts)) < _COPIED:
        parts = [torch.cat([*parts], dim=1)]
    factors = clip_factors(squared_norms(parts), clip_norm * unit)
    if wanted is not None:
        factors = torch.where(wanted, factors, 0.0)
    scales, begin = factors / (unit * (1.0 if grid is None else grid.step)), 0
    for rows in parts:
        add_rows(total[begin : begin + rows.shape[1]], rows, scales)
        begin += rows.shape[1]
    return factors


def add_rows(total: Tensor, rows: Tensor, scales: Tensor) -> None:
    """total += Σ_i scales[i]·row i in place, each term rounded towards zero if `total` is int64; rows of scale 0 do not count."""
    if total.is_floating_point():
        total += scales @ rows.double().nan_to_num(0, 0, 0)
    else:
        _form_for(rows).accumulate(rows, scales, total)


def clip_factors(squares: Tensor, clip_norm: float) -> Tensor:
    """min(1, clip_norm/√square) for each of `squares`, those of norms, float64; 0 for one that is not finite."""
    # In this order, so that a quotient is rounded once: 1 for a norm at the bound, as for what is within it.
    factors = torch.full_like(squares, clip_norm * (1 - ROUNDING)).div_(squares.sqrt())
    return factors.clamp_(max=1.0).nan_to_num_(nan=0.0)


def squared_norms(parts: Parts) -> Tensor:
    """Σ_j rows[i, j]² over all parts, float64, shape (m,), off by at most 2⁻²⁷ of itself."""
    sums = torch.zeros(len(parts[0]), dtype=torch.float64, device=parts[0].device)
    for rows in parts:
        _form_for(rows).squares(rows, sums)
    return sums


class RowPasses(NamedTuple):
    """What rows are read for, twice: they may be larger than everything else in memory."""

    squares: Callable[[Tensor, Tensor], object]
    """(rows, sums): sums[i] += Σ_j rows[i, j]², float64."""
    accumulate: Callable[[Tensor, Tensor, Tensor], None]
    """(rows, factors, total): total += Σ_i rows[i]·factors[i], each rounded towards zero; rows of factor 0 do not count."""


def _form_for(rows: Tensor) -> RowPasses:
    """By machine code or Triton, where they can: what torch does takes float64 copies of the rows."""
    if rows.device.type != "cpu":
        return _on_gpu(rows.device)
    return _BY_MACHINE_CODE if rows.dtype == torch.float32 else _BY_TORCH


def _squares(rows: Tensor, sums: Tensor) -> None:
    kernels().squares(aligned(rows.numpy()), sums.numpy())


def _accumulate(rows: Tensor, factors: Tensor, total: Tensor) -> None:
    kernels().accumulate(aligned(rows.numpy()), factors.numpy(), 1.0, total.numpy())


def _accumulate_by_torch(rows: Tensor, factors: Tensor, total: Tensor) -> None:
    total += torch.where(factors[:, None] > 0, rows.double() * factors[:, None], 0.0).to(torch.int64).sum(dim=0)


_BY_MACHINE_CODE = RowPasses(_squares, _accumulate)
_BY_TORCH = RowPasses(lambda rows, sums: sums.add_(rows.double().square().sum(dim=1)), _accumulate_by_torch)


@cache
def _on_gpu(device: torch.device) -> RowPasses:
    """Triton's, where it works and gives what torch does."""
    try:
        from fedcgd.clipping.gpu_code import accumulate, squares

        found = RowPasses(lambda rows, sums: sums.add_(squares(rows)), accumulate)
        rows = torch.sin(torch.arange(5 * 2077, device=device, dtype=torch.float32)).view(5, -1)
        rows[3, 7], factors = torch.nan, torch.tensor([0.1, 1e9, 3.7e4, 0.0, 1.0], dtype=torch.float64, device=device)
        totals = [torch.arange(2077, device=device) for _ in range(2)]
        sums = [torch.ones(3, dtype=torch.float64, device=device) for _ in range(2)]
        for form, total, of_rows in zip((found, _BY_TORCH), totals, sums, strict=True):
            form.accumulate(rows, factors, total)
            form.squares(rows[:3], of_rows)
        close = torch.allclose(sums[0], sums[1], rtol=1e-12)
        return found if close and torch.equal(*totals) else _BY_TORCH
    except Exception:  # whatever a compiler can raise for a device that it does not know; noise's `gpu_kernels` warns
        return _BY_TORCH
