"""Which runs of this process are over the same examples: ε is of one run, and who is in several has that of all together."""

import hashlib
import secrets
import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from fedcgd.opacus.example_rows import ExampleRows, origins_of

_SHARED = (
    "another run of this process has released rounds over the same examples, or some of them: whoever is in both has the ε of "
    "both together, and get_epsilon and plan.guarantee() are of one run alone. Trials of hyperparameters count too, also those "
    "that are thrown away. The sum of their ε at the sum of their δ holds for all of them; fedcgd.compose has a smaller one (a "
    "fedcgd.accounting.PastRun for each, of engine.accountant.plan), and under Flower a JointBudget keeps to one. If the runs "
    "are over different people, nothing adds up"
)
_SECRET = secrets.token_bytes(32)
_released: dict[str, "RunExamples"] = {}
"""By its name, each run of this process that has released something."""


class RunExamples:
    """The examples of a run, to compare them with those of others.

    Two runs share examples if they are made of the same objects (a `Subset` or `ConcatDataset` of the same data set, where
    indices meet), or of as many rows of which the first and the last hold the same.
    """

    def __init__(self, dataset: Any, rows: ExampleRows) -> None:
        ends = rows.ends()
        self._ends = None if ends is None else hashlib.blake2b(ends, key=_SECRET).digest()
        self._parts = _parts(dataset)
        self.told = False
        """Whether the author has been told of others over them."""

    def tell(self, run: str) -> None:
        """Warn if another run than `run` has released something of these examples, once for all runs over them."""
        if self.told:
            return
        before = [other for name, other in _released.items() if name != run and self._meets(other)]
        self.told = bool(before)
        if before and not any(other.told for other in before):
            warnings.warn(_SHARED, stacklevel=2)

    def note_release(self, run: str) -> None:
        """Something of these examples is released by `run`."""
        _released[run] = self

    def _meets(self, other: "RunExamples") -> bool:
        if self._ends is not None and self._ends == other._ends:
            return True
        return any(
            one() is another() is not None and _common(indices, others)
            for one, indices in self._parts
            for another, others in other._parts
        )


Indices = NDArray[np.int64] | None
"""Which examples of a data set; None is all."""


def _parts(dataset: Any) -> list[tuple[Callable[[], Any], Indices]]:
    """The data sets without parts that `dataset` is made from, weakly, and which of their examples are in it."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return [(_weakly(dataset), None)]
    origins = np.array(origins_of(dataset), dtype=np.int64).reshape(-1, 2)
    return [(_weakly(whole), origins[origins[:, 0] == id(whole), 1]) for whole in _wholes(dataset)]


def _wholes(dataset: Any) -> list[Any]:
    if isinstance(dataset, ConcatDataset):
        return [whole for part in dataset.datasets for whole in _wholes(part)]
    return _wholes(dataset.dataset) if isinstance(dataset, Subset) else [dataset]


def _common(one: Indices, other: Indices) -> bool:
    return one is None or other is None or bool(np.isin(one, other).any())


def _weakly(dataset: Any) -> Callable[[], Any]:
    try:
        return ref(dataset)
    except TypeError:  # a list
        return lambda: None
