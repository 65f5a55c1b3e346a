"""The buffers of a model stay what they were: each forward pass ends with them, so that a saved model has them too."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class FirstBuffers:
    """Puts the buffers of a model back after each forward pass, and refuses one that had changed.

    One that was not there before the pass (none, or not registered) is taken away again: what is kept in it ends with the pass.

    Not seen: what is written into frozen parameters, and what layers keep that is no buffer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: nn.Module | None = module
        self._first: dict[tuple[nn.Module, str], Tensor] = {}
        self._read()

    def watch(self, called: nn.Module) -> list[RemovableHandle]:
        """Put them back when `called` (the module, or a wrapper around it) returns or raises, until the handles are removed."""
        assert self._module is not None  # noqa: S101
        return [
            called.register_forward_pre_hook(self._note),
            called.register_forward_hook(self._put_back, always_call=True),
            self._module.register_load_state_dict_post_hook(self._read),  # type: ignore[no-untyped-call]
        ]

    def _read(self, *_: Any) -> None:
        self._first = {}
        self._note()

    def __getstate__(self) -> dict[str, Any]:
        return {"_module": None}  # a copy of the model is no run's

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note(self, *_: Any) -> None:
        """Keep the values of those that are not known yet."""
        for layer, own, _name, buffer in _buffers_of(self._module):
            if (layer, own) not in self._first:
                self._first[layer, own] = buffer.detach().clone()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _put_back(self, _called: nn.Module, _inputs: Any, output: Any) -> None:
        changed = []
        for layer, own, name, buffer in _buffers_of(self._module):
            first = self._first.get((layer, own))
            if first is None:
                layer._buffers[own] = None
            elif buffer.shape != first.shape or not torch.equal(buffer, first.to(buffer)):
                changed.append(name)
                layer._buffers[own] = first.to(buffer, copy=True)
        if changed and output is not None:  # else the forward pass has an error of its own
            raise RuntimeError(
                f"the forward pass has changed the buffer {changed[0]!r} and {len(changed) - 1} others: what it writes there "
                "(running statistics, a start from the first batch) is of the examples, not clipped and without noise, and would "
                "be saved with the model. They are what they were. Prepare the model before make_private, or load values with "
                "load_state_dict; for statistics take GroupNorm, or a BatchNorm that stays in eval mode"
            )


def _buffers_of(module: nn.Module | None) -> list[tuple[nn.Module, str, str, Tensor]]:
    """(layer, name in the layer, name in `module`, values) of each; none of no module."""
    return [
        (layer, own, f"{path}.{own}" if path else own, buffer)
        for path, layer in (() if module is None else module.named_modules())
        for own, buffer in layer._buffers.items()
        if buffer is not None
    ]
