"""What the checks of independence share: their error, random numbers that stay as they were, and the tensors of a value."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
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


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors in `values`, also those of the mappings that Transformers returns; packed sequences have no rows."""
    parts = list(values.values()) if isinstance(values, Mapping) else values
    leaves, _ = tree_flatten(parts, is_leaf=lambda part: isinstance(part, PackedSequence))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
