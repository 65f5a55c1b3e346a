"""What a model holds, by value: trained parameters change by steps of the private optimizer, and nothing else changes.

A forward pass can write what it sees into a parameter or a buffer in ways that torch does not count (`tensor.data`, `.numpy()`).
So values are compared, by digests: those of trained parameters and of small state at each release, a larger frozen part in turn,
64 MiB a step, and all of it whenever the model is saved. What is not saved with the model is not looked at.

A digest has Σ_i w_i·v_i mod 2⁶⁴ for each block of values, v_i their 32-bit words and w_i secret and random. A change that does
not depend on w is missed with probability at most 2⁻³³: words differ by at most 2³¹ times an odd number, so that at least 33
random bits of one product have to cancel all others. It is the same on all devices, and reads 3 to 4 GB a second on one core.
"""

import hashlib
import pickle
import secrets
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_BLOCK = 2**18
"""Words, 1 MiB: with their weights they stay in a cache."""
_BLOCKS_PER_STEP = 64
"""Of what is frozen."""
_BLOCKS_AT_ONCE = 16

Digest = tuple[Any, ...]
Values = dict[str, Tensor | bytes]
"""What a state dict has, by name: tensors, and a hash of what a layer saves beside them (`get_extra_state`)."""


class ModelState:
    """The values of a model that were accepted last, and whether they are still there."""

    def __init__(self, module: nn.Module, trained: Collection[nn.Parameter], secret: bytes | None = None) -> None:
        """Accepts the values of `module` as they are; `trained` are the parameters that the optimizer moves.

        The weights come from `secret`, so that those who share one can compare their digests; by default from one of its own.
        """
        self._module = module
        self._trained = list(trained)  # while they are, no other parameter has their id
        weights = secrets.token_bytes(8 * _BLOCK) if secret is None else hashlib.shake_256(secret).digest(8 * _BLOCK)
        self._weights = torch.frombuffer(bytearray(weights), dtype=torch.int64)
        self._accepted: dict[str, Digest] = {}
        self._versions: dict[str, Any] = {}
        self._frozen: list[tuple[str, int]] = []
        """(name, first block), in the order in which they are looked at."""
        self._turn = 0
        self._active = True
        self.accept(self._values())

    def watch(self) -> list[RemovableHandle]:
        """Until the handles are removed: check what is saved (`state_dict`, pickle), and accept what `load_state_dict` loads."""
        return [
            handle
            for name, layer in self._module.named_modules()
            for handle in (
                layer.register_state_dict_pre_hook(partial(self._before_saving, name)),
                layer.register_load_state_dict_post_hook(partial(self._after_loading, name)),
            )
        ]

    def accept(self, values: Values) -> None:
        """Take `values` for what they are to be from now on."""
        self._accepted |= {name: self._digest(value) for name, value in values.items()}
        self._versions |= {name: _version(value) for name, value in values.items()}
        trained = {id(p) for p in self._trained}
        self._frozen = [part for part in self._frozen if part[0] not in values]
        self._frozen += [
            (name, block)
            for name, value in values.items()
            if id(value) not in trained
            for block in range(0, _blocks(value), _BLOCKS_AT_ONCE)
        ]

    def accept_step(self) -> None:
        """Take the trained parameters for what they are to be: a step of the optimizer has moved them."""
        trained = {id(p) for p in self._trained}
        moved = {name: value for name, value in self._values().items() if id(value) in trained}
        self._accepted |= {name: self._digest(p) for name, p in moved.items()}
        self._versions |= {name: _version(p) for name, p in moved.items()}

    def check(self) -> None:
        """Raise RuntimeError if something has changed; of a large frozen part, a share is looked at in each call."""
        values, trained = self._values(), {id(p) for p in self._trained}
        versions = {name: _version(value) for name, value in values.items()}
        changed = [
            name
            for name, value in values.items()
            if (id(value) in trained or versions[name] != self._versions.get(name))
            and self._digest(value) != self._accepted.get(name)
        ]
        looked_at = 0
        for _ in range(len(self._frozen)):
            name, first = self._frozen[self._turn % len(self._frozen)]
            self._turn += 1
            if name in values and not self._same_blocks(values[name], self._accepted[name], first):
                changed.append(name)
            looked_at += _BLOCKS_AT_ONCE
            if looked_at >= _BLOCKS_PER_STEP:
                break
        self._refuse(changed)
        self._versions = versions

    def check_values(self, values: Values) -> None:
        """Raise RuntimeError if some of `values` are not what was accepted."""
        self._refuse([name for name, value in values.items() if self._digest(value) != self._accepted.get(name)])

    def digest(self) -> bytes:
        """What tells the values that were accepted last from others, for those who share the secret."""
        return hashlib.sha256(repr(sorted(self._accepted.items())).encode()).digest()

    @staticmethod
    def _refuse(changed: list[str]) -> None:
        if changed:
            raise RuntimeError(
                f"{changed[0]!r} and {len(set(changed)) - 1} other parameters and buffers of the module have changed, and not by "
                "a step of the private optimizer: what a forward pass (running statistics, a start from the first batch) or "
                "another optimizer writes into them is not clipped and has no noise. Prepare the model before "
                "make_private; load values with load_state_dict; clamp or project parameters in "
                "optimizer.original_optimizer.register_step_post_hook, and average them in a copy of the model; a buffer that "
                "is not to be saved with the model can be registered with persistent=False"
            )

    def _values(self) -> Values:
        named: Values = {}
        for prefix, layer in self._module.named_modules():
            named |= _own_values(layer, prefix)
        return named

    def _before_saving(self, name: str, layer: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        if self._active:
            self.check_values(_own_values(layer, name))

    def _after_loading(self, name: str, layer: nn.Module, _incompatible: Any) -> None:
        if self._active:
            self.accept(_own_values(layer, name))

    def __getstate__(self) -> dict[str, Any]:
        """The model is being pickled or copied, and this with it: only if nothing is in it that must not leave.

        The copy looks at nothing: it belongs to whoever made it.
        """
        if self._active:
            self.check_values(self._values())
        return {"_active": False}

    def _digest(self, value: Tensor | bytes) -> Digest:
        if isinstance(value, bytes):
            return (value,)
        return (str(value.dtype), tuple(value.shape), *self._sums(value, 0, _blocks(value)))

    def _same_blocks(self, value: Tensor | bytes, accepted: Digest, first: int) -> bool:
        if isinstance(value, bytes) or (str(value.dtype), tuple(value.shape)) != accepted[:2]:
            return self._digest(value) == accepted
        last = min(first + _BLOCKS_AT_ONCE, _blocks(value))
        return self._sums(value, first, last) == accepted[2 + first : 2 + last]

    def _sums(self, value: Tensor, first: int, last: int) -> Digest:
        octets = _octets(value)[4 * _BLOCK * first : 4 * _BLOCK * last]
        if len(octets) % 4:
            octets = torch.cat([octets, octets.new_zeros(-len(octets) % 4)])
        words = octets.view(torch.int32)
        if self._weights.device != words.device:
            self._weights = self._weights.to(words.device)
        sums = [(block.long().mul_(self._weights[: len(block)])).sum() for block in torch.split(words, _BLOCK)]
        return tuple(torch.stack(sums).tolist()) if len(words) else ()


def _own_values(layer: nn.Module, prefix: str) -> Values:
    """What the layer itself saves, not its parts."""
    dot = f"{prefix}." if prefix else ""
    found: Values = {f"{dot}{name}": p for name, p in layer._parameters.items() if p is not None}
    for name, buffer in layer._buffers.items():
        if buffer is not None and name not in layer._non_persistent_buffers_set:
            found[f"{dot}{name}"] = buffer
    if type(layer).get_extra_state is not nn.Module.get_extra_state:
        found[f"{dot}_extra_state"] = hashlib.sha256(pickle.dumps(layer.get_extra_state())).digest()
    return found


def _version(value: Tensor | bytes) -> Any:
    """What changes whenever a tensor is replaced, or written in a way that torch counts."""
    if isinstance(value, bytes):
        return value
    return id(value), None if value.is_inference() else value._version


def _blocks(value: Tensor | bytes) -> int:
    return 1 if isinstance(value, bytes) else -(-value.numel() * value.element_size() // (4 * _BLOCK))


def _octets(value: Tensor) -> Tensor:
    """The bytes of a tensor, flat; a view where it lies together and begins at a word."""
    flat = value.detach().contiguous().reshape(-1)
    octets = flat.view(torch.uint8)
    return octets if octets.storage_offset() % 4 == 0 else octets.clone()
