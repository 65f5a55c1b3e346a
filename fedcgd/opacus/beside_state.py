"""What pickle would write of a private model beside its state dict: gradients of examples, inputs, and what layers keep.

`torch.save(model)` writes all that hangs on the layers and on the parameters. A release has none of it.
"""

import hashlib
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fedcgd.opacus.attachments import MADE_BY_OPACUS
from fedcgd.opacus.probing import content_of

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DEPTH = 3


class BesideState:
    """Whether a model holds something now, and held it not when this was made, that its state dict does not have.

    Single whole numbers and words that hang on a layer, as counters do, are not looked at, nor is what objects hide.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._first = _held(module)

    def check(self) -> None:
        """Raise RuntimeError if there is something."""
        if any(_of_examples(layer) for layer in self._module.modules()):
            raise RuntimeError(
                "the model holds inputs or gradients of examples now, as it does from a forward pass in train mode to the step, "
                "and torch.save(model), pickle and copies would take them along, unclipped and without noise. Save or copy it "
                "after the step (or after the next batch has been issued), or save module.state_dict() at any time"
            )
        changed = [name for name, digest in _held(self._module).items() if self._first.get(name) != digest]
        if changed:
            raise RuntimeError(
                f"{changed[0]!r} and {len(changed) - 1} other buffers or attributes of the model's layers have changed since "
                "make_private, and are not in its state dict: what a forward pass keeps there (inputs, a mean, a list of losses) "
                "is of the examples, and torch.save(model), pickle and copies would take it along, without noise. Save "
                "module.state_dict(), and load it into a model that is made anew; or empty it first"
            )


def _of_examples(layer: nn.Module) -> bool:
    """Whether a forward or backward pass has left inputs or gradients of examples on `layer`."""
    return bool(vars(layer).get("activations")) or any(
        getattr(p, name, None) is not None
        for p in layer.parameters(recurse=False)
        for name in ("grad_sample", "_current_grad_sample")
    )


def _held(module: nn.Module) -> dict[str, bytes]:
    """A hash of what each attribute and each buffer holds that the state dict does not have, by its name."""
    found: dict[str, Any] = {}
    for prefix, layer in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        own = {name: layer._buffers[name] for name in layer._non_persistent_buffers_set if name in layer._buffers}
        own |= {
            name: value
            for name, value in vars(layer).items()
            if name not in _OF_EVERY_MODULE and name not in MADE_BY_OPACUS and not isinstance(value, int | str | None)
        }
        found |= {f"{dot}{name}": value for name, value in own.items()}
    return {name: _digest(value, _DEPTH) for name, value in found.items()}


def _digest(value: Any, depth: int) -> bytes:
    """A hash of the numbers and texts in `value`; parameters and layers in it are looked at elsewhere."""
    leaves = tree_flatten(value)[0]
    told = hashlib.sha256(repr(len(leaves)).encode())
    for leaf in leaves:
        told.update(_told(leaf, depth))
    return told.digest()


def _told(leaf: Any, depth: int) -> bytes:
    match leaf:
        case nn.Parameter() | nn.Module() | type():
            return b""
        case Tensor():
            return content_of(leaf)
        case np.ndarray() if not leaf.dtype.hasobject:
            return repr((leaf.dtype, leaf.shape)).encode() + leaf.tobytes()
        case np.ndarray():
            return _digest(leaf.tolist(), depth)
        case set() | frozenset():
            return repr(sorted(map(repr, leaf))).encode()
        case None | str() | bytes() | int() | float() | complex() | np.generic():
            return repr(leaf).encode()
    ours = type(leaf).__module__.partition(".")[0] not in ("builtins", "torch", "functools")
    if ours and depth and isinstance(getattr(leaf, "__dict__", None), dict):
        return _digest(vars(leaf), depth - 1)
    return type(leaf).__qualname__.encode()
