"""What the checks of independence share: their error, random numbers that stay as they were, and which rows of a batch differ."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten


class CrossExampleLeakError(RuntimeError):
    """An example reaches what is taken for another one's: in the model, in `collate_fn`, or from one batch to the next."""


@contextmanager
def same_random_numbers(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context after which the generators of torch (on all devices of `tensors`), NumPy and Python are where they were."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    drawn, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(numpys)


def seed_all(seed: int) -> None:
    """Set the generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors in `values`, also those of the mappings that Transformers returns; packed sequences have no rows."""
    parts = list(values.values()) if isinstance(values, Mapping) else values
    leaves, _ = tree_flatten(parts, is_leaf=lambda part: isinstance(part, PackedSequence))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


_ROUNDING = 8
_SPREADS = 16


def replacements(rows: int, copies: int, shortest: int) -> list[Tensor]:
    """From which row each row comes, each time: the first example is the one after it, and so is every other one; and then all
    are the first, the last and the `shortest`. Shape (rows,), whole numbers.

    `copies` rows that follow one another are one example.
    """
    examples = rows // copies
    own = torch.arange(examples)
    following = (own + 1) % examples
    first, even, odd = own == 0, (own % 2 == 0) & (own < examples - 1), own % 2 == 1
    sources = [torch.where(replaced, following, own) for replaced in (first, even, odd)]
    sources += [torch.full_like(own, alone) for alone in sorted({0, examples - 1, shortest})]
    return [(source * copies)[:, None].add(torch.arange(copies)).flatten() for source in sources]


def has_rows(value: Any, dim: int, rows: int) -> bool:
    """Whether `value` is a tensor with so many rows in that dimension, and not empty."""
    return isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == rows and value.numel() > 0


def spread_of(one: Sequence[Tensor | None], again: Sequence[Sequence[Tensor | None]], dims: Sequence[int]) -> float:
    """By how much results for the same batch differ at most from those before, relative to the largest number of their row."""
    pairs = (pair for repeated in again for pair in zip(one, repeated, dims, strict=True))
    return max((_spread(*pair) for pair in pairs), default=0.0)


def _spread(one: Tensor | None, other: Tensor | None, dim: int) -> float:
    """By how much two results for the same batch differ, relative to the largest number of the row; at most 1/32."""
    if one is None or other is None or one.dim() <= dim or not one.numel():
        return 0.0
    off, one = (t.movedim(dim, 0).reshape(t.shape[dim], -1).abs().amax(1) for t in (one - other, one))
    return min(float((off / one).nan_to_num(0, 0, 0).max()), 1 / 32)


def changed_rows(one: Tensor, other: Tensor, dim: int, spread: float = 0.0) -> Tensor:
    """Which rows differ by more than rounding, and than what is `spread` each time: on a GPU sums are made in any order."""
    one, other = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (one, other))
    if not one.is_floating_point():
        return (one != other).any(1)
    limit = max(_ROUNDING * torch.finfo(one.dtype).eps, _SPREADS * spread) * one.abs().nan_to_num(0, 0, 0).amax(1)
    return ((one - other).abs() > limit[:, None]).any(1)


def others_changed(one: Tensor, other: Tensor, dim: int, replaced: Tensor, spread: float = 0.0) -> bool:
    """Whether other rows differ than those that were replaced."""
    changed = changed_rows(one, other, dim, spread)
    return bool((changed & ~replaced.to(changed.device)).any())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A context in which `module` is in eval mode, so that nothing is dropped at random."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


def bytes_of(values: Tensor) -> bytes:
    """The bytes of a tensor of any type, wherever it is."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
