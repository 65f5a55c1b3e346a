"""The examples of a round: which, a pure function of the plan's participation, their number and a secret; and as tensors."""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from fedcgd.participation import Participation
from fedcgd.participation.samplings import Rows

Transform = Callable[..., Any]
"""(*example) → the example, changed at random."""


def parts_of(participation: Participation, examples: int) -> int:
    """Into how many parts the examples are split without a sampling, the `parts` of their `ExampleRounds`.

    Raises:
        ValueError: if they are more than the examples, so that some rounds have none.
    """
    parts = max(participation.min_separation, math.ceil(participation.rounds / participation.participations))
    if not participation.is_secret and examples < parts:
        raise ValueError(
            f"{examples} examples are too few for {parts} rounds in which each takes part once: plan for at most "
            f"min_separation={examples}"
        )
    return parts


def refuse_repeated(data: Any) -> None:
    """Raise ValueError if `data` has an example of the data sets that it was made from more than once."""
    origins = _origins_of(data) if isinstance(data, Subset | ConcatDataset) else []
    last = {origin: i for i, origin in enumerate(origins)}
    if repeated := [i for i, origin in enumerate(origins) if last[origin] != i]:  # the earlier ones
        raise ValueError(
            f"the data set has example {repeated[0]} and {len(repeated) - 1} others more than once (a Subset with repeated "
            "indices, or the same data set twice in a ConcatDataset): ε counts an example once in its round. To weigh examples, "
            "weigh their losses"
        )


def _origins_of(data: Any) -> list[tuple[int, int]]:
    """For each example: (which data set without parts, its index there)."""
    if isinstance(data, ConcatDataset):
        return [origin for part in data.datasets for origin in _origins_of(part)]
    if isinstance(data, Subset):
        whole = _origins_of(data.dataset)
        return [whole[int(i)] for i in data.indices]
    return [(id(data), i) for i in range(len(data))]


class Examples:
    """`data[i]` for the rows of a round, stacked.

    torch's random numbers are those of (secret, round, i) while example i is read, so that a round has the same numbers whenever,
    and wherever, it is computed.

    Args:
        data: `data[i]` is a tuple (*inputs, target) of tensors or numbers, and depends on i alone.
        transform: takes and returns such a tuple; it is called `copies` times for each example.
        copies: how often; 1 without a transform.

    Raises:
        TypeError: if an example is no tuple.
        ValueError: for copies without a transform, without examples, and for an example that is there more than once.
    """

    def __init__(self, data: Any, transform: Transform | None, copies: int) -> None:
        if copies < 1 or (copies > 1 and transform is None):
            raise ValueError(
                "augmentation_multiplicity must be at least 1, and above 1 needs a transform, which is called so often for each "
                f"example; got {copies} and transform={transform}"
            )
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise TypeError(
                f"data must have len(data) and data[i], as a torch.utils.data.Dataset, got {type(data).__name__}: give the data "
                "set itself, not its loader; the plan and the key make the batches"
            )
        if not len(data):
            raise ValueError("the data set has no examples")
        refuse_repeated(data)
        if not isinstance(data[0], tuple | list) or len(data[0]) < 2:
            raise TypeError(
                f"data[i] must be a tuple (*inputs, target), got {type(data[0]).__name__}: wrap the data set in one whose "
                "__getitem__ returns such a tuple; model(*inputs) and target go to the loss"
            )
        self._data, self._transform, self._copies = data, transform, copies

    def __len__(self) -> int:
        return len(self._data)

    def stack(self, rows: Rows, seed: bytes, device: torch.device) -> list[Tensor]:
        """The examples, each tensor of shape (rows, copies, …).

        Args:
            rows: which ones.
            seed: of their randomness.
            device: where the tensors go.
        """
        if type(self._data) is TensorDataset and self._transform is None:
            index = torch.from_numpy(rows)
            return [
                part[index.to(part.device, non_blocking=True)].unsqueeze(1).to(device) for part in self._data.tensors
            ]
        with seeded(seed):
            read = [default_collate(self._copies_of(int(i), seed)) for i in rows]
        return [_stacked(parts).to(device) for parts in zip(*read, strict=True)]

    def _copies_of(self, i: int, seed: bytes) -> list[Any]:
        torch.default_generator.manual_seed(number_of(seed, f"example {i}"))
        example, change = self._data[i], self._transform
        if change is None:
            return [example]
        copies = [change(*example) for _ in range(self._copies)]
        if not isinstance(copies[0], tuple | list) or len(copies[0]) != len(example):
            raise TypeError(
                f"transform must return a tuple of the {len(example)} parts (*inputs, target) that it is given, got "
                f"{type(copies[0]).__name__}"
            )
        return copies


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    if odd := next((type(part).__name__ for part in parts if not isinstance(part, Tensor)), None):
        raise TypeError(
            f"data[i] must be a tuple of tensors and numbers, and a part of it is made into a {odd}: give a mapping's tensors as "
            "parts of their own, and numbers in the place of texts"
        )
    other = next((part.shape[1:] for part in parts if part.shape != parts[0].shape), None)
    if other is not None:
        raise ValueError(
            f"examples must have one shape, got {tuple(parts[0].shape[1:])} and {tuple(other)}: pad or cut each to a fixed "
            "one in data[i], or take micro_batch=1, which computes them one by one"
        )
    return torch.stack(parts)


@contextmanager
def seeded(seed: bytes, purpose: str = "", device: torch.device | None = None) -> Iterator[None]:
    """Inside, torch's random numbers follow from `seed` and `purpose`; afterwards they are what they were."""
    own = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(own):
        torch.default_generator.manual_seed(number_of(seed, purpose))
        for one in own:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(number_of(seed, purpose))
        yield


def number_of(seed: bytes, purpose: str) -> int:
    """63 bits that follow from both."""
    return int.from_bytes(hashlib.blake2b(purpose.encode(), key=seed, digest_size=8).digest(), "big") >> 1
