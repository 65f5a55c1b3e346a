"""Whether the rows of a batch stay apart in a model, so that what is clipped for an example is that example's alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, RNNLinear
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map

_ROUNDING = 8
_RECURRENT = (DPRNN, DPLSTM, DPGRU)


class Independence:
    """Raises RuntimeError in the forward pass of a model in which one example reaches the rows of others.

    Counting rows does not find a sequence-first layer whose length is the batch size, attention or statistics across the
    batch, or rows in another order in one layer than in the next. So the first batch in which that can be seen goes through the
    model three times more, without gradients and with the same random numbers: twice as it is, and with its first row replaced by
    its second. Beyond the first row the inputs of all layers and the output have to be the same. A model that does not repeat
    itself cannot be judged in this way, nor can the loss, which the model does not see.
    """

    def __init__(self, module: nn.Module, seen: nn.Module, batch_first: bool) -> None:
        """Watches `module`, when `seen` (itself, or a wrapper around it) is called, for as long as it is private."""
        self._module = module
        self._batch_dim = 0 if batch_first else 1
        self._judged = False
        seen.register_forward_pre_hook(self._before, with_kwargs=True)
        for layer in module.modules():
            if isinstance(layer, _RECURRENT):
                layer.register_forward_pre_hook(_refuse_reordered)

    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._judged or not _trains(self._module):
            return
        given = (args, kwargs)
        tensors = [t for t in _tensors(given) if t.dim() > self._batch_dim]
        if not tensors or (rows := tensors[0].shape[self._batch_dim]) < 2:
            return
        other = tree_map(lambda value: self._replaced(value, rows), given)
        if all(torch.equal(one, two) for one, two in zip(_tensors(given), _tensors(other), strict=True)):
            return  # two equal rows, which tell nothing
        mixed = self._mixed(given, other, rows)
        if mixed:
            raise RuntimeError(
                f"another example in the first row of the batch changes the other rows of {mixed}: examples influence each "
                "other there, and clipping bounds none of them. Each example must keep its row, apart from all others, from "
                "the input to the output: no statistics or attention across the batch, rows in one order in all layers (no "
                "pack_padded_sequence with enforce_sorted=False), and the batch as the first dimension of each layer's input "
                "(batch_first=True of attention and recurrent layers)"
            )
        self._judged = True

    def _replaced(self, value: Any, rows: int) -> Any:
        if not _has_rows(value, self._batch_dim, rows):
            return value
        value = value.detach().clone()
        value.select(self._batch_dim, 0).copy_(value.select(self._batch_dim, 1))
        return value

    def _mixed(self, given: Any, other: Any, rows: int) -> str:
        """The first place where rows mix; empty if none is known."""
        try:
            plain, again, changed = (self._trace(one) for one in (given, given, other))
        except Exception:  # the model refuses such a batch
            return ""
        for (name, dim, before), (same, _, repeated), (place, _, after) in zip(plain, again, changed, strict=False):
            if not name == same == place:
                return ""
            if not _has_rows(before, dim, rows) or not before.shape == repeated.shape == after.shape:
                continue
            if bool(_changed(before, repeated, dim).any()):  # not by the example: the model does not repeat itself
                return ""
            if bool(_changed(before, after, dim)[1:].any()):
                return name
        return ""

    def _trace(self, given: Any) -> list[tuple[str, int, Tensor]]:
        """The inputs of all layers that are trained, and the output, in their order, each with its batch dimension."""
        found: list[tuple[str, int, Tensor]] = []

        def hook(name: str) -> Callable[..., None]:
            def note(layer: nn.Module, inputs: Any) -> None:
                dim = self._batch_dim
                if isinstance(layer, (RNNLinear, *_RECURRENT)):  # these know themselves, and keep rows first inside
                    dim = 0 if getattr(layer, "batch_first", True) else 1
                found.extend((f"the input of {name!r}", dim, t.detach().clone()) for t in _tensors(inputs)[:1])

            return note

        handles = [
            layer.register_forward_pre_hook(hook(name))
            for name, layer in self._module.named_modules()
            if name and any(p.requires_grad for p in layer.parameters(recurse=False))
        ]
        args, kwargs = given
        devices = {t.device for t in (*_tensors(given), *self._module.parameters()) if t.device.type == "cuda"}
        try:
            with torch.no_grad(), torch.random.fork_rng(list(devices)), _same_buffers(self._module):
                output = self._module(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if self._batch_dim == 0:  # else it may have any shape
            found.extend(("the output", 0, t) for t in _tensors(output)[:1])
        return found


def _trains(module: nn.Module) -> bool:
    """Whether a forward pass of `module` is one whose gradients are clipped."""
    return module.training and torch.is_grad_enabled() and any(hasattr(p, "grad_sample") for p in module.parameters())


def _tensors(values: Any) -> list[Tensor]:
    """All tensors in `values`, also those of the mappings that Transformers returns; packed sequences have no rows."""
    parts = list(values.values()) if isinstance(values, Mapping) else values
    leaves, _ = tree_flatten(parts, is_leaf=lambda part: isinstance(part, PackedSequence))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _has_rows(value: Any, dim: int, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == rows and value.numel() > 0


def _changed(one: Tensor, other: Tensor, dim: int) -> Tensor:
    """Which rows differ by more than rounding."""
    one, other = (t.movedim(dim, 0).reshape(t.shape[dim], -1) for t in (one, other))
    if not one.is_floating_point():
        return (one != other).any(1)
    limit = _ROUNDING * torch.finfo(one.dtype).eps * one.abs().nan_to_num(0, 0, 0).amax(1)
    return ((one - other).abs() > limit[:, None]).any(1)


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """A context after which the buffers of `module` are what they were."""
    before = [
        (layer, name, b, b.clone()) for layer in module.modules() for name, b in layer._buffers.items() if b is not None
    ]
    try:
        yield
    finally:
        for layer, name, buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
            layer._buffers[name] = buffer


def _refuse_reordered(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    order = inputs[0].sorted_indices if inputs and isinstance(inputs[0], PackedSequence) and _trains(layer) else None
    if order is not None and not torch.equal(order, torch.arange(len(order), device=order.device)):
        raise RuntimeError(
            f"{type(layer).__name__} was given sequences packed in another order than the batch's (enforce_sorted=False): its "
            "gradients would be clipped with those of other examples in other layers. Sort the batch by length, longest first, "
            "before the model (in collate_fn, with the targets), and pack with enforce_sorted=True; or leave it padded"
        )
