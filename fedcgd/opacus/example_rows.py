"""Whether index i of a data set is still the example that it was: keyed digests of a few rows.

ε counts the turns of an example by its index. A data set whose rows come in another order when a run goes on, or that moves its
indices from epoch to epoch, gives one person the turns of several.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import ConcatDataset, Subset

from fedcgd.opacus.probing import content_of, same_random_numbers

_DRAWN = 16
"""Rows that are looked at, beside the first and the last one."""
_READS = 4
_DIGEST_BYTES = 16

LABELS_VARY = (
    "the label (a single whole number) of an example is another when it is read with other random numbers. If the data set mixes "
    "examples or picks another one (mixup, a shuffle in __getitem__), one person acts in the turns of others, and ε does not "
    "hold: dataset[i] must be made of example i alone. If labels are drawn at random for the example itself, all is well"
)


class ExampleRows:
    """What a few rows of a data set hold, always the same rows for one secret and one length.

    A row is read with random numbers that its index decides, so that what torch's, NumPy's and Python's generators do to it is
    the same each time. A value that is another one in the next read all the same (of a generator of the data set's own) is left
    out, in all rows. Digests are keyed, and those of a record are its run's alone: without the key they tell nothing.
    """

    def __init__(self, dataset: Any, secret: bytes) -> None:
        """Read the rows of `dataset`, three times each; `secret` chooses them, and keys their digests."""
        self._dataset, self._secret, self._size = dataset, secret, len(dataset)
        drawn = np.frombuffer(hashlib.shake_256(secret).digest(8 * _DRAWN), "<u8") % self._size
        places = sorted({0, self._size - 1, *map(int, drawn)})
        parts = isinstance(dataset, Subset | ConcatDataset)
        self._indices = repr([i for _, i in origins_of(dataset)]).encode() if parts else b""
        first = {i: self._read(i) for i in places}
        self._rows = {i: values_of(example) for i, example in first.items()}
        pairs = [(row, values_of(self._read(i))) for i, row in self._rows.items()]
        self._random = {j for pair in pairs for j, (a, b) in enumerate(zip_longest(*pair)) if a is None or a != b}
        """Which values of a row are not compared."""
        self.labels_vary = any(_whole_numbers(one) != _whole_numbers(self._read(i, -1 - i)) for i, one in first.items())
        """Whether a row's label, a whole number, depends on random numbers."""

    def digest(self) -> bytes:
        """What tells this data set from others, and from its examples in another order, for those who share the secret."""
        rows = {i: [v for j, v in enumerate(row) if j not in self._random] for i, row in self._rows.items()}
        return self._keyed(repr((self._size, self._indices, rows)).encode())

    def ends(self) -> bytes | None:
        """How many rows there are, and what the first and the last hold; None if that is not all known, or both hold the same."""
        first, last = self._rows[0], self._rows[self._size - 1]
        if self._random or first == last or None in (*first, *last):
            return None
        return repr((self._size, self._indices, first, last)).encode()

    def record(self, run: str) -> dict[str, Any]:
        """What a checkpoint of `run` notes of the examples, as plain values."""
        return {
            "size": self._size,
            "indices": self._keyed(run.encode() + self._indices).hex(),
            "rows": {str(i): self._told(run, i, row) for i, row in self._rows.items()},
        }

    def moved(self, record: Mapping[str, Any], run: str) -> str:
        """What of the data set is not as in the `record` of `run`, in words; empty if nothing is known to be."""
        if record["size"] != self._size:
            return f"there are {self._size} examples, and there were {record['size']}"
        if record["indices"] != self._keyed(run.encode() + self._indices).hex():
            return "the indices of its parts (Subset, ConcatDataset) are others"
        for place, told in record["rows"].items():
            if not any(self._alike(told, self._told(run, int(place), row)) for row in self._reads(int(place))):
                return f"example {place} is another one"
        return ""

    def uncompared(self, record: Mapping[str, Any]) -> bool:
        """Whether something of the rows in `record` is left out of the comparison."""
        return bool(self._random) or any(not value for row in record["rows"].values() for value in row)

    def _reads(self, i: int) -> Any:
        """Row `i` several times: a rare transformation of the data set's own, in one of them, is no other example."""
        return (values_of(self._read(i)) for _ in range(_READS))

    def _read(self, i: int, seed: int | None = None) -> Any:
        seed = i if seed is None else seed
        with same_random_numbers(()):
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            return self._dataset[i]

    def _told(self, run: str, i: int, row: Sequence[bytes | None]) -> list[str]:
        """The digests of row `i` in records of `run`, empty for what is not compared."""
        return [
            "" if value is None or j in self._random else self._keyed(f"{run} {i} {j} ".encode() + value).hex()
            for j, value in enumerate(row)
        ]

    @staticmethod
    def _alike(told: Sequence[str], here: Sequence[str]) -> bool:
        return len(told) == len(here) and all(not a or not b or a == b for a, b in zip(told, here, strict=True))

    def _keyed(self, text: bytes) -> bytes:
        return hashlib.blake2b(text, key=self._secret, digest_size=_DIGEST_BYTES).digest()


def origins_of(dataset: Any) -> list[tuple[int, int]]:
    """For each example: (which data set without parts, its index there)."""
    if isinstance(dataset, ConcatDataset):
        return [origin for part in dataset.datasets for origin in origins_of(part)]
    if isinstance(dataset, Subset):
        whole = origins_of(dataset.dataset)
        return [whole[int(i)] for i in dataset.indices]
    return [(id(dataset), i) for i in range(len(dataset))]


def values_of(example: Any) -> tuple[bytes | None, ...]:
    """A hash of each value that an example holds; None for an object of which nobody knows what it holds. A list is one value."""
    return tuple(map(_hashed, _leaves(example)))


def _leaves(example: Any) -> list[Any]:
    parts = dict(example) if isinstance(example, Mapping) else example
    return tree_flatten(parts, is_leaf=lambda part: isinstance(part, list) and part is not parts)[0]


def _hashed(value: Any) -> bytes | None:
    match value:
        case Tensor():
            return _sha256(content_of(value))
        case list():
            parts = [_hashed(part) for part in _leaves(value)]
            return None if None in parts else _sha256(b"".join(part for part in parts if part))
        case None | str() | bytes() | int() | float() | complex():
            return _sha256(repr(value).encode())
        case np.ndarray() if value.dtype.hasobject:
            return _hashed(value.tolist())
    if hasattr(value, "tobytes"):  # of NumPy, and an image of Pillow
        return _sha256(repr((getattr(value, "dtype", ""), getattr(value, "shape", ""))).encode() + value.tobytes())
    return None


def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _whole_numbers(example: Any) -> list[int]:
    """The single whole numbers among an example's values, which are its labels, mostly."""
    kinds = (int, np.integer)
    return [
        int(value)
        for value in _leaves(example)
        if isinstance(value, kinds)
        or (isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point() and not value.is_complex())
    ]
