"""Which runs of this process meet in a model, whose hooks the earlier leaves to the later one, or in their examples."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn
from torch.utils.data import ConcatDataset, Subset
from torch.utils.hooks import RemovableHandle

from fedcgd.opacus.ghost import remove_sample_hooks

_SHARED = (
    "another run of this process has released rounds over some of these examples: anyone in both has the ε of both together, "
    "also of trials that are thrown away, and get_epsilon is of one run. fedcgd.compose has it for all of them"
)


@dataclass
class _Attachment:
    module: "ReferenceType[nn.Module]"
    handles: list[RemovableHandle]
    rounds: "ReferenceType[Any]"


_attached: WeakKeyDictionary[nn.Module, _Attachment] = WeakKeyDictionary()
"""By each layer of the models that are private; nothing in it keeps a model."""


def attach(module: nn.Module, handles: list[RemovableHandle], rounds: Any) -> None:
    """Note what belongs to the run of these `rounds`, whose model `module` is."""
    attachment = _Attachment(ref(module), handles, ref(rounds))
    for layer in module.modules():
        _attached[layer] = attachment


def detach_earlier_runs(module: nn.Module) -> int:
    """End the runs that `module` or parts of it belong to, and take off their hooks; how many rounds they have released."""
    found = {id(one): one for layer in module.modules() if (one := _attached.pop(layer, None)) is not None}
    released = 0
    for attachment in found.values():
        for handle in attachment.handles:
            handle.remove()
        if (owner := attachment.module()) is not None and owner is not module:  # they share layers
            remove_sample_hooks(owner)
        if (rounds := attachment.rounds()) is not None:
            released += rounds.releases.count
            rounds.end()
    return released


_released: dict[str, "RunExamples"] = {}
"""By its name, each run of this process that has released something."""


class RunExamples:
    """The examples of a run: they are another run's too if both are made of the same objects, and of the same indices there."""

    def __init__(self, dataset: Any) -> None:
        self._parts: dict[int, tuple[Callable[[], Any], set[int] | None]] = {}
        """By the id of each data set without parts: itself, weakly, and which of its examples; None is all."""
        origins = origins_of(dataset) if isinstance(dataset, Subset | ConcatDataset) else None
        for whole in _wholes(dataset):
            own = None if origins is None else {i for one, i in origins if one == id(whole)}
            self._parts[id(whole)] = _weakly(whole), own
        self.told = False
        """Whether the author has been told of others over them."""

    def warn_once(self, run: str) -> None:
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
        for name, (one, own) in self._parts.items():
            another, theirs = other._parts.get(name, (lambda: None, None))
            if one() is another() is not None and (own is None or theirs is None or own & theirs):
                return True
        return False


def origins_of(dataset: Any) -> list[tuple[int, int]]:
    """For each example: (which data set without parts, its index there)."""
    if isinstance(dataset, ConcatDataset):
        return [origin for part in dataset.datasets for origin in origins_of(part)]
    if isinstance(dataset, Subset):
        whole = origins_of(dataset.dataset)
        return [whole[int(i)] for i in dataset.indices]
    return [(id(dataset), i) for i in range(len(dataset))]


def _wholes(dataset: Any) -> list[Any]:
    if isinstance(dataset, ConcatDataset):
        return [whole for part in dataset.datasets for whole in _wholes(part)]
    return _wholes(dataset.dataset) if isinstance(dataset, Subset) else [dataset]


def _weakly(dataset: Any) -> Callable[[], Any]:
    try:
        return ref(dataset)
    except TypeError:  # a list
        return lambda: None
