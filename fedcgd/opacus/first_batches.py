"""The looks at the batches of a run: the first one and later ones, before they are trained on."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from opacus.layers import DPMultiheadAttention
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from fedcgd.opacus.batches import RoundLoader
from fedcgd.opacus.collation import PROBED, as_called, check_collation, rows_are_mixed
from fedcgd.opacus.independence import RECURRENT, BatchLook
from fedcgd.opacus.probing import CrossExampleLeakError, same_random_numbers, tensors_of
from fedcgd.opacus.release_tracker import ReleaseTracker

_AGAIN = 10


class FirstBatches:
    """Looks at the 1st, 10th, 100th, … batch in which something can be seen, as `check_independence` does, when it is used.

    What is found is an error, unless the run's author has answered for it (`ReleaseTracker.assumed_independent`).
    """

    def __init__(
        self,
        module: nn.Module,
        tracker: ReleaseTracker,
        loader: RoundLoader,
        *,
        batch_dim: int,
        copies: int,
        hooks: Any,
        active: bool = True,
    ) -> None:
        """`hooks` are what makes the gradients of examples; `loader` a `RoundLoader`, whose `collate_fn` keeps a batch.

        Unless it is `active`, nothing is looked at but recurrent layers and fixed statistics.
        """
        self._module, self._tracker, self._loader = module, tracker, loader
        self._dim, self._copies, self._hooks = batch_dim, copies, hooks
        self._batches, self._next = 0, 1
        self._collation_seen = False
        self._active = active

    def watch(self, called: nn.Module) -> list[Any]:
        """Look when `called` (the module, or a wrapper around it) is called, until the handles are removed."""
        return [
            called.register_forward_pre_hook(self._before, with_kwargs=True),
            *(
                layer.register_forward_pre_hook(_refuse_reordered)
                for layer in self._module.modules()
                if isinstance(layer, RECURRENT)
            ),
            *(
                layer.register_forward_pre_hook(_refuse_no_rows, with_kwargs=True)
                for layer in self._module.modules()
                if isinstance(layer, DPMultiheadAttention)
            ),
            *(
                layer.register_forward_pre_hook(_refuse_batch_statistics)
                for layer in self._module.modules()
                if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
            ),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"_active": False, "_tracker": None}  # a copy of the model is no loader's

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else all looks are compiled, for many times the time of the steps
    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._tracker is None or not torch.is_grad_enabled() or not self._tracker.issued():
            return
        _refuse_outside_parameters((args, kwargs))
        if not self._module.training or not self._active or BatchLook.under_way:
            return
        self._batches += 1
        try:
            if kwargs:
                _refuse_count_of_batch(kwargs)
            if self._batches >= self._next and _trains(self._module) and getattr(self._hooks, "hooks_enabled", True):
                self._look((args, kwargs))
        except CrossExampleLeakError as found:
            if self._tracker.assumed_independent is None:
                raise CrossExampleLeakError(
                    f"{found}. If this is no leak, say why in make_private(assume_independent=…), which is recorded with the run"
                ) from found
            warnings.warn(f"assumed to be no leak ({self._tracker.assumed_independent}): {found}", stacklevel=2)

    def _look(self, given: Any) -> None:
        if not self._collation_seen:
            self._collation_seen = True
            self._look_at_collation(given)
        tensors = [t for t in tensors_of(given) if t.dim() > self._dim]
        sizes = [t.shape[self._dim] for t in tensors]
        out = self._tracker.issued() * self._copies  # the first tensor may be no batch
        rows = out if out in sizes else max(sizes[:1], default=0)
        if rows < 1:
            self._batches -= 1
            return
        look = BatchLook(self._module, self._call, given, rows, self._dim, self._copies, self._hooks)
        if rows > self._copies and not look.tells_forward and self._next > 1:
            return
        look.check()
        if self._tracker.listener is not None:
            self._tracker.listener.on_look()
        if rows == self._copies or look.tells_forward:
            self._next *= _AGAIN

    def _call(self, given: Any) -> Any:
        args, kwargs = given
        return self._module(*args, **kwargs)

    def _look_at_collation(self, given: Any) -> None:
        batch, collate = self._loader.collate_fn.take_latest(), self._loader.collate_fn.wrapped_collator_fn
        if batch is None or self._dim != 0:
            return
        if rows_are_mixed(given, batch):
            raise CrossExampleLeakError(
                "the rows that the model is given are each a mixture of two rows of the loader's batch (mixup): an example is in "
                "two gradients, each clipped by itself, and ε counts one. Leave the mixing out"
            )
        arguments = as_called(given, batch)
        dataset: Any = self._loader.dataset
        with same_random_numbers(()):
            examples = [dataset[i] for i in range(0, len(dataset), -(-len(dataset) // PROBED))]
        examples = [rows[0] for rows in examples] if self._copies > 1 else examples
        call = None if arguments is None else lambda other: self._call(arguments(other))
        if hasattr(self._hooks, "disable_hooks"):
            self._hooks.disable_hooks()
        try:
            check_collation(collate, examples, call, self._module)
        finally:
            if hasattr(self._hooks, "disable_hooks"):
                self._hooks.enable_hooks()


def _refuse_outside_parameters(given: Any) -> None:
    """Raise RuntimeError if what the model is given for a round's batch leads back to parameters of others.

    A backward pass would leave there the sum of the examples' gradients, unclipped and without noise. What is no `nn.Parameter`
    (an input that is attacked) may need gradients, and so may parameters that are private, of this model or of another one.
    Between a step and the next batch a generator may be trained through the model: it has no example in hand.
    """
    needing = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad]
    for leaf in _leaves(needing) if needing else ():
        if isinstance(leaf, nn.Parameter) and not hasattr(leaf, "grad_sample"):
            raise RuntimeError(
                f"the input of the private module is made with a parameter outside of it, of shape {tuple(leaf.shape)}, and it "
                "needs gradients: these would be plain sums over the batch, not clipped and without noise. Put all that is "
                "trained into one module, and give that to make_private; or freeze what stands before it "
                "(requires_grad_(False)), or call it under torch.no_grad(). The generator of a GAN is trained after the step of "
                "the private discriminator, before the next batch is taken; until then give the discriminator fake.detach()"
            )


def _leaves(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors without history that `tensors` were made with, as autograd has it."""
    yield from (t for t in tensors if t.grad_fn is None)
    left = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if hasattr(node, "variable"):  # of AccumulateGrad
            yield node.variable
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                left.append(before)


def _trains(module: nn.Module) -> bool:
    """Whether a forward pass of `module` is one whose gradients are clipped."""
    return module.training and torch.is_grad_enabled() and any(hasattr(p, "grad_sample") for p in module.parameters())


def _refuse_count_of_batch(by_keyword: dict[str, Any]) -> None:
    """Raise for a loss inside the model that is divided by what Transformers' Trainer counted in all examples together."""
    if by_keyword.get("num_items_in_batch") is not None and by_keyword.get("labels") is not None:
        raise CrossExampleLeakError(
            "the model's loss is divided by num_items_in_batch, the tokens of all examples of the batch: a longer example makes "
            "the gradients of the others smaller, before they are clipped. Give the Trainer "
            "compute_loss_func=fedcgd.opacus.sequence_loss, or another mean of one loss per example"
        )


def _refuse_reordered(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    order = inputs[0].sorted_indices if inputs and isinstance(inputs[0], PackedSequence) and _trains(layer) else None
    if order is not None and not torch.equal(order, torch.arange(len(order), device=order.device)):
        raise RuntimeError(
            f"{type(layer).__name__} was given sequences packed in another order than the batch's (enforce_sorted=False): its "
            "gradients would be clipped with those of other examples in other layers. Sort the batch by length, longest first, "
            "before the model (in collate_fn, with the targets), and pack with enforce_sorted=True; or leave it padded"
        )


def _refuse_no_rows(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(t.numel() == 0 for t in tensors_of((args, kwargs))):
        raise RuntimeError(
            f"{type(layer).__name__} cannot take a batch of no rows: call optimizer.step() alone where the loader gives one, "
            "which Poisson sampling does at times"
        )


def _refuse_batch_statistics(layer: nn.Module, _inputs: Any) -> None:
    if layer.training and torch.is_grad_enabled():
        raise RuntimeError(
            f"a {type(layer).__name__} was made private in eval mode, with fixed statistics, and is in train mode now, where it "
            "takes those of the batch: call its eval() after each train() of the module, or override train() of the module"
        )
