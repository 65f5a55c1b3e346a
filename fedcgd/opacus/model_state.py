"""What a model holds, by value: trained parameters change by steps of the private optimizer, and nothing else changes.

A forward pass can write what it sees into a parameter or a buffer in ways that torch does not count (`tensor.data`, `.numpy()`).
So values are compared, by digests: those of trained parameters and of small state at each release, a larger frozen part in turn,
32 MiB a step, and all of it whenever the model is saved. What is not in the state dict is looked at when the model is pickled or
copied as a whole; of what is spread over ranks, each looks at its part.
"""

import hashlib
import pickle
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedcgd.opacus.beside_state import BesideState
from fedcgd.opacus.deferred import Finding
from fedcgd.opacus.digests import Digests, blocks_of
from fedcgd.opacus.shards import local

_BLOCKS_PER_STEP = 32
"""Of what is frozen."""
_BLOCKS_AT_ONCE = 16


class Accepted(NamedTuple):
    """What a value is to be."""

    kind: Any
    """Type and shape of a tensor; anything else itself."""
    sums: Tensor
    """The digest of a tensor."""


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
        self._trained_ids = {id(p) for p in self._trained}
        self._digests = Digests(secret)
        self._accepted: dict[str, Accepted] = {}
        self._versions: dict[str, Any] = {}
        self._frozen: list[tuple[str, int]] = []
        """(name, first block), in the order in which they are looked at."""
        self._turn = 0
        self._active = True
        self._beside = BesideState(module)
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
        self._accept(values, [self._sums(value) for value in values.values()])
        self._frozen = [part for part in self._frozen if part[0] not in values]
        self._frozen += [
            (name, block)
            for name, value in values.items()
            if id(value) not in self._trained_ids
            for block in range(0, 1 if isinstance(value, bytes) else blocks_of(local(value)), _BLOCKS_AT_ONCE)
        ]

    def accept_step(self) -> None:
        """Take the trained parameters for what they are to be: a step of the optimizer has moved them."""
        moved = self._moving(self._values())
        self._accept(moved, self._digests.of_all(list(map(local, moved.values()))))

    def look(self) -> Finding:
        """Whether something has changed, which is an error; of a large frozen part, a share is looked at in each call."""
        values = self._values()
        versions = {name: _version(value) for name, value in values.items()}
        moving = self._moving(values)
        seen = dict(zip(moving, self._digests.of_all(list(map(local, moving.values()))), strict=True))
        seen |= {
            name: self._sums(value)
            for name, value in values.items()
            if name not in moving and versions[name] != self._versions.get(name)
        }
        changed = [name for name in seen if not self._is_kind(name, values[name])]
        pairs = [(name, sums, self._accepted[name].sums) for name, sums in seen.items() if name not in changed]
        looked_at = 0
        for _ in range(len(self._frozen)):
            name, first = self._frozen[self._turn % len(self._frozen)]
            self._turn += 1
            looked_at += 1  # a small part is a block too
            if name in values:
                if self._is_kind(name, values[name]):
                    last = first + _BLOCKS_AT_ONCE
                    found = self._sums(values[name], first, last)
                    pairs.append((name, found, self._accepted[name].sums[first:last]))
                    looked_at += max(0, len(found) - 1)
                else:
                    changed.append(name)
            if looked_at >= _BLOCKS_PER_STEP:
                break

        def judge(numbers: list[float]) -> None:
            self._refuse(changed + (_unequal(pairs) if numbers[0] else []))
            self._versions = versions

        return Finding(_any_unequal(pairs), judge)

    def check_values(self, values: Values) -> None:
        """Raise RuntimeError if some of `values` are not what was accepted."""
        changed = [name for name, value in values.items() if not self._is_kind(name, value)]
        left = [name for name in values if name not in changed]
        self._refuse(changed + _unequal([(name, self._sums(values[name]), self._accepted[name].sums) for name in left]))

    def digest(self) -> bytes:
        """What tells the values that were accepted last from others, for those who share the secret."""
        accepted = sorted((name, str(kind), sums.tolist()) for name, (kind, sums) in self._accepted.items())
        return hashlib.sha256(repr(accepted).encode()).digest()

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
            self._beside.check()
        return {"_active": False}

    def _moving(self, values: Values) -> dict[str, Tensor]:
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and id(value) in self._trained_ids
        }

    def _accept(self, values: Mapping[str, Tensor | bytes], sums: Sequence[Tensor]) -> None:
        kinds = map(_kind, values.values())
        self._accepted |= zip(values, map(Accepted, kinds, sums), strict=True)
        self._versions |= {name: _version(value) for name, value in values.items()}

    def _is_kind(self, name: str, value: Tensor | bytes) -> bool:
        return name in self._accepted and _kind(value) == self._accepted[name].kind

    def _sums(self, value: Tensor | bytes, first: int = 0, last: int | None = None) -> Tensor:
        return _NOTHING if isinstance(value, bytes) else self._digests.of(local(value), first, last)


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


def _kind(value: Tensor | bytes) -> Any:
    return value if isinstance(value, bytes) else (value.dtype, value.shape)


_NOTHING = torch.empty(0, dtype=torch.int64)

_Pairs = Sequence[tuple[str, Tensor, Tensor]]
"""(name, sums that were found, sums that were accepted)."""


def _any_unequal(pairs: _Pairs) -> Tensor:
    """One number, which is not zero if some are."""
    pairs = [pair for pair in pairs if len(pair[1])]
    if not pairs:
        return torch.zeros(1, dtype=torch.float64)
    device = pairs[0][1].device
    found = torch.cat([sums.to(device) for _, sums, _ in pairs])
    accepted = torch.cat([sums.to(device) for _, _, sums in pairs])
    return (found != accepted).any().double()[None]


def _unequal(pairs: _Pairs) -> list[str]:
    return [name for name, found, accepted in pairs if found.tolist() != accepted.tolist()]
