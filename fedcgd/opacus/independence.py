"""Whether the rows of a batch stay apart in a model, so that what is clipped for an example is that example's alone."""

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, RNNLinear
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map

from fedcgd.opacus.row_changes import changed_rows, has_rows, others_changed, replacements, spread_of

_RECURRENT = (DPRNN, DPLSTM, DPGRU)
_AGAIN = 10
_REPEATS = 2


class _Seen(NamedTuple):
    """The input or the output of a layer, or of the model."""

    name: str
    dim: int
    """Of its rows."""
    values: Tensor
    layer: nn.Module | None = None


class Independence:
    """Raises RuntimeError in the forward pass of a model in which one example reaches the rows of others.

    Counting rows does not find a sequence-first layer whose length is the batch size, attention or statistics across the
    batch, rows in another order in one layer than in the next, or a layer that works on something of the model's own, and has
    rows that are no examples. So some batches (the 1st, 10th, 100th, … in which it can be seen) go through the model a few times
    more, with the same random numbers:

    - forward, as they are and with rows (the first; every other one) replaced by the next: in the other rows the inputs of all
      layers and the outputs have to be the same;
    - and backward, with another slope in the first row of the output, or the last: in the other rows the slopes of the outputs of
      all layers have to be the same.

    Where an output is one number for the batch, its slopes have to be the same in rows that are not replaced: so a loss that a
    model makes is judged. A loss that the model does not see is not. A model that does not repeat itself cannot be judged by
    what it answers, which is said in a warning.
    """

    def __init__(
        self, module: nn.Module, seen: nn.Module, batch_first: bool, handed_out: Callable[[], int], hooks: Any
    ) -> None:
        """Watches `module`, when `seen` (itself, or a wrapper around it) is called, for as long as it is private.

        `handed_out()` is how many examples the loader gave out last. `hooks` are what makes the gradients of examples: those of
        Opacus are off meanwhile.
        """
        self._module = module
        self._batch_dim = 0 if batch_first else 1
        self._handed_out = handed_out
        self._hooks = hooks if hasattr(hooks, "disable_hooks") else None
        self._batches, self._next, self._looking = 0, 1, False
        seen.register_forward_pre_hook(self._before, with_kwargs=True)
        for layer in module.modules():
            if isinstance(layer, _RECURRENT):
                layer.register_forward_pre_hook(_refuse_reordered)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handed_out": _nothing}  # a copy of the model is no loader's

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else all looks are compiled, for many times the time of the steps
    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._looking or not _trains(self._module) or not getattr(self._hooks, "hooks_enabled", True):
            return
        given = (args, kwargs)
        tensors = [t for t in _tensors(given) if t.dim() > self._batch_dim]
        sizes = [t.shape[self._batch_dim] for t in tensors]
        out = self._handed_out()  # the first tensor may be no batch
        rows = out if out in sizes else max(sizes[:1], default=0)
        if rows < 2:
            return
        self._batches += 1
        if self._batches < self._next:
            return
        first, *others = (self._replaced(given, rows, which) for which in replacements(rows))
        equal = _same(given, first)  # which tell nothing on the way forward
        if equal and self._next > 1:
            return
        with self._quiet():
            mixed = self._mixed_backward(given, rows)
            if not equal:
                mixed = self._mixed_forward(given, [first, *others], rows) or mixed
                mixed = mixed or self._mixed_number(given, [first, *others], rows)
        if mixed:
            raise RuntimeError(
                f"another example in the first row of the batch changes the other rows of {mixed}: examples influence each "
                "other there, and clipping bounds none of them. Each example must keep its row, apart from all others, from "
                "the input to the output: no statistics or attention across the batch, rows in one order in all layers (no "
                "pack_padded_sequence with enforce_sorted=False), each layer called with all rows or with none, and the batch as "
                "the first dimension of each layer's input (batch_first=True of attention and recurrent layers; position ids, or "
                "what else is the same for all examples, with a row for each of them)"
            )
        if not equal:
            self._next *= _AGAIN

    def _replaced(self, given: Any, rows: int, which: slice) -> Any:
        source = torch.arange(rows)
        source[which] = (source[which] + 1) % rows

        def replaced(value: Any) -> Any:
            if not has_rows(value, self._batch_dim, rows):
                return value
            return value.detach().index_select(self._batch_dim, source.to(value.device))

        return tree_map(replaced, given)

    def _mixed_forward(self, given: Any, others: list[Any], rows: int) -> str:
        """The first place where rows mix; empty if none is known."""
        try:
            plain, again = self._trace(given), self._trace(given)
            changed = [self._trace(other) for other in others]
            alike = [_alike(plain, trace) for trace in changed]
        except Exception:  # the model refuses such a batch
            return ""
        repeats = _alike(plain, again)
        for i, before in enumerate(plain):
            same = i < repeats
            if same and not has_rows(before.values, before.dim, rows):
                continue
            if not same or bool(changed_rows(before.values, again[i].values, before.dim).any()):
                warnings.warn(
                    f"the model gave {before.name} another value for the same batch and the same random numbers: it draws "
                    "numbers of its own, or keeps something from one batch for the next. If that is something of the batch, "
                    "ε does not hold; whether examples reach each other's rows cannot be told",
                    stacklevel=2,
                )
                return ""
            for which, trace, length in zip(replacements(rows), changed, alike, strict=True):
                if i < length and others_changed(before.values, trace[i].values, before.dim, which):
                    return before.name
        return ""

    def _trace(self, given: Any) -> list[_Seen]:
        """The inputs of all layers that are trained, and the outputs, in their order."""
        found: list[_Seen] = []

        def hook(name: str, layer: nn.Module) -> Any:
            def note(layer: nn.Module, inputs: Any) -> None:
                found.extend(
                    _Seen(f"the input of {name!r}", self._dim(layer), t.detach().clone()) for t in _tensors(inputs)[:1]
                )

            return layer.register_forward_pre_hook(note)

        output = self._called(given, hook)
        if self._batch_dim == 0:  # else it may have any shape
            found.extend(_Seen("the output", 0, t.detach()) for t in _tensors(output))
        return found

    def _mixed_backward(self, given: Any, rows: int) -> str:
        """The first place where the slopes of rows mix; empty if none is known."""
        if self._batch_dim != 0:  # the output's rows are not known
            return ""
        try:
            found, given_out = self._graph(given)
            outputs = [t for t in given_out if has_rows(t, 0, rows)]
            generator = torch.Generator().manual_seed(0)
            slopes = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
            values = [seen.values for seen in found]

            def pulled(which: slice) -> list[Tensor | None]:
                given = [slope.clone() for slope in slopes]
                for slope in given:
                    slope[which] *= -2
                return list(torch.autograd.grad(outputs, values, given, retain_graph=True, allow_unused=True))

            before, *again = (pulled(slice(0)) for _ in range(1 + _REPEATS))
            changed = [pulled(which) for which in replacements(rows)]
        except Exception:  # it has no gradients in this way, as with checkpoints that are entered again
            return ""
        spread = spread_of(before, again, [seen.dim for seen in found])
        uses = Counter(id(p) for seen in found for p in _own_parameters(seen.layer))
        for i, (seen, one) in enumerate(zip(found, before, strict=True)):
            if one is None:
                continue
            if not has_rows(one, seen.dim, rows):
                packed = isinstance(seen.layer, RNNLinear)
                if not packed and any(uses[id(p)] > 1 for p in _own_parameters(seen.layer)):
                    return seen.name
                continue  # if it is used once, clipping sees that there are fewer rows
            for which, slopes_after in zip(replacements(rows), changed, strict=True):
                other = slopes_after[i]
                if other is not None and others_changed(one, other, seen.dim, which, spread):
                    return seen.name
        return ""

    def _mixed_number(self, given: Any, others: list[Any], rows: int) -> str:
        """Where an output that is one number for the batch, as a loss is, is no sum of its examples'; empty if none is known."""

        def slopes(given: Any) -> tuple[list[_Seen], Sequence[Tensor | None]]:
            found, outputs = self._graph(given)
            numbers = [t for t in outputs if t.dim() == 0]
            if not numbers:
                return [], ()
            return found, torch.autograd.grad(numbers, [seen.values for seen in found], allow_unused=True)

        try:
            found, plain = slopes(given)
            if not found:
                return ""
            again = [slopes(given) for _ in range(_REPEATS)]
            changed = [slopes(other) for other in others]
        except Exception:  # the model refuses such a batch
            return ""
        if any(_alike(found, repeated) < max(len(found), len(repeated)) for repeated, _ in again):
            return ""  # it does not repeat itself
        spread = spread_of(plain, [made for _, made in again], [seen.dim for seen in found])
        for which, (after, slopes_after) in zip(replacements(rows), changed, strict=True):
            if _alike(found, after) < len(found):
                continue
            for seen, one, other in zip(found, plain, slopes_after, strict=False):
                if one is None or other is None or not has_rows(one, seen.dim, rows):
                    continue
                if others_changed(one, other, seen.dim, which, spread):
                    return f"{seen.name}, of a single number that the model gives for the batch"
        return ""

    def _graph(self, given: Any) -> tuple[list[_Seen], list[Tensor]]:
        """The outputs of all layers that are trained, in their order, and those of the model that depend on them."""
        found: list[_Seen] = []

        def hook(name: str, layer: nn.Module) -> Any:
            def note(layer: nn.Module, _inputs: Any, output: Any) -> Any:
                if not isinstance(output, Tensor) or not output.requires_grad:
                    return None
                found.append(_Seen(f"the slope of the output of {name!r}", self._dim(layer), output, layer))
                return output.clone()  # which may be written to

            return layer.register_forward_hook(note)

        return found, [t for t in _tensors(self._called(given, hook)) if t.requires_grad]

    def _dim(self, layer: nn.Module) -> int:
        if isinstance(layer, (RNNLinear, *_RECURRENT)):  # these know themselves, and keep rows first inside
            return 0 if getattr(layer, "batch_first", True) else 1
        return self._batch_dim

    def _called(self, given: Any, hook: Callable[[str, nn.Module], Any]) -> Any:
        """What the model answers, with `hook` in each of the layers that have gradients of examples."""
        hooked = None if self._hooks is None else set(self._hooks.iterate_submodules(self._module))
        handles = [
            hook(name, layer)
            for name, layer in self._module.named_modules()
            if any(p.requires_grad for p in layer.parameters(recurse=False)) and (hooked is None or layer in hooked)
        ]
        args, kwargs = given
        devices = {t.device for t in (*_tensors(given), *self._module.parameters()) if t.device.type == "cuda"}
        drawn, numpys = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(list(devices)):
                return self._module(*args, **kwargs)
        finally:
            random.setstate(drawn)
            np.random.set_state(numpys)
            for handle in handles:
                handle.remove()

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """A context in which the model may be called: nobody watches, and Opacus' hooks make no gradients of examples.

        Buffers are afterwards what they were, but not between the calls: what they keep of one batch shows in the next.
        """
        self._looking = True
        if self._hooks is not None:
            self._hooks.disable_hooks()
        try:
            with _same_buffers(self._module):
                yield
        finally:
            self._looking = False
            if self._hooks is not None:
                self._hooks.enable_hooks()


def _nothing() -> int:
    return 0


def _alike(one: list[_Seen], other: list[_Seen]) -> int:
    """How many of the first are of the same layers, with the same shapes.

    From there on a model has gone another way, as it does where sequences have other lengths: the next call of a layer may be
    of another step in time, and sums of other sizes are rounded in another way.
    """
    pairs = enumerate(zip(one, other, strict=False))
    differ = (i for i, (a, b) in pairs if (a.name, a.values.shape) != (b.name, b.values.shape))
    return next(differ, min(len(one), len(other)))


def _own_parameters(layer: nn.Module | None) -> list[nn.Parameter]:
    return [] if layer is None else [p for p in layer.parameters(recurse=False) if p.requires_grad]


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_tensors(one), _tensors(other), strict=True))


def _trains(module: nn.Module) -> bool:
    """Whether a forward pass of `module` is one whose gradients are clipped."""
    return module.training and torch.is_grad_enabled() and any(hasattr(p, "grad_sample") for p in module.parameters())


def _tensors(values: Any) -> list[Tensor]:
    """All tensors in `values`, also those of the mappings that Transformers returns; packed sequences have no rows."""
    parts = list(values.values()) if isinstance(values, Mapping) else values
    leaves, _ = tree_flatten(parts, is_leaf=lambda part: isinstance(part, PackedSequence))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


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
