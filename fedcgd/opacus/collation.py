"""Whether a `collate_fn` keeps examples apart: by padding to the longest of a batch, or mixing, one example acts on all rows."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import default_collate

from fedcgd.opacus.module_memory import ModuleMemory
from fedcgd.opacus.probing import CrossExampleLeakError, bytes_of, evaluating, same_random_numbers, seed_all, tensors_of

PROBED = 64
"""How many examples are looked at."""
_ROWS = 8
_SEEDS = (1, 2, 3)
_ROUNDING, _ROUNDING_OF_HALVES = 1e-3, 0.05
_COLUMNS = 4096
_MOST_ROWS = 512
_ROUNDING_OF_ROWS = 1e-5  # of the norm of a row in float32
_SMALLEST = 1e-3  # a part of another row

Collate = Callable[[list[Any]], Any]


def check_collation(
    collate_fn: Collate, examples: Sequence[Any], call: Callable[[Any], Any] | None, module: nn.Module
) -> None:
    """Raise CrossExampleLeakError if another, longer example changes what the others are, for a model that does not mask it.

    Args:
        collate_fn: makes a batch of a list of examples; its random numbers are the same each time.
        examples: three or more; others are not looked at.
        call: the model's output for a collated batch; None if nobody knows how the program calls it.
        module: the model, which is in eval mode meanwhile, so that nothing is dropped at random.
    """
    if collate_fn is default_collate or len(examples) < 3:
        return
    order = sorted(examples[:PROBED], key=lambda example: _size(collate_fn, example))
    shortest, *others = order[:_ROWS]
    longest = others.pop() if len(order) <= _ROWS else order[-1]
    for seed in _SEEDS:
        short, long = (_collated(collate_fn, [first, *others], seed) for first in (shortest, longest))
        if _others_same(short, long, len(others) + 1):
            continue
        if call is None or not _outputs_same(call, short, long, module):
            raise CrossExampleLeakError(
                "collate_fn makes other rows, or rows of another shape, of all examples when one of them is another, longer one "
                "(padding to the longest of the batch, or mixing), and the model's outputs for them change with it: one example "
                "acts on the gradients of all, and clipping bounds none of that. Pad to a fixed length; or give the model a "
                "mask, or the lengths, so that what was added does not count (a sum or mean over real tokens, sequences packed "
                "in the order of the batch, sorted by length in collate_fn). The loss must leave it out as well"
            )


def _size(collate_fn: Collate, example: Any) -> int:
    return sum(t.numel() for t in tensors_of(_collated(collate_fn, [example], 1)))


def _collated(collate_fn: Collate, examples: list[Any], seed: int) -> Any:
    with same_random_numbers(()):
        seed_all(seed)
        batch = collate_fn(examples)
    return dict(batch) if isinstance(batch, Mapping) else batch


def _others_same(short: Any, long: Any, rows: int) -> bool:
    """Whether the batches have the same rows, in whatever order, but for one. Numbers of the whole batch are not looked at."""
    pairs = list(zip(tensors_of(short), tensors_of(long), strict=False))
    if len(tensors_of(short)) != len(tensors_of(long)):
        return False
    keys: tuple[list[Any], list[Any]] = ([], [])
    for one, other in pairs:
        if one.dim() != other.dim() or any(t.dim() < 1 for t in (one, other)):
            continue
        dim = next((d for d in range(min(2, one.dim())) if one.shape[d] == other.shape[d] == rows), None)
        if dim is None:
            if one.shape != other.shape:
                return False
            continue
        for kept, tensor in zip(keys, (one, other), strict=True):
            kept.append([(tuple(row.shape), bytes_of(row)) for row in tensor.unbind(dim)])
    before, missing = (list(zip(*kept, strict=True)) for kept in keys)
    for row in before:
        if row in missing:
            missing.remove(row)
    return len(missing) <= 1


def _outputs_same(call: Callable[[Any], Any], short: Any, long: Any, module: nn.Module) -> bool:
    """Whether the model gives the other examples the same outputs, as far as there are such in both."""
    memory, outputs = ModuleMemory(module), []
    try:
        with evaluating(module), torch.no_grad():
            for batch in (short, long):
                outputs.append([t.clone() for t in tensors_of(call(batch)) if t.dim() > 0])
                memory.restore()
    except Exception as error:  # it does not take the batch in this way
        warnings.warn(
            f"whether collate_fn keeps examples apart cannot be told: the model raised {type(error).__name__}",
            stacklevel=2,
        )
        return True
    finally:
        memory.restore()
    return bool(outputs[0]) and all(_alike_but_one(one, other) for one, other in zip(*outputs, strict=False))


def _alike_but_one(one: Tensor, other: Tensor) -> bool:
    """Whether the rows are the same when one of each is left out, in the numbers that both have, up to rounding."""
    if one.dim() != other.dim() or len(one) != len(other):
        return False
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape[1:], other.shape[1:], strict=True))
    one, other = one[(slice(None), *common)], other[(slice(None), *common)]
    halves = one.dtype in (torch.float16, torch.bfloat16)
    one, other = (t.double().reshape(len(t), -1) for t in (one, other))
    scale = one.abs().amax(1).clamp(min=1e-30)
    for i in range(len(one)):
        for j in range(len(other)):
            a, b = (torch.cat([t[:k], t[k + 1 :]]) for t, k in ((one, i), (other, j)))
            limit = (_ROUNDING_OF_HALVES if halves else _ROUNDING) * torch.cat([scale[:i], scale[i + 1 :]])[:, None]
            if bool(((a - b).abs() <= limit).all()):
                return True
    return False


def as_called(given: Any, batch: Any) -> Callable[[Any], Any] | None:
    """(another batch → the arguments that the program would call the model with), from those for `batch`; None if not known.

    `given` are (args, kwargs) of a call; each tensor of more than one number in it must be one of `batch`, wherever it lies.
    """
    leaves, spec = tree_flatten(given)
    own = tensors_of(batch)
    places: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            found = [j for j, part in enumerate(own) if part.shape == leaf.shape and torch.equal(part.to(leaf), leaf)]
            if not found:
                return None
            places[i] = found[0]

    def arguments(other: Any) -> Any:
        parts = tensors_of(other)
        changed = [parts[places[i]].to(leaf) if i in places else leaf for i, leaf in enumerate(leaves)]
        return tree_unflatten(changed, spec)

    return arguments


def rows_are_mixed(given: Any, delivered: Any) -> bool:
    """Whether more than half of the rows of an input in `given` are of two rows of `delivered`, the loader's batch, each (mixup).

    The rows that the loader has given tell which rows a mixture is of, if they are linearly independent. What makes a row of one
    example (noise, normalisation, crops, another device) leaves their span, or is a multiple of that row.

    False too where that cannot be told: for rows in half precision, more than 512, or as many as half the numbers in one; where
    three are mixed, or parts cut out; and where something else was done to the rows after that.
    """
    return any(
        made.dtype in (torch.float32, torch.float64) and made.shape == rows.shape and _mixed(made, rows)
        for made in tensors_of(given)
        for rows in tensors_of(delivered)
        if rows.dim() > 1 and 2 <= len(rows) <= _MOST_ROWS
    )


def _mixed(made: Tensor, rows: Tensor) -> bool:
    flat, own = (t.detach().cpu().double().flatten(1) for t in (made, rows))
    step = -(-own.shape[1] // _COLUMNS)
    flat, own = flat[:, ::step], own[:, ::step]
    if own.shape[1] < 2 * len(own) or torch.equal(flat, own):
        return False
    lengths = own.norm(dim=1, keepdim=True)
    units = own / lengths
    factor, failed = torch.linalg.cholesky_ex(units @ units.T)
    if failed or not bool((factor.diagonal() > 10 * _ROUNDING_OF_ROWS).all()):  # some rows are combinations of others
        return False
    shares = torch.cholesky_solve(units @ flat.T, factor).T
    inside = (flat - shares @ units).norm(dim=1) <= _ROUNDING_OF_ROWS * flat.norm(dim=1)
    parts = (shares / lengths.T).abs() > _SMALLEST
    few = bool((parts.sum(0) <= 2).all()) and bool((parts.sum(1) <= 2).all())
    return bool(inside.all()) and few and 2 * int((parts.sum(1) == 2).sum()) > len(parts)
