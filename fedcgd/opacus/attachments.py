"""What a run has hung on a model and its parameters, taken off again when the model is made private for another run."""

from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from opacus.grad_sample.gsm_base import OPACUS_PARAM_MONKEYPATCH_ATTRS
from torch import nn
from torch.utils.hooks import RemovableHandle

from fedcgd.opacus.release_tracker import ReleaseTracker

MADE_BY_OPACUS = frozenset({"autograd_grad_sample_hooks", "activations", "max_batch_len", "ft_compute_sample_grad"})
"""Attributes that it gives to layers."""


@dataclass
class _Attachment:
    module: "ReferenceType[nn.Module]"
    handles: list[RemovableHandle]
    tracker: "ReferenceType[ReleaseTracker]"


_attached: WeakKeyDictionary[nn.Module, _Attachment] = WeakKeyDictionary()
"""By each layer of the models that are private; nothing in it keeps a model."""


def attach(module: nn.Module, handles: list[RemovableHandle], tracker: ReleaseTracker) -> None:
    """Note what belongs to the run of `tracker`, whose model `module` is."""
    attachment = _Attachment(ref(module), handles, ref(tracker))
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
        if (tracker := attachment.tracker()) is not None:
            released += tracker.released
            tracker.end()
    return released


def remove_sample_hooks(module: nn.Module) -> None:
    """Take what Opacus makes gradients of examples with off a model that is not wrapped (any more)."""
    for layer in module.modules():
        kept: dict[str, Any] = vars(layer)
        for handle in kept.pop("autograd_grad_sample_hooks", []):
            handle.remove()
        for name in MADE_BY_OPACUS:
            kept.pop(name, None)
    for p in module.parameters():
        for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:
            if hasattr(p, name):
                delattr(p, name)
