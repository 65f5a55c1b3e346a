"""What a module keeps from one call to the next, put back: buffers always, all of it where a call only looks at it."""

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_OWN = frozenset(vars(nn.Module())) - {"_buffers"}
"""Attributes of every module; its parameters and hooks are among them."""
_DEPTH = 3


class ModuleMemory:
    """Buffers and everything else that hangs on the layers of `module`, but parameters, as it was when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._kept: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for layer in module.modules():
            attributes = {name: value for name, value in vars(layer).items() if name not in _OWN}
            self._kept.append((layer, dict(attributes)))
            self._keep(layer._buffers, _DEPTH)
            for name, value in attributes.items():
                if name != "_buffers" and not name.startswith("autograd_grad_sample"):
                    self._keep(value, _DEPTH)

    def _keep(self, value: Any, depth: int) -> None:
        """Note what `value` holds, as far as it can be put back; whatever else it is stays as it is."""
        if id(value) in self._seen or depth == 0 or isinstance(value, nn.Module | nn.Parameter | type):
            return
        self._seen.add(id(value))
        match value:
            case Tensor():
                self._kept.append((value, value.detach().clone()))
            case torch.Generator():
                self._kept.append((value, value.get_state()))
            case random.Random():
                self._kept.append((value, value.getstate()))
            case np.random.Generator() | np.random.RandomState():
                self._kept.append((value, copy.deepcopy(_numpy_state(value))))
            case dict() | list() | deque() | set():
                self._kept.append((value, copy.copy(value)))
                for part in list(value.values() if isinstance(value, dict) else value):
                    self._keep(part, depth - 1)
            case tuple():
                for part in value:
                    self._keep(part, depth - 1)
            case _ if type(value).__module__ != "builtins" and isinstance(getattr(value, "__dict__", None), dict):
                self._keep(vars(value), depth - 1)

    def restore(self) -> None:
        """Put everything back."""
        for value, before in reversed(self._kept):
            match value:
                case nn.Module():
                    for name in [name for name in vars(value) if name not in _OWN and name not in before]:
                        del vars(value)[name]
                    vars(value).update(before)
                case Tensor():
                    if not torch.equal(value.detach(), before):
                        value.data.copy_(before)
                case torch.Generator():
                    value.set_state(before)
                case random.Random():
                    value.setstate(before)
                case np.random.Generator():
                    value.bit_generator.state = before
                case np.random.RandomState():
                    value.set_state(before)
                case dict() | set():
                    value.clear()
                    value.update(before)
                case _:
                    value.clear()
                    value.extend(before)


class FirstBuffers:
    """The buffers of a model as they were: each forward pass ends with them, so that a saved model has them too.

    Not seen: what is written into frozen parameters, and what layers keep that is no buffer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: nn.Module | None = module
        self._first: dict[str, Tensor] = {}
        self._accept()

    def watch(self, called: nn.Module) -> list[RemovableHandle]:
        """Put them back when `called` (the module, or a wrapper around it) returns or raises, until the handles are removed."""
        assert self._module is not None
        if not self._first:
            return []
        return [
            called.register_forward_hook(self._put_back, always_call=True),
            self._module.register_load_state_dict_post_hook(self._accept),  # type: ignore[no-untyped-call]
        ]

    def _accept(self, *_: Any) -> None:
        if self._module is not None:
            self._first = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}

    def __getstate__(self) -> dict[str, Any]:
        return {"_module": None}  # a copy of the model is no run's

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _put_back(self, _called: nn.Module, _inputs: Any, output: Any) -> None:
        if self._module is None:
            return
        changed = []
        for name, buffer in self._module.named_buffers():
            first = self._first.get(name)
            if first is None:
                continue
            here = first.to(buffer)
            if buffer.shape != first.shape or not torch.equal(buffer, here):
                changed.append(name)
                layer, _, own = name.rpartition(".")
                self._module.get_submodule(layer)._buffers[own] = here.clone()
        if changed and output is not None:  # else the forward pass has an error of its own
            raise RuntimeError(
                f"the forward pass has changed the buffer {changed[0]!r} and {len(changed) - 1} others: what it writes there "
                "(running statistics, a start from the first batch) is of the examples, not clipped and without noise, and would "
                "be saved with the model. They are what they were. Prepare the model before make_private, or load values with "
                "load_state_dict; for statistics take GroupNorm, or a BatchNorm that stays in eval mode"
            )


def _numpy_state(generator: Any) -> Any:
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()
