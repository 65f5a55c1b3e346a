"""Whether examples stay apart in a model and in `collate_fn`, so that what is clipped for an example is that example's alone.

A copy of the model is called with a batch, and with batches in which some examples are others. By definition, the outputs of the
remaining examples and the rows of their gradients must stay what they are.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import default_collate

from fedcgd.opacus.clipped_sum import passes_of, squares_of
from fedcgd.opacus.ghost import remove_sample_hooks, with_sample_gradients

Call = Callable[[nn.Module, Any], Any]
"""(module, batch) → the module's output."""


class CrossExampleLeakError(RuntimeError):
    """An example reaches what is taken for another one's: in the model, in `collate_fn`, or from one batch to the next."""


class InPlaceError(RuntimeError):
    """A layer's output is overwritten, which torch does not allow where gradients of examples are made."""

    def __init__(self) -> None:
        super().__init__(
            "the output of a trained layer is written to in place, and then it has no gradients of examples: use "
            "nn.ReLU(inplace=False) and functional.relu in place of inplace=True and relu_, and x = x + y in place of x += y"
        )


@dataclass(frozen=True)
class _Limits:
    """What still counts as the same, in parts of the largest number of a row."""

    same_shape: float = 8 * torch.finfo(torch.float32).eps
    """Sums of the same size are made in the same order."""
    spreads: float = 16
    """So many times what the same batch differs by: on a GPU a sum is made in any order."""
    by_length: float = 1.6e-3
    """Sums of another size are rounded in another way."""
    of_halves: float = 0.08
    """As `by_length`, for numbers of 16 bits."""
    repeats: int = 8
    """How often a doubt is looked at again."""
    examples: int = 8
    """How many examples `collate_fn` is given."""
    rows: int = 6
    """How many examples of a batch are looked at: what meets in a batch of 64 meets in one of 6, for a tenth of the time."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Of what `collate_fn` draws."""


_LIMITS = _Limits()


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

    Copies of the model are called some twelve times with the same random numbers, with rows of the batch replaced by others. The
    outputs and the gradients of all other rows must stay the same. `docs/independence.md` says what this can and cannot see.

        check_independence(model, next(iter(loader)))
        check_independence(model, [dataset[i] for i in range(64)], collate_fn)

    Args:
        module: in train mode, before or after `make_private`.
        batch: as the loader gives it, two examples or more (with one, only what is kept for the next batch is seen); with
            `collate_fn`, a list of examples as the data set gives them.
        collate_fn: makes a batch of examples. It is checked as well: another, longer example may not change what the model
            makes of the others.
        call: what the training loop does with module and batch; by default module(batch), module(**batch) for a mapping, and
            module(*inputs) for (*inputs, targets).
        batch_first: whether examples are the first dimension of all inputs, or the second.
        copies: how many rows that follow one another are one example.

    Raises:
        CrossExampleLeakError: names the place where examples meet, and what to do.
        ValueError: if the module is not in train mode, or has nothing that is trained.
    """
    inner = module._module if isinstance(module, AbstractGradSampleModule) else module
    if not inner.training or not any(p.requires_grad for p in inner.parameters()):
        raise ValueError("the module must be in train mode (module.train()) and have parameters that are trained")
    if collate_fn is not None:
        check_collation(collate_fn, batch, call, inner)
        batch = collate_fn(batch)
    if isinstance(batch, Mapping):
        batch = dict(batch)  # of whatever kind it is
    IndependenceProbe(inner, call, batch, batch_dim=0 if batch_first else 1, copies=copies).check()


@dataclass(frozen=True)
class _Trace:
    """What a model makes of a batch."""

    outputs: list[Tensor]
    parameters: list[str]
    norms: Tensor
    """Of the gradients of each row, by parameter: float64, shape (rows, parameters)."""
    rows: set[int]
    """How many rows there are of the gradients of each parameter."""
    shapes: list[Any]
    """Of what all layers give."""


class IndependenceProbe:
    """A batch, and what copies of a model make of it and of others like it.

    Args:
        module: in train mode; nothing of it changes.
        call: what the program does with module and batch.
        batch: as the program has it.
        batch_dim: which dimension has the examples.
        copies: how many rows that follow one another are one example.
        mode: how gradients of examples are made (`with_sample_gradients`).
        rows: how many rows the batch has; by default as many as its first tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        batch: Any,
        *,
        batch_dim: int = 0,
        copies: int = 1,
        mode: str = "hooks",
        rows: int | None = None,
    ) -> None:
        self._module = copy_apart(module)  # without hooks, which take longer to copy than a small model
        self._call, self._dim = call, batch_dim
        self._mode = mode
        self._batch = tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, batch)
        sizes = [t.shape[batch_dim] for t in tensors_of(batch) if t.dim() > batch_dim]
        self._sizes, self._rows = set(sizes), max(sizes[:1], default=0) if rows is None else rows
        self._copies, self._whole = copies, (self._batch, self._rows)
        if self._rows % copies == 0 and _rows_are_all(batch, batch_dim, self._rows):
            self._take(*self._few())
        else:
            self._take(*self._whole)

    def _take(self, batch: Any, rows: int) -> None:
        """Look at `batch`, and at others in which some rows are replaced."""
        self._batch, self._rows, copies = batch, rows, self._copies
        enough = rows >= 2 * copies and rows % copies == 0
        sources = replacements(rows, copies, _shortest(batch, self._dim, rows) // copies) if enough else []
        self._others = [(self._with_rows(source), source != torch.arange(rows)) for source in sources]
        self.tells = bool(self._others) and not _equal(batch, self._others[0][0])
        """Whether the replaced rows are others than before, so that something can be seen on the way forward."""

    def _few(self) -> tuple[Any, int]:
        """The first examples of the batch, the last and the shortest, and how many rows they have."""
        examples = self._rows // self._copies
        kept = {examples - 1, _shortest(self._batch, self._dim, self._rows) // self._copies}
        others = (i for i in range(examples) if i not in kept)
        kept |= set(islice(others, _LIMITS.rows - len(kept)))
        source = (torch.tensor(sorted(kept))[:, None] * self._copies + torch.arange(self._copies)).flatten()
        return self._with_rows(source), len(source)

    def _plain(self) -> _Trace:
        """What the model makes of the batch: of a few examples, if all their gradients have a row for each."""
        if self._rows < self._whole[1]:
            with suppress(RuntimeError, ValueError):  # it takes batches of this size alone
                found = self._trace(self._batch)
                if found.rows == {self._rows}:
                    return found
            self._take(*self._whole)
        found = self._trace(self._batch)
        if not found.rows or self._rows in found.rows:
            return found
        if not (rows := found.rows & self._sizes):  # of a tensor after the first
            raise CrossExampleLeakError(
                f"whether examples act on each other cannot be told: gradients have {max(found.rows)} rows, and no tensor that "
                f"the module is given has as many, but {self._rows}, as it is for a list with a tensor for each example. Give it "
                "tensors with a row for each example: stack them, or pad them in the data set to one length"
            )
        self._take(self._whole[0], max(rows))
        return self._trace(self._batch)

    def check(self) -> None:
        """Raise CrossExampleLeakError if examples meet; warn where that cannot be told."""
        plain, spread = self._plain(), 0.0
        earlier = self._others[0][0] if self.tells else _turned(self._batch, self._dim)
        apart = self._same_after(plain, earlier)
        if not apart:  # then it is looked at what does this: the batch before, or anything else
            again = self._trace(self._batch)
            if not _repeats_itself(plain, again):
                return
            spread = _spread(plain, again)
        for other, replaced in self._others:
            if place := self._confirmed(plain, spread, lambda each: self._place(plain, other, replaced, each)):  # noqa: B023
                raise CrossExampleLeakError(
                    f"another example in the first row of the batch changes the other rows of {place}: examples influence each "
                    "other there, and clipping bounds none of them. Each example must keep its row, apart from all others, from "
                    "the input to the output: no statistics or attention across the batch, no cut to its longest row (or "
                    "a mask, so that what is cut does not count: a mean over real tokens), no loss that is divided by what all "
                    "examples have, rows in one order in all layers (no pack_padded_sequence with enforce_sorted=False), each "
                    "layer called with all rows or with none, and the batch as the first dimension of each layer's input "
                    "(batch_first=True of attention and recurrent layers; position ids, or what else is the same for all "
                    "examples, with a row for each of them). A sampler of your own (register_grad_sampler) returns example i's "
                    "gradient as row i"
                )
        if not apart and (
            place := self._confirmed(plain, spread, lambda each: self._kept_for_later(plain, earlier, each))
        ):
            raise CrossExampleLeakError(
                f"another example in a batch changes {place} of the next batch: the model keeps something of what it sees "
                "(a hidden state, a queue, a running mean), so that an example acts in rounds that it takes no part in, "
                "without clipping. Start each batch from the same state (self.h = None at the beginning of forward)"
            )

    def _confirmed(self, plain: _Trace, spread: float, place: Callable[[float], str]) -> str:
        """What `place` finds, each time and by more than the same batch ever differs; empty if that is nothing."""
        found = place(spread)
        if not found:
            return ""
        spread = max([spread, *(_spread(plain, self._trace(self._batch)) for _ in range(_LIMITS.repeats))])
        if all(place(spread) for _ in range(_LIMITS.repeats)):
            return found
        # Something goes by the number of calls, perhaps.
        _repeats_itself(self._trace(self._batch), self._trace(self._batch))
        return ""

    def _place(self, plain: _Trace, other: Any, replaced: Tensor, spread: float) -> str:
        """Where rows are others than in `plain` though they were not `replaced`; empty if that is nowhere, or cannot be told."""
        try:
            trace = self._trace(other, replaced)
            if trace.shapes == plain.shapes:
                return self._first_change(plain, trace, ~replaced, max(_LIMITS.same_shape, _LIMITS.spreads * spread))
            # It goes by the longest row. Then dropout, too, draws as many numbers as there are.
            quiet = bool(self._first_change(plain, self._trace(self._batch, seed=1), ~replaced, _LIMITS.by_length))
            return self._changed_by_length(other, replaced, quiet)
        except InPlaceError:
            raise
        except Exception:  # the model refuses such a batch
            return ""

    def _changed_by_length(self, other: Any, replaced: Tensor, quiet: bool) -> str:
        one, two = (self._trace(*given, quiet=quiet) for given in ((self._batch,), (other, replaced)))
        if quiet and self._first_change(
            one, self._trace(self._batch, seed=1, quiet=True), ~replaced, _LIMITS.by_length
        ):
            return ""  # it draws numbers all the same
        for a, b in zip(one.outputs, two.outputs, strict=True):
            if self._has_rows(a) and self._has_rows(b) and not _alike_where_both_are(a, b, ~replaced):
                return "the output"
        same = [t.shape for t in one.outputs] == [t.shape for t in two.outputs]
        return self._first_change(one, two, ~replaced, _LIMITS.by_length) if same else ""

    def _same_after(self, plain: _Trace, earlier: Any) -> bool:
        """Whether the model makes the same of the batch when another, `earlier`, came before: it draws and keeps nothing then."""
        if _equal(self._batch, earlier):
            return False
        try:
            after = self._trace(self._batch, before=earlier)
        except InPlaceError:
            raise
        except Exception:  # the model refuses such a batch
            return False
        return (
            after.shapes == plain.shapes
            and not _outputs_differ(plain, after)
            and not self._first_change(plain, after, torch.ones(self._rows, dtype=torch.bool), _LIMITS.same_shape)
        )

    def _kept_for_later(self, plain: _Trace, earlier: Any, spread: float) -> str:
        """What differs when another batch came before; empty if nothing does, or if that cannot be told."""
        limit, every = max(_LIMITS.same_shape, _LIMITS.spreads * spread), torch.ones(self._rows, dtype=torch.bool)
        try:
            after = self._trace(self._batch, before=earlier)
            if plain.shapes == after.shapes and not self._first_change(plain, after, every, limit):
                return ""
            plain = self._trace(self._batch, before=self._batch)  # what is done in a first call alone is no leak
        except InPlaceError:
            raise
        except Exception:
            return ""
        return self._first_change(plain, after, every, limit) if plain.shapes == after.shapes else ""

    def _first_change(self, one: _Trace, other: _Trace, own: Tensor, limit: float) -> str:
        """The first place where a row of those in `own` differs by more than `limit`, in parts of its largest number."""
        if one.norms.shape == other.norms.shape:
            own = own.to(one.norms.device)
            changed = _changed(one.norms, other.norms, limit)[own].any(0).nonzero()
            if len(changed):
                return f"the gradients of {one.parameters[int(changed[0])]!r}"
        for a, b in zip(one.outputs, other.outputs, strict=True):
            here = a.shape == b.shape and self._has_rows(a)
            if here and bool(_changed(a, b, max(limit, _limit_of(a)))[own.to(a.device)].any()):
                return "the output"
        return ""

    def _has_rows(self, value: Tensor) -> bool:
        """Whether it is an output with a row for each of the batch; with the batch in another dimension nobody knows."""
        return self._dim == 0 and value.dim() > 0 and len(value) == self._rows and value.numel() > 0

    def _trace(
        self,
        batch: Any,
        replaced: Tensor | None = None,
        *,
        before: Any = None,
        seed: int | None = None,
        quiet: bool = False,
    ) -> _Trace:
        """What a fresh copy of the model makes of `batch`, whose slopes are others where rows were `replaced`.

        Random numbers are those that come next, or those of a `seed`; `before` is a batch that the copy has seen, with the same
        numbers. A `quiet` copy is in eval mode but for the layers that have trained parameters of their own: nothing is dropped.
        """
        module = copy_apart(self._module)
        try:
            hooks = with_sample_gradients(
                module, self._mode, batch_first=self._dim == 0, loss_reduction="mean", wrap_model=False
            )
        except (NotImplementedError, ValueError):  # layers that have no gradients of examples
            hooks = None
        shapes: list[Any] = []
        for layer in module.modules():
            layer.register_forward_hook(lambda _l, _i, out: shapes.append([t.shape for t in tensors_of(out)]))
            if quiet and not any(p.requires_grad for p in layer.parameters(recurse=False)):
                layer.training = False
        everywhere = (*tensors_of(batch), *module.parameters())
        with same_random_numbers(everywhere), torch.enable_grad(), _outside_checkpoints():
            if seed is not None:
                seed_all(seed)
            if before is not None:
                with _without(hooks), same_random_numbers(everywhere):
                    self._call(module, before)
                shapes.clear()
            try:
                outputs = [t for t in tensors_of(self._call(module, batch)) if t.is_floating_point()]
            except RuntimeError as error:
                if "BackwardHookFunction" in str(error):
                    raise InPlaceError from error
                raise
            found = [] if hooks is None else self._gradients(module, outputs, replaced)
            made = [(name, one) for name, one in found if len(one) == self._rows]  # others the step refuses
            norms = [squares_of(one).sqrt()[:, None] for _, one in made]
        for p in module.parameters():  # hooks hold the copy in a circle: the collector would find it late
            vars(p).clear()
            p.grad = None
        table = torch.cat(norms, dim=1) if norms else torch.zeros(self._rows, 0, dtype=torch.float64)
        return _Trace(
            [t.detach() for t in outputs], [name for name, _ in made], table, {len(one) for _, one in found}, shapes
        )

    def _gradients(
        self, module: nn.Module, outputs: Sequence[Tensor], replaced: Tensor | None
    ) -> list[tuple[str, Any]]:
        """The rows that would be clipped, by parameter, for slopes at random; a single number, as a loss is, has slope 1."""
        outputs = [t for t in outputs if t.requires_grad]
        generator, slopes = torch.Generator().manual_seed(0), []
        for t in outputs:
            slope = torch.randn(t.shape, generator=generator).to(t) if t.dim() else torch.ones_like(t)
            if replaced is not None and self._has_rows(t):
                slope[replaced.to(t.device)] *= -2
            slopes.append(slope)
        with suppress(Exception), warnings.catch_warnings(action="ignore"):  # of others, as torch's hooks
            torch.autograd.backward(
                outputs, slopes
            )  # some have none in this way, as checkpoints that are entered again
        return [(name, one) for name, p in module.named_parameters() if p.requires_grad for one in passes_of(p)]

    def _with_rows(self, source: Tensor) -> Any:
        """The batch, whose row i is row `source[i]`."""
        dim, rows = self._dim, self._rows

        def changed(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() <= dim or value.shape[dim] != rows or not value.numel():
                return value
            return value.index_select(dim, source.to(value.device))

        return tree_map(changed, self._batch)


def check_collation(
    collate_fn: Callable[[list[Any]], Any], examples: Sequence[Any], call: Call | None, module: nn.Module
) -> None:
    """Raise CrossExampleLeakError if another, longer example changes what the model makes of the others.

    Args:
        collate_fn: makes a batch of a list of examples; its random numbers are the same each time.
        examples: three or more; others are not looked at.
        call: what the program does with module and batch; None if nobody knows, and then the batch itself may not change.
        module: the model, of which copies are called in eval mode, so that nothing is dropped at random.
    """
    if collate_fn is default_collate or len(examples) < 3:
        return

    def collated(examples: list[Any], seed: int) -> Any:
        with same_random_numbers(()):
            seed_all(seed)
            batch = collate_fn(examples)
        return dict(batch) if isinstance(batch, Mapping) else batch

    order = sorted(examples, key=lambda example: sum(t.numel() for t in tensors_of(collated([example], 1))))
    shortest, *others, longest = [*order[: _LIMITS.examples - 1], order[-1]] if len(order) > _LIMITS.examples else order
    for seed in _LIMITS.seeds:
        try:
            with torch.no_grad(), same_random_numbers(tuple(module.parameters())):
                batches = [collated([first, *others], seed) for first in (shortest, longest)]
                one, other = (
                    tensors_of(batch if call is None else call(copy_apart(module).eval(), batch)) for batch in batches
                )
        except Exception as error:  # it does not take the batch in this way
            warnings.warn(
                f"whether collate_fn keeps examples apart cannot be told: the model raised {type(error).__name__}",
                stacklevel=2,
            )
            return
        pairs = [pair for pair in zip(one, other, strict=False) if min(t.dim() for t in pair) > 0]
        changed = call is None and any(a.shape != b.shape for a, b in pairs)
        if changed or not all(_same_but_one(*pair) for pair in pairs):
            raise CrossExampleLeakError(
                "collate_fn makes other rows, or rows of another shape, of all examples when one of them is another, longer one "
                "(padding to the longest of the batch, or mixing), and the model's outputs for them change with it: one example "
                "acts on the gradients of all, and clipping bounds none of that. Pad to a fixed length; or give the model a "
                "mask, or the lengths, so that what was added does not count (a sum or mean over real tokens, sequences packed "
                "in the order of the batch, sorted by length in collate_fn). The loss must leave it out as well"
            )


def _same_but_one(one: Tensor, other: Tensor) -> bool:
    """Whether the rows are the same when one of each is left out, whatever the numbers are that only one of them has."""
    if len(one) != len(other):
        return False
    every = range(len(one))
    lacking = [[*every[:i], *every[i + 1 :]] for i in every]
    return any(
        _alike_where_both_are(one[mine], other[its], torch.ones(len(mine), dtype=torch.bool))
        for mine in lacking
        for its in lacking
    )


def copy_apart(module: nn.Module) -> nn.Module:
    """A copy of `module` with the values of its parameters where they are, and nothing else that both of them have.

    What a call changes in the copy (buffers, counters, generators, what is kept for the next batch) stays as it is in the module.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    for layer in module.modules():
        for value in vars(layer).values():
            if isinstance(value, Tensor):  # which may have a history, and then cannot be copied
                memo[id(value)] = value.detach().clone()
    copied: nn.Module = copy.deepcopy(module, memo)
    remove_sample_hooks(copied)
    return copied


@contextmanager
def _outside_checkpoints() -> Iterator[None]:
    """A checkpoint around the model's call counts what is kept for its backward pass, and functorch takes no hooks for that."""
    top: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
    taken = []
    while (hooks := top(True)) is not None:
        taken.append(hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


@contextmanager
def _without(hooks: Any) -> Iterator[None]:
    if hooks is not None:
        hooks.disable_hooks()
    yield
    if hooks is not None:
        hooks.enable_hooks()


@contextmanager
def same_random_numbers(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context after which the generators of torch (on all devices of `tensors`), NumPy and Python are where they were."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    drawn, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(numpys)


def seed_all(seed: int) -> None:
    """Set the generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def tensors_of(values: Any) -> list[Tensor]:
    """All tensors in `values`, also those of the mappings that Transformers returns; packed sequences have no rows."""
    parts = list(values.values()) if isinstance(values, Mapping) else values
    leaves, _ = tree_flatten(parts, is_leaf=lambda part: isinstance(part, PackedSequence))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def replacements(rows: int, copies: int, shortest: int) -> list[Tensor]:
    """From which row each row comes, each time: every other example is the one after it; and then all are the first, the last
    and the `shortest`. Shape (rows,), whole numbers.

    `copies` rows that follow one another are one example.
    """
    examples = rows // copies
    own = torch.arange(examples)
    following = (own + 1) % examples
    even, odd = (own % 2 == 0) & (own < examples - 1), own % 2 == 1
    sources = [torch.where(replaced, following, own) for replaced in (even, odd)]
    sources += [torch.full_like(own, alone) for alone in sorted({0, examples - 1, shortest})]
    return [(source * copies)[:, None].add(torch.arange(copies)).flatten() for source in sources]


def _shortest(batch: Any, dim: int, rows: int) -> int:
    """The row that has most of its first or its last number, as padded sequences have the more the shorter they are."""
    repeated = torch.zeros(max(rows, 1), dtype=torch.int64)
    for value in tensors_of(batch):
        if value.dim() > dim and value.shape[dim] == rows and value.numel():
            flat = value.movedim(dim, 0).reshape(rows, -1)
            repeated += sum((flat == flat[:, end : end + 1]).sum(1).cpu() for end in (0, flat.shape[1] - 1))
    return int(repeated.argmax())


def _rows_are_all(batch: Any, dim: int, rows: int) -> bool:
    """Whether all that `batch` has is tensors with a row for each example: then some rows of it are a batch as well."""
    return rows > 0 and all(
        value is None
        or (isinstance(value, Tensor) and (value.dim() == 0 or (value.dim() > dim and value.shape[dim] == rows)))
        for value in tree_flatten(batch)[0]
    )


def _turned(batch: Any, dim: int) -> Any:
    """Another batch of as many examples: numbers with the other sign, and tokens in the other order."""

    def turned(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() <= dim:
            return value
        return -value if value.is_floating_point() else value.flip([d for d in range(value.dim()) if d != dim])

    return tree_map(turned, batch)


def _equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


def _changed(one: Tensor, other: Tensor, limit: float) -> Tensor:
    """Which numbers differ by more than `limit` times the largest of their row; shape (rows, numbers)."""
    one, other = (t.double().reshape(len(t), -1) for t in (one, other))
    largest = one.abs().nan_to_num(0, 0, 0).amax(1, keepdim=True) if one.shape[1] else one.new_zeros(len(one), 1)
    return (one - other).abs() > limit * largest


def _outputs_differ(one: _Trace, other: _Trace) -> bool:
    pairs = zip(one.outputs, other.outputs, strict=True)
    return any(bool(_changed(pair[0][None], pair[1][None], _limit_of(pair[0])).any()) for pair in pairs)


def _repeats_itself(one: _Trace, other: _Trace) -> bool:
    """Whether the model made the same of the same batch twice; a warning if not."""
    if one.shapes == other.shapes and not _outputs_differ(one, other):
        return True
    warnings.warn(
        "the model gave another value for the same batch and the same random numbers: it draws numbers of its own, or keeps "
        "something outside of itself. If that is something of the batch, ε does not hold; whether examples reach each other's "
        "rows cannot be told",
        stacklevel=3,
    )
    return False


def _limit_of(values: Tensor) -> float:
    return max(_LIMITS.same_shape, 8 * torch.finfo(values.dtype).eps)


def _spread(one: _Trace, other: _Trace) -> float:
    """By how much gradients of the same batch differ, in parts of the largest of their row; at most 1/32."""
    if one.norms.shape != other.norms.shape or not one.norms.numel():
        return 0.0
    off, largest = (t.abs().amax(1) for t in (one.norms - other.norms, one.norms))
    return min(float((off / largest).nan_to_num(0, 0, 0).max()), 1 / 32)


def _alike_where_both_are(one: Tensor, other: Tensor, own: Tensor) -> bool:
    """Whether the rows in `own` are the same up to rounding, in the numbers that both have from the beginning or from the end."""
    if one.dim() != other.dim():
        return False
    limit = _LIMITS.of_halves if one.dtype.itemsize < 4 else _LIMITS.by_length
    sizes = [min(pair) for pair in zip(one.shape, other.shape, strict=True)]
    fronts = [t[tuple(slice(size) for size in sizes)] for t in (one, other)]
    backs = [t[tuple(slice(n - size, n) for n, size in zip(t.shape, sizes, strict=True))] for t in (one, other)]
    return any(not bool(_changed(a, b, limit)[own.to(one.device)].any()) for a, b in (fronts, backs))
