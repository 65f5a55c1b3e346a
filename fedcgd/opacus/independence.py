"""Whether the rows of a batch stay apart in a model, so that what is clipped for an example is that example's alone."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, RNNLinear
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from fedcgd.opacus.autograd_check import refuse_odd, unlike_alone
from fedcgd.opacus.collation import check_collation
from fedcgd.opacus.ghost import forget_samples, is_under_way
from fedcgd.opacus.module_memory import ModuleMemory
from fedcgd.opacus.probing import (
    CrossExampleLeakError,
    changed_rows,
    evaluating,
    has_rows,
    others_changed,
    replacements,
    same_random_numbers,
    seed_all,
    spread_of,
    tensors_of,
)

RECURRENT = (DPRNN, DPLSTM, DPGRU)
_REPEATS = 2
_REPEATS_WHEN_SUSPECTED = 8
_TURNED = 3
"""So many batches are followed on the way back: the others differ by lengths, which the way forward shows."""
_OUTPUT = "the output"
_ROUNDING_BY_LENGTH, _ROUNDING_OF_HALVES = 1e-4, 5e-3  # a 16th of what a row may be off, in parts of its largest number

Call = Callable[[nn.Module, Any], Any]
"""(module, batch) → the module's output."""


def call_with(module: nn.Module, batch: Any) -> Any:
    """module(batch) for a tensor, module(**batch) for a mapping, module(*inputs) for (*inputs, targets)."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(batch) if isinstance(batch, Tensor) or len(batch) < 2 else module(*batch[:-1])


def check_independence(
    module: nn.Module,
    batch: Any,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    *,
    call: Call = call_with,
    batch_first: bool = True,
    copies: int = 1,
) -> None:
    """Raise unless the examples of `batch` stay apart, on the way forward and back, and from this batch to the next.

    The model is called some twenty times with the same random numbers, with rows of the batch replaced by others, and must give
    the same in all other rows: at the inputs of all layers that are trained, in the outputs, and in the gradients on the way
    back. Whatever it keeps from call to call is put back after each. `docs/independence.md` says what this can and cannot see.

        check_independence(model, next(iter(loader)))
        check_independence(model, [dataset[i] for i in range(64)], collate_fn)

    Args:
        module: in train mode, before or after `make_private`.
        batch: as the loader gives it, two examples or more (with one, only what is kept for the next batch is seen); with
            `collate_fn`, a list of examples as the data set gives them.
        collate_fn: makes a batch of examples; it is checked as well: another, longer example may change neither the other rows
            nor, where the model does not mask what was added, their shapes.
        call: what the training loop does with module and batch; by default module(batch), module(**batch) for a mapping, and
            module(*inputs) for (*inputs, targets).
        batch_first: whether examples are the first dimension of all inputs, or the second.
        copies: how many rows that follow one another are one example.

    Raises:
        CrossExampleLeakError: names the layer or the tensor where examples meet, and what to do.
        ValueError: if the module is not in train mode, or has nothing that is trained.
    """
    hooks = module if isinstance(module, AbstractGradSampleModule) else None
    inner = module._module if isinstance(module, AbstractGradSampleModule) else module
    if not inner.training or not any(p.requires_grad for p in inner.parameters()):
        raise ValueError("the module must be in train mode (module.train()) and have parameters that are trained")
    if collate_fn is not None:
        check_collation(collate_fn, batch, lambda given: call(inner, given), inner)
        batch = collate_fn(batch)
    if isinstance(batch, Mapping):
        batch = dict(batch)  # of whatever kind it is
    dim = 0 if batch_first else 1
    sizes = [t.shape[dim] for t in tensors_of(batch) if t.dim() > dim]
    look = BatchLook(inner, lambda given: call(inner, given), batch, max(sizes[:1], default=0), dim, copies, hooks)
    look.check()


class _Seen(NamedTuple):
    """The input or the output of a layer, or of the model."""

    name: str
    dim: int
    """Of its rows."""
    values: Tensor
    layer: nn.Module | None = None


class BatchLook:
    """One batch, of `rows` rows, and what a model answers to it and to others like it."""

    under_way: ClassVar = False
    """Whether a model is called to look at it, and not to train it."""

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Any], Any],
        batch: Any,
        rows: int,
        batch_dim: int,
        copies: int = 1,
        hooks: AbstractGradSampleHooks | None = None,
    ) -> None:
        """`call(batch)` is the output of `module`; `hooks`, if there are, make gradients of examples, and are off meanwhile."""
        self._module, self._call, self._batch, self._rows, self._dim = module, call, batch, rows, batch_dim
        self._hooks = hooks if hasattr(hooks, "disable_hooks") else None
        self._memory = ModuleMemory(module)
        enough = rows >= 2 * copies and rows % copies == 0
        sources = replacements(rows, copies, _shortest(batch, batch_dim, rows) // copies) if enough else []
        self._replaced = [source != torch.arange(rows) for source in sources]
        self._others = [_with_rows_of(batch, batch_dim, source) for source in sources]
        self.tells_forward = bool(self._others) and not _same(batch, self._others[0])
        """Whether the replaced rows are others than before, so that something can be seen on the way forward."""

    def check(self) -> None:
        """Raise CrossExampleLeakError if examples meet; warn where that cannot be told."""
        with self._quiet():
            self._called(self._batch, None)  # which raises what the model raises
            place = self._mixed_backward() if self._others else ""
            if self.tells_forward:
                place = self._mixed_forward() or place
                place = place or self._mixed_number()
            if place:
                raise CrossExampleLeakError(
                    f"another example in the first row of the batch changes the other rows of {place}: examples influence each "
                    "other there, and clipping bounds none of them. Each example must keep its row, apart from all others, from "
                    "the input to the output: no statistics or attention across the batch, no cut to its longest row (or "
                    "a mask, so that what is cut does not count: a mean over real tokens), rows in one order in all layers (no "
                    "pack_padded_sequence with enforce_sorted=False), each layer called with all rows or with none, and the "
                    "batch as the first dimension of each layer's input (batch_first=True of attention and recurrent layers; "
                    "position ids, or what else is the same for all examples, with a row for each of them)"
                )
            if place := self._kept_for_later():
                raise CrossExampleLeakError(
                    f"another example in a batch changes {place} of the next batch: the model keeps something of what it sees "
                    "(a hidden state, a queue, a running mean), so that an example acts in rounds that it takes no part in, "
                    "without clipping. Start each batch from the same state (self.h = None at the beginning of forward)"
                )
            self._check_rows()

    def _mixed_forward(self) -> str:
        """The first place where rows mix; empty if none is known."""
        plain = self._trace(self._batch)
        unlike = self._first_unlike(plain, self._trace(self._batch))
        mixed, same_way = len(plain), True
        try:
            for other, mask in zip(self._others, self._replaced, strict=True):
                trace = self._trace(other)  # one at a time: each may take as much memory as a step
                alike = _alike(plain, trace)
                same_way &= alike == len(plain) == len(trace)
                changed = (
                    i
                    for i in range(min(mixed, alike))
                    if has_rows(plain[i].values, plain[i].dim, self._rows)
                    and others_changed(plain[i].values, trace[i].values, plain[i].dim, mask)
                )
                mixed = next(changed, mixed)
        except Exception:  # the model refuses such a batch
            return ""
        if unlike <= mixed and unlike < len(plain):
            warnings.warn(
                f"the model gave {plain[unlike].name} another value for the same batch and the same random numbers: it draws "
                "numbers of its own, or keeps something outside of itself. If that is something of the batch, "
                "ε does not hold; whether examples reach each other's rows cannot be told",
                stacklevel=2,
            )
            return ""
        return plain[mixed].name if mixed < len(plain) else "" if same_way else self._mixed_by_length()

    def _mixed_by_length(self) -> str:
        """Where a model that goes by the longest row makes something else of other rows; empty if no place is known.

        Sums of other sizes are rounded in another way, and dropout draws as many numbers as there are: places that follow the
        random numbers are left out, and looked at in eval mode.
        """
        for context in (nullcontext(), evaluating(self._module)):
            with context, suppress(Exception):  # what the model raises where it refuses such a batch
                plain, redrawn = self._trace(self._batch), self._trace(self._batch, seed=1)
                nothing = torch.zeros(self._rows, dtype=torch.bool)
                drawn = {seen.name for seen in _changed_by_length(plain, redrawn, self._rows, nothing)}
                for other, mask in zip(self._others, self._replaced, strict=True):
                    for seen in _changed_by_length(plain, self._trace(other), self._rows, mask):
                        if seen.name not in drawn:
                            return seen.name
        return ""

    def _first_unlike(self, plain: list[_Seen], again: list[_Seen]) -> int:
        """Where `again`, of the same batch, is first not as `plain`; its length if it is."""
        repeats = _alike(plain, again)
        unlike = (
            i
            for i in range(repeats)
            if has_rows(plain[i].values, plain[i].dim, self._rows)
            and bool(changed_rows(plain[i].values, again[i].values, plain[i].dim).any())
        )
        return next(unlike, repeats)

    def _kept_for_later(self) -> str:
        """What differs when another batch came before; empty if nothing does, or if that cannot be told."""
        earlier = self._others[0] if self.tells_forward else _turned(self._batch, self._dim)
        if _same(self._batch, earlier):
            return ""
        try:
            plain = self._trace(self._batch, after=self._batch)
            places = [_first_other(plain, self._trace(self._batch, after=first)) for first in (self._batch, earlier)]
        except InPlaceError:
            raise
        except Exception:
            return ""
        if None in places:  # it went another way
            return ""
        repeated, after = (len(plain) if place is None else place for place in places)
        return plain[after].name if after < repeated else ""

    def _trace(self, batch: Any, after: Any = None, seed: int | None = None) -> list[_Seen]:
        """The inputs of all layers that are trained, and the outputs, in their order; `after` another batch, if given.

        Random numbers are those that come next, or those of a `seed`.
        """
        found: list[_Seen] = []

        def hook(name: str, layer: nn.Module) -> Any:
            def note(layer: nn.Module, inputs: Any) -> None:
                found.extend(
                    _Seen(f"the input of {name!r}", self._dim_in(layer), t.detach().clone())
                    for t in tensors_of(inputs)[:1]
                )

            return layer.register_forward_pre_hook(note)

        if after is not None:
            self._called(after, None)
        output = self._called(batch, hook, fresh=after is None, seed=seed)
        if self._dim == 0:  # else it may have any shape
            found.extend(_Seen(_OUTPUT, 0, t.detach().clone()) for t in tensors_of(output))
        return found

    def _mixed_backward(self) -> str:
        """The first place where the gradients of rows mix on the way back; empty if none is known."""
        if self._dim != 0:  # the output's rows are not known
            return ""
        try:
            found, given_out = self._graph(self._batch)
            outputs = [t for t in given_out if has_rows(t, 0, self._rows)]
            generator = torch.Generator().manual_seed(0)
            weights = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
            values = [seen.values for seen in found]

            def pulled(replaced: int | None) -> list[Tensor | None]:
                given = [weight.clone() for weight in weights]
                for weight in given:
                    if replaced is not None:
                        weight[self._replaced[replaced].to(weight.device)] *= -2
                return list(torch.autograd.grad(outputs, values, given, retain_graph=True, allow_unused=True))

            before = pulled(None)
            mixed = self._first_mixed(found, before, pulled)
        except InPlaceError:
            raise
        except Exception:  # it has no gradients in this way, as with checkpoints that are entered again
            return ""
        uses = Counter(id(p) for seen in found for p in _own_parameters(seen.layer))
        for seen, one in zip(found[:mixed], before[:mixed], strict=True):
            if one is None or has_rows(one, seen.dim, self._rows) or isinstance(seen.layer, RNNLinear):
                continue
            if any(uses[id(p)] > 1 for p in _own_parameters(seen.layer)):
                return seen.name  # if it is used once, clipping sees that there are fewer rows
        return found[mixed].name if mixed < len(found) else ""

    def _mixed_number(self) -> str:
        """Where an output that is one number for the batch, as a loss is, is no sum of its examples'; empty if none is known."""

        def gradients(batch: Any) -> tuple[list[_Seen], Sequence[Tensor | None]]:
            found, outputs = self._graph(batch)
            numbers = [t for t in outputs if t.dim() == 0]
            if not numbers:
                return [], ()
            return found, torch.autograd.grad(numbers, [seen.values for seen in found], allow_unused=True)

        try:
            found, plain = gradients(self._batch)
            if not found:
                return ""

            def of(replaced: int | None) -> Sequence[Tensor | None]:
                after, made = gradients(self._batch if replaced is None else self._others[replaced])
                if _alike(found, after) == len(found) and (replaced is not None or len(after) == len(found)):
                    return made[: len(found)]
                if replaced is None:
                    raise RuntimeError("the model does not repeat itself")
                return [None] * len(found)  # it went another way

            mixed = self._first_mixed(found, plain, of)
        except Exception:  # the model refuses such a batch
            return ""
        if mixed == len(found):
            return ""
        return f"{found[mixed].name}, of a single number that the model gives for the batch"

    def _check_rows(self) -> None:
        """Raise RuntimeError unless row i of what is clipped is what autograd finds for example i alone, for three examples.

        The outputs of one forward pass are weighed at random. The weights of one row alone give the gradient of that example, as
        rows do not mix; all of them give the rows that are clipped.
        """
        parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        hooks = self._hooks
        if hooks is None or self._dim != 0 or any(is_under_way(p) for p in parameters.values()):
            return
        odd: list[str] = []
        before = {name: p.grad for name, p in parameters.items()}
        found: dict[str, Tensor] = {}
        handles: list[RemovableHandle] = [
            p.register_hook(partial(_add_under, found, name))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
        ]
        batch = tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, self._batch)
        try:
            hooks.enable_hooks()
            outputs = [t for t in tensors_of(self._called(batch, None)) if t.requires_grad]
            hooks.disable_hooks()
            if outputs and all(has_rows(t, 0, self._rows) for t in outputs):
                generator = torch.Generator().manual_seed(0)
                weights = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
                alone = {}
                for i in {0, self._rows // 2, self._rows - 1}:
                    torch.autograd.backward(outputs, [_only_row(i, weight) for weight in weights], retain_graph=True)
                    alone[i] = dict(found)
                    found.clear()
                hooks.enable_hooks()
                count = self._rows if hooks.loss_reduction == "mean" else 1
                torch.autograd.backward(outputs, [weight / count for weight in weights])
                odd = unlike_alone(parameters, alone, self._rows)
        except InPlaceError:
            raise
        except Exception:  # it has no gradients in this way
            return
        finally:
            hooks.disable_hooks()
            self._memory.restore()
            for handle in handles:
                handle.remove()
            for name, p in parameters.items():
                p.grad = before[name]
                forget_samples(p)
        refuse_odd(odd)

    def _first_mixed(
        self,
        found: list[_Seen],
        plain: Sequence[Tensor | None],
        gradients: Callable[[int | None], Sequence[Tensor | None]],
    ) -> int:
        """The first of `found` whose gradients in other rows follow the replaced ones; their number if none does.

        `gradients`, of the batch as it is or with those rows replaced that have this place in `_replaced`, are made anew in
        each call, and forgotten, since they may take as much memory as a step. On a GPU a sum made in another order now and
        then ends in another last bit, and the layers below make more of it: what mixes does so each time, by more than the
        same batch ever differs.
        """
        dims = [seen.dim for seen in found]

        def spread(calls: int) -> float:
            return max(spread_of(plain, [gradients(None)], dims) for _ in range(calls))

        def first(replaced: int, spread: float) -> int:
            mask, after = self._replaced[replaced], gradients(replaced)
            changed = (
                i
                for i, (one, other, dim) in enumerate(zip(plain, after, dims, strict=True))
                if one is not None
                and other is not None
                and has_rows(one, dim, self._rows)
                and others_changed(one, other, dim, mask, spread)
            )
            return next(changed, len(found))

        usual = spread(_REPEATS)
        suspects = [i for i in range(min(_TURNED, len(self._replaced))) if first(i, usual) < len(found)]
        if not suspects:
            return len(found)
        usual = max(usual, spread(_REPEATS_WHEN_SUSPECTED))
        places = [[first(replaced, usual) for _ in range(_REPEATS_WHEN_SUSPECTED)] for replaced in suspects]
        return min((min(calls) for calls in places if max(calls) < len(found)), default=len(found))

    def _graph(self, batch: Any) -> tuple[list[_Seen], list[Tensor]]:
        """The outputs of all layers that are trained, in their order, and those of the model that depend on them."""
        found: list[_Seen] = []

        def hook(name: str, layer: nn.Module) -> Any:
            def note(layer: nn.Module, _inputs: Any, output: Any) -> Any:
                if not isinstance(output, Tensor) or not output.requires_grad:
                    return None
                found.append(_Seen(f"the gradient of the output of {name!r}", self._dim_in(layer), output, layer))
                return output.clone()  # which may be written to

            return layer.register_forward_hook(note)

        return found, [t for t in tensors_of(self._called(batch, hook)) if t.requires_grad]

    def _dim_in(self, layer: nn.Module) -> int:
        if isinstance(layer, (RNNLinear, *RECURRENT)):  # these know themselves, and keep rows first inside
            return 0 if getattr(layer, "batch_first", True) else 1
        return self._dim

    def _called(
        self, batch: Any, hook: Callable[[str, nn.Module], Any] | None, fresh: bool = True, seed: int | None = None
    ) -> Any:
        """What the model answers, with `hook` in each of the layers that have gradients of examples."""
        hooked = None if self._hooks is None else set(self._hooks.iterate_submodules(self._module))
        handles = [
            hook(name, layer)
            for name, layer in self._module.named_modules()
            if hook is not None
            and any(p.requires_grad for p in layer.parameters(recurse=False))
            and (hooked is None or layer in hooked)
        ]
        if fresh:
            self._memory.restore()
        try:
            with same_random_numbers((*tensors_of(batch), *self._module.parameters())):
                if seed is not None:
                    seed_all(seed)
                return self._call(batch)
        except RuntimeError as error:
            if "BackwardHookFunction" in str(error):
                raise InPlaceError from error
            raise
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """A context in which the model may be called: Opacus' hooks are off, and what it keeps is put back in the end."""
        if self._hooks is not None:
            self._hooks.disable_hooks()
        BatchLook.under_way = True
        try:
            yield
        finally:
            BatchLook.under_way = False
            self._memory.restore()
            if self._hooks is not None:
                self._hooks.enable_hooks()


class InPlaceError(RuntimeError):
    """A layer's output is overwritten, which torch does not allow where gradients of examples are made."""

    def __init__(self) -> None:
        super().__init__(
            "the output of a trained layer is written to in place, and then it has no gradients of examples: use "
            "nn.ReLU(inplace=False) and functional.relu in place of inplace=True and relu_, and x = x + y in place of x += y"
        )


def _with_rows_of(batch: Any, dim: int, source: Tensor) -> Any:
    """`batch`, whose row i is row `source[i]`."""

    def changed(value: Any) -> Any:
        if not has_rows(value, dim, len(source)):
            return value
        return value.detach().index_select(dim, source.to(value.device))

    return tree_map(changed, batch)


def _shortest(batch: Any, dim: int, rows: int) -> int:
    """The row that has most of its first or its last number, as padded sequences have the more the shorter they are."""
    repeated = torch.zeros(rows, dtype=torch.int64)
    for value in tensors_of(batch):
        if has_rows(value, dim, rows):
            flat = value.detach().movedim(dim, 0).reshape(rows, -1)
            repeated += sum((flat == flat[:, end : end + 1]).sum(1).cpu() for end in (0, flat.shape[1] - 1))
    return int(repeated.argmax())


def _turned(batch: Any, dim: int) -> Any:
    """Another batch of as many examples: numbers with the other sign, and tokens in the other order."""

    def turned(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() <= dim:
            return value
        if value.is_floating_point():
            return -value.detach()
        return value.detach().flip([d for d in range(value.dim()) if d != dim])

    return tree_map(turned, batch)


def _alike(one: list[_Seen], other: list[_Seen]) -> int:
    """How many of the first are of the same layers, with the same shapes.

    From there on a model has gone another way, as it does where sequences have other lengths: the next call of a layer may be
    of another step in time, and sums of other sizes are rounded in another way.
    """
    pairs = enumerate(zip(one, other, strict=False))
    differ = (i for i, (a, b) in pairs if (a.name, a.values.shape) != (b.name, b.values.shape))
    return next(differ, min(len(one), len(other)))


def _changed_by_length(one: list[_Seen], other: list[_Seen], rows: int, replaced: Tensor) -> Iterator[_Seen]:
    """Of places that two traces have equally often: which of `one` have, beside rows that were `replaced`, others in `other`.

    Of an output that is longer in one of them the numbers are compared that both have, from the beginning or from the end.
    """
    for name in dict.fromkeys(seen.name for seen in one):
        pairs = [[seen for seen in trace if seen.name == name] for trace in (one, other)]
        if len(pairs[0]) != len(pairs[1]):
            continue
        for a, b in zip(*pairs, strict=True):
            dim = a.dim
            if (
                not (has_rows(a.values, dim, rows) and has_rows(b.values, dim, rows))
                or a.values.dim() != b.values.dim()
            ):
                continue
            if a.values.shape != b.values.shape and name != _OUTPUT:
                continue
            spread = _ROUNDING_OF_HALVES if a.values.dtype in (torch.float16, torch.bfloat16) else _ROUNDING_BY_LENGTH
            sizes = [min(pair) for pair in zip(a.values.shape, b.values.shape, strict=True)]
            fronts = [seen.values[tuple(slice(size) for size in sizes)] for seen in (a, b)]
            backs = [
                seen.values[tuple(slice(n - size, n) for n, size in zip(seen.values.shape, sizes, strict=True))]
                for seen in (a, b)
            ]
            if all(others_changed(x, y, dim, replaced, spread) for x, y in (fronts, backs)):
                yield a


def _first_other(one: list[_Seen], other: list[_Seen]) -> int | None:
    """Where two traces first differ; their length if they do not, None if the second went another way."""
    if _alike(one, other) < len(one):
        return None
    for i, pair in enumerate(zip(one, other, strict=True)):
        dim = pair[0].dim if pair[0].values.dim() > pair[0].dim else 0
        before, after = (seen.values if seen.values.dim() > dim else seen.values.reshape(1) for seen in pair)
        if bool(changed_rows(before, after, dim).any()):
            return i
    return len(one)


def _add_under(found: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    gradient = gradient.detach().to_dense()
    found[name] = gradient + found.get(name, 0)  # a copy: torch may use the other one for what comes next


def _only_row(row: int, values: Tensor) -> Tensor:
    only = torch.zeros_like(values)
    only[row] = values[row]
    return only


def _own_parameters(layer: nn.Module | None) -> list[nn.Parameter]:
    return [] if layer is None else [p for p in layer.parameters(recurse=False) if p.requires_grad]


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))
