"""The step of differentially private training: clip and sum, add the round's noise, move the model."""

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from fedcgd.opacus.autograd_check import AutogradCheck
from fedcgd.opacus.clipped_sum import Clipped, PerSampleGradients, check_passes, check_size, clip_factors, passes_of
from fedcgd.opacus.ghost import forget_samples
from fedcgd.opacus.ranks import Ranks
from fedcgd.opacus.release_tracker import PendingStep, ReleaseTracker
from fedcgd.opacus.round_noise import RoundNoise
from fedcgd.opacus.shards import Shards, local, reshard, set_gradient

_FAR_ABOVE = 1000
"""So many times the longest gradient of an example is a clip norm that clips none, and drowns all in its noise."""


class _SetOnce:
    """A number that is set when the optimizer is made, and that Opacus would let one change."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, _owner: type) -> Any:
        return self if optimizer is None else vars(optimizer)[self._name]

    def __set__(self, optimizer: Any, value: float) -> None:
        first = vars(optimizer).setdefault(self._name, value)
        if value != first:
            raise ValueError(f"{self._name} cannot be changed from {first} to {value}: {self._why}")


class CorrelatedOptimizer(DPOptimizer):  # type: ignore[misc]
    """`opacus.optimizers.DPOptimizer` with correlated noise, for one engine's module, loader and plan.

    A step is `pre_step`, which clips, sums and releases, and then a step of the wrapped optimizer. After a part of a batch
    (`BatchMemoryManager`, or the engine's `accumulation_steps`) clipped gradients are only added to the round's sum; after the
    last one the sum is released. An example whose gradient is not finite adds zero. A step that fails abandons the round, and
    Ctrl-C waits for the end of a step: a round is released and moves the model, or neither. Gradients are used up by the step,
    so that any `zero_grad`, or none, will do.
    """

    _step_supports_amp_scaling = True
    """Makes a GradScaler say that it is there, by setting `found_inf`, so that `step` can refuse it."""
    max_grad_norm = _SetOnce(
        "the correlated noise of all rounds is planned for one clip norm. Leave the scheduler out; for another norm make another "
        "plan and another engine",
    )
    """ζ of the plan. It cannot be set."""
    noise_multiplier = _SetOnce(
        "noise is correlated across rounds, and ε is accounted for one multiplier. Leave the scheduler out; for another one make "
        "a plan and another engine",
    )
    """σ of the plan. It cannot be set."""
    expected_batch_size = _SetOnce(
        "it is the number of examples by the steps of an epoch, which are public. For other steps change the learning rate; for "
        "other batches make another loader and another engine",
    )
    """How many examples a round has on average, which divides sums with the loss_reduction "mean". It cannot be set."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        module: nn.Module,
        tracker: ReleaseTracker,
        noise: RoundNoise,
        expected_batch_size: float,
        loss_reduction: str,
        copies: int = 1,
        expanded: nn.Module | None = None,
        ranks: Ranks | None = None,
        shards: Shards | None = None,
    ) -> None:
        """Wrap `optimizer`.

        Args:
            optimizer: moves the parameters, once a round is released.
            module: the model itself.
            tracker: of the run's releases.
            noise: of the run's rounds.
            expected_batch_size: what a sum is divided by, with the loss_reduction "mean".
            loss_reduction: "mean" or "sum", as in Opacus.
            copies: of how many rows that follow one another an example's gradient is the mean.
            expanded: what makes the weights of the model expanded ones, if anything does.
            ranks: the processes whose sums are released as one, if there are several.
            shards: of a model whose parameters are spread over the ranks.
        """
        self._tracker, self._noise, self._module, self._ranks, self._shards = tracker, noise, module, ranks, shards
        self._released = False
        plan = tracker.plan
        super().__init__(
            optimizer,
            noise_multiplier=plan.noise_multiplier,
            max_grad_norm=plan.clip_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
        )
        self._kept = [*self._grouped(), *module.parameters()]  # while they are, no other parameter has their id
        self._known = self._parameters()
        self._copies = copies
        self._trained = [p for p in self._grouped() if p.requires_grad]
        self._autograd: AutogradCheck | None = AutogradCheck(module, self._trained, loss_reduction == "mean")
        """Until it has compared something."""
        self._sizes = [local(p).numel() for p in self._trained]
        """How many numbers of each trained parameter are here."""
        self._sum = torch.empty(0, dtype=torch.float64)
        """One for all rounds, where the parameters are: a fresh one costs as much as the additions to it."""
        self._earlier = self._sum
        """Another one, for rounds whose batches come in parts."""
        self._rows = _SameRows()
        # Weakly: Python does not find a circle through a tensor's hooks, and would keep the model for ever.
        forget = partial(_forget_raw_gradient, WeakMethod(self._autograd.keep))
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._only_after_a_release),
            *(
                whole.register_post_accumulate_grad_hook(partial(forget, p))
                for p, whole in zip(
                    self._trained, self._trained if shards is None else shards.whole_parameters(), strict=True
                )
            ),
        ]
        """Of all that is attached to the model and to the wrapped optimizer."""
        if expanded is not None:
            self.handles.append(expanded.register_forward_pre_hook(self._rows.check, with_kwargs=True))
        tracker.listener = self

    def signal_skip_step(self, do_skip: bool = True) -> None:
        self._tracker.pending.skips.append(do_skip)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Forget gradients that no step has used. What earlier parts of the batch added to the round's sum stays."""
        for p in self._trained:
            p.grad_sample = None
        if self._autograd is not None:
            self._autograd.forget()
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self._refuse_grad_scaler()
        if closure is not None:
            with torch.enable_grad():
                closure()
        with _defer_sigint():
            if not self.pre_step():
                return None
            self._released = True
            try:
                return self.original_optimizer.step()  # type: ignore[no-any-return]
            finally:
                self._released = False

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Clip and add to the round's sum; if the batch is complete, release it into `grad` and return True."""
        try:
            # With shards the others may wait elsewhere than in `agree`, and miss this rank when it ends.
            with nullcontext() if self._ranks is None or self._shards is not None else self._ranks.telling_failures():
                pending = self._tracker.pending
                self._clip_and_sum(pending)
                skipped = bool(pending.skips) and pending.skips.pop(0)
                if skipped or pending.microbatches_left:
                    return False
                step = self._tracker.complete()
                check_size(step.examples, step.length)
                check_size(step.whole, 1)
            self._release(step)
        except BaseException:
            self._tracker.abandon()
            raise
        if self.step_hook:
            self.step_hook(self)
        return True

    def _clip_and_sum(self, pending: PendingStep) -> None:
        """Use up the gradients of the backward passes since the last step."""
        last = not pending.microbatches_left
        if self._shards is not None:
            if pending.skips:
                raise RuntimeError(
                    "BatchMemoryManager gives the processes different numbers of batches, and those of a model in fully_shard "
                    "make each pass together: give make_private accumulation_steps"
                )
            if last:  # layers may stay whole until then (`set_reshard_after_backward`), and have no parameters of ours meanwhile
                reshard(self._module)
        if last or self._shards is None:
            self._check_parameters()
        passes = self._take_passes(pending)
        totals = torch.split(self._sum_of(pending), self._sizes)
        scale = totals[0].new_zeros(())
        clipped: list[Clipped] = []
        for rows in zip(*passes, strict=True):
            averaged = check_passes(self._module, self._trained, rows, self._copies)
            pending.clipped += averaged[0].examples
            pending.length = max([pending.length, *[row.length for row in averaged]])
            if pending.clipped <= pending.examples:  # else `complete` will raise
                norms, factors, usable = clip_factors(averaged, self._tracker.plan.clip_norm)
                clipped.append(Clipped(averaged, factors, usable))
                if last and self._noise.lattice is None:
                    self._compare_norms(norms)
                if self._autograd is not None:
                    scale += norms.nan_to_num(0.0, 0.0).sum() / (
                        max(len(norms), 1) if self.loss_reduction == "mean" else 1
                    )
        if self._shards is None:
            for i, total in enumerate(totals):
                for one in clipped:
                    one.add_to(total, i)
        else:
            self._shards.add(clipped, pending.kept, totals, self._noise.round_to_lattice, last=last)
        if self._autograd is not None:
            self._autograd.compare(passes, scale)
            if self._autograd.done:
                self._autograd = None

    def _compare_norms(self, norms: Tensor) -> None:
        """Warn if the clip norm is far above the norms, in the first round of a run without noise: else it would tell of them."""
        plan = self._tracker.plan
        if self._tracker.released or not len(norms):
            return
        if 0 < (longest := float(norms.nan_to_num(0.0, 0.0).max())) < plan.clip_norm / _FAR_ABOVE:
            warnings.warn(
                f"max_grad_norm is {plan.clip_norm:g}, and the longest gradient of the first examples is {longest:.3g}: noise "
                "follows max_grad_norm, and in a private run nothing of the gradients would be left. Take one near their norms, "
                "such as 1",
                stacklevel=5,
            )

    def _release(self, step: PendingStep) -> None:
        """Make the round's sum, with its noise and divided by the batch size, the `grad` of the parameters."""
        total = self._sum_of(step)
        if step.earlier is not None:
            self._noise.round_to_lattice(total)
            total += step.earlier
        self._tracker.record(self._add_noise(total, step))
        if self.loss_reduction == "mean":
            total /= self.expected_batch_size
        for group in self.original_optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        for p, part in zip(self._trained, torch.split(total, self._sizes), strict=True):
            if self._shards is None:
                p.grad = part.view_as(p).to(p.dtype, copy=True)
            else:
                set_gradient(p, part)

    def _add_noise(self, total: Tensor, step: PendingStep) -> int:
        """Make `total` the round's sum with its noise, of all ranks; its nonce."""
        run, nonces = self._tracker.run, self._tracker.nonces
        if self._ranks is None:
            return self._noise.add(total, run, nonces)
        # Of a model that is spread over the ranks each has another part: there is nothing to compare.
        own = None if self._shards else [_sum_of_bits(p) for p in self._trained]
        model = {"the model, as it was after the last step": own}
        return self._noise.add_together(total, run, nonces, facts=model, examples=step.examples, whole=step.whole)

    def _take_passes(self, pending: PendingStep) -> list[list[PerSampleGradients]]:
        """For each trained parameter its per-sample gradients, one entry for each backward pass. They are forgotten with this."""
        self._rows.count = None
        passes, half = [], []
        for p in self._trained:
            passes.append(passes_of(p))
            if getattr(p, "_forward_counter", 0):  # there is none with expanded weights
                half.append(p)
            p.grad_sample = None
        if self._shards is not None and not any(passes):
            raise RuntimeError(
                "there are no gradients of a part of the batch, and the processes of a model in fully_shard make each pass "
                "together: put a part without examples through a forward and a backward pass too. "
                + _why_there_are_none(self._module, half, any(passes))
            )
        counts = [*map(len, passes)]
        if min(counts) != max(counts) or (not passes[0] and pending.clipped < pending.examples):
            raise RuntimeError(
                "there are no gradients of examples for "
                + ("any" if not any(passes) else "some")
                + " of the parameters. "
                + _why_there_are_none(self._module, half, any(passes))
            )
        return passes

    def _sum_of(self, pending: PendingStep) -> Tensor:
        """The sum of the part of a batch that is under way, zeros at first."""
        if pending.total is None:
            device = self._trained[0].device
            if not len(self._sum) or self._sum.device != device:  # the module may be moved after make_private
                self._sum = torch.empty(sum(self._sizes), dtype=torch.float64, device=device)
            pending.total = self._sum.zero_()
        return pending.total

    def on_batch(self) -> None:
        """Remove what an interrupted forward or backward pass has left in the module, as if it had never begun."""
        if self._autograd is not None:
            self._autograd.forget()
        self._rows.count = None
        if self._shards is not None:
            reshard(self._module)
        for module in self._module.modules():
            for name in ("activations", "max_batch_len"):
                if name in module.__dict__:
                    delattr(module, name)
        for p in self._trained:
            p.grad = None
            forget_samples(p)

    def on_microbatch(self) -> None:
        """Clip and add what backward passes have left, if they have, before another part of the round's batch.

        The sum of a part is rounded to the lattice, so that those of all parts have the same bits in any order, and on as many
        processes as there may be.
        """
        pending = self._tracker.pending
        if any(passes_of(p) for p in self._trained):
            self._clip_and_sum(pending)
        if self._shards is not None:
            return  # which have rounded it
        part, pending.total = self._sum_of(pending), None
        self._noise.round_to_lattice(part)
        if pending.earlier is None:
            pending.earlier, self._sum, self._earlier = part, self._earlier, part
        else:
            pending.earlier += part

    def detach(self) -> None:
        """Leave the model and the wrapped optimizer to others; this one makes no more steps."""
        for handle in self.handles:
            handle.remove()
        self._tracker.end()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "the private optimizer cannot be copied or pickled: two copies would release the round under way twice. Use the "
            "engine's save_checkpoint, or state_dict; copy the module alone, and make another engine for another run"
        )

    def _grouped(self) -> list[Any]:
        return [p for group in self.original_optimizer.param_groups for p in group["params"]]

    def _parameters(self) -> list[tuple[int, torch.dtype, bool]]:
        """Which parameters there are, in the optimizer and in the module, of which type, and which of them move."""
        groups = [*self.original_optimizer.param_groups, {"params": self._module.parameters()}]
        return [(id(p), p.dtype, p.requires_grad) for group in groups for p in group["params"]]

    def _check_parameters(self) -> None:
        if self._known != self._parameters():
            raise RuntimeError(
                "the parameters of the module or of the optimizer are not those that were made private (frozen, unfrozen, "
                "replaced, added or of another dtype since): the clip norm would not cover what moves. Prepare them before "
                "make_private; for a later phase of training make another engine"
            )

    def _only_after_a_release(self, *_: Any) -> None:
        if not self._released:
            raise RuntimeError(
                "the optimizer that was made private cannot step by itself: its gradients are not clipped and have no noise; "
                "call step of the optimizer that the engine returned"
            )

    def _refuse_grad_scaler(self) -> None:
        if self.__dict__.pop("found_inf", None) is not None:
            self._tracker.abandon()
            raise RuntimeError(
                "GradScaler multiplies the losses, and with them the gradients of examples before they are clipped: all would be "
                "cut to the clip norm, and its search for overflows sees none of them. Use autocast with bfloat16, which needs "
                "no GradScaler, and loss.backward() and optimizer.step() as usual"
            )


class _SameRows:
    """With expanded weights: of how many rows the forward passes since the last step were, which add all their gradients up."""

    count: int | None = None

    def check(self, _module: nn.Module, inputs: tuple[Any, ...], by_keyword: dict[str, Any]) -> None:
        """A pre-hook: raises for another number of rows, which would be added to rows of other examples (one row to all)."""
        if not torch.is_grad_enabled():
            return
        rows = next(len(t) for t in (*inputs, *by_keyword.values()) if isinstance(t, Tensor))
        if self.count not in (None, rows):
            raise RuntimeError(
                f"a forward pass of {rows} rows after one of {self.count} since the last step: grad_sample_mode 'ew' adds up the "
                "gradients of all of them, row by row. Use grad_sample_mode 'hooks', or rows of the same examples in each pass"
            )
        self.count = rows


@contextmanager
def _defer_sigint() -> Iterator[None]:
    """Let Ctrl-C wait until this is left; signals reach the main thread alone, and its handler is called then."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)


def _sum_of_bits(values: Tensor) -> int:
    """The same on every device, and, but for a coincidence, for no other model."""
    words = torch.int32 if values.element_size() % 4 == 0 else torch.int16
    return int(values.detach().reshape(-1).view(words).sum(dtype=torch.int64))


def _why_there_are_none(module: nn.Module, half: list[Any], some: bool) -> str:
    """`half`: the parameters that a forward pass has used and no backward pass; `some` others have gradients."""
    if not module.training:
        return (
            "The module is in eval mode, in which none are made: call module.train() before training; to leave out dropout, or "
            "to keep a frozen layer as it is, call eval() of that layer"
        )
    if half:
        name = next(name for name, p in module.named_parameters() if p is half[0])
        left_out = f"If the loss leaves out what {name!r} gives, add 0 * the sum of that to the loss. " if some else ""
        return left_out + (
            "A forward pass has had no backward pass, as it is after an error (out of memory) or an evaluation that makes "
            "gradients: enter the loop over the loader again, which issues the same batch afresh; evaluate under torch.no_grad()"
        )
    return (
        "Each must be used in the forward pass of the module that the engine returned, in train mode, with one backward pass "
        "for each forward pass, and zero_grad not between backward and step. Freeze parameters that are not used, before "
        "make_private; a trained layer that is in eval mode makes none"
    )


def _forget_raw_gradient(keep: Callable[[], Callable[[Any, Tensor], None] | None], p: Any, whole: Any) -> None:
    """After a backward pass: whatever optimizer takes the sum of the unclipped gradients finds zero, while `p` is private.

    `whole` is what was used in the place of `p`, if that is a shard; then FSDP is to find nothing.
    """
    if hasattr(p, "grad_sample") and whole.grad is not None:
        if (kept := keep()) is not None:
            kept(p, whole.grad)
        if whole is p:
            p.grad.zero_()
        else:
            whole.grad = None
