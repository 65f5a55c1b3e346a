"""The step of differentially private training: clip and sum, add the round's noise, move the model."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedcgd.opacus.autograd_check import AutogradCheck
from fedcgd.opacus.clipped_sum import Rows as GradientRows
from fedcgd.opacus.clipped_sum import add_clipped, check_passes, passes_of
from fedcgd.opacus.ghost import forget_samples
from fedcgd.opacus.rounds import PendingRound, PrivateRun, Rounds, StepError
from fedcgd.participation.samplings import Rows

_PLANNED = ("max_grad_norm", "noise_multiplier", "expected_batch_size")


class CorrelatedOptimizer(DPOptimizer):  # type: ignore[misc]
    """`opacus.optimizers.DPOptimizer` with correlated noise, for one engine's module, loader and plan.

    A step is `pre_step`, which clips, sums and releases, and then a step of the wrapped optimizer. After a part of a batch
    (`BatchMemoryManager`, or the engine's `accumulation_steps`) clipped gradients are only added to the round's sum; after the
    last one the sum is released. An example whose gradient is not finite adds zero. A step that fails abandons the round, and
    Ctrl-C waits for the end of a step: a round is released and moves the model, or neither. Gradients are used up by the step,
    so that any `zero_grad`, or none, will do.

    Args:
        run: what is trained, and how.
        rounds: of the run.
    """

    _step_supports_amp_scaling = True
    """Makes a GradScaler say that it is there, by setting `found_inf`, so that `step` can refuse it."""

    def __init__(self, run: PrivateRun, rounds: Rounds) -> None:
        self._run, self._rounds, self._module, self._ranks = run, rounds, run.module, run.ranks
        self._released = False
        super().__init__(
            run.optimizer,
            noise_multiplier=run.plan.noise_multiplier,
            max_grad_norm=run.plan.clip_norm,
            expected_batch_size=run.epoch.examples / run.epoch.steps,
            loss_reduction=run.gradients.loss_reduction,
        )
        self._trained: list[Any] = run.trained
        self._kept = [*run.trained, *run.module.parameters()]  # while they are, no other parameter has their id
        self._known = self._parameters()
        self._autograd: AutogradCheck | None = AutogradCheck(run.module, self._trained, self.loss_reduction == "mean")
        """Until it has compared something."""
        self._sizes = [p.numel() for p in self._trained]
        # Weakly: Python does not find a circle through a tensor's hooks, and would keep the model for ever.
        forget = partial(_forget_raw_gradient, WeakMethod(self._autograd.keep))
        self.handles: list[RemovableHandle] = [
            run.optimizer.register_step_pre_hook(self._only_after_a_release),
            *(p.register_post_accumulate_grad_hook(forget) for p in self._trained),  # type: ignore[no-untyped-call]
        ]
        """Of all that is attached to the model and to the wrapped optimizer."""
        rounds.listener = self

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PLANNED and vars(self).get(name, value) != value:
            raise ValueError(
                f"{name} cannot be changed from {vars(self)[name]} to {value}: noise and clip norm are the plan's, for all "
                "rounds, and the batch size is what all examples and rounds make it. Leave schedulers out; for others make "
                "another plan and another engine"
            )
        super().__setattr__(name, value)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        self._rounds.pending.skips.append(do_skip)

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
            with nullcontext() if self._ranks is None else self._ranks.telling_failures():
                pending = self._rounds.pending
                self._clip_and_sum(pending)
                skipped = bool(pending.skips) and pending.skips.pop(0)
                self._is_last_step_skipped = skipped or pending.parts_left > 0  # programs ask for it, by Opacus' name
                if self._is_last_step_skipped:
                    return False
                ended = self._rounds.complete()
                assert ended.total is not None  # noqa: S101
            if not self._release(ended.total, ended.rows):
                return False
        except BaseException:
            self._rounds.abandon()
            raise
        if self.step_hook:
            self.step_hook(self)
        return True

    def _clip_and_sum(self, pending: PendingRound) -> None:
        """Use up the gradients of the backward passes since the last step."""
        self._check_parameters()
        passes, releases = self._take_passes(pending), self._rounds.releases
        if pending.total is None:
            pending.total = releases.zeros(self._trained[0].device)
        totals = torch.split(pending.total, self._sizes)
        for rows in zip(*passes, strict=True):
            averaged = check_passes(self._module, self._trained, rows, self._run.gradients.copies)
            pending.clipped += len(averaged[0])
            if pending.clipped <= pending.examples:  # else `complete` will raise
                add_clipped(totals, averaged, self._run.plan.clip_norm, releases.grid)
        if self._autograd is not None:
            self._autograd.compare(passes)
            if self._autograd.done:
                self._autograd = None

    def _release(self, total: Tensor, rows: Rows) -> bool:
        """Make the round's sum, with its noise and divided by the batch size, the `grad` of the parameters."""
        if self._ranks is not None:
            releases = self._rounds.releases
            self._ranks.agree({
                "which rounds are released": (releases.run, releases.count, releases.nonces[-1:], self._rounds.next),
                "the number of its examples": len(rows),
            })  # fmt: skip
        noised = self._rounds.release(total, rows)
        if noised is None:
            return False
        mean = noised.double()
        mean *= self._rounds.releases.step / (self.expected_batch_size if self.loss_reduction == "mean" else 1.0)
        for group in self.original_optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        for p, part in zip(self._trained, torch.split(mean, self._sizes), strict=True):
            p.grad = part.view_as(p).to(p.dtype)
        return True

    def _take_passes(self, pending: PendingRound) -> list[list[GradientRows]]:
        """For each trained parameter its per-sample gradients, one entry for each backward pass. They are forgotten with this."""
        passes = [*map(passes_of, self._trained)]
        for p in self._trained:
            p.grad_sample = None
        counts = [*map(len, passes)]
        if min(counts) != max(counts) or (not counts[0] and pending.clipped < pending.examples):
            half = [p for p in self._trained if p._forward_counter]
            raise StepError("no gradients", _why_there_are_none(self._module, half, any(passes)))
        return passes

    def on_batch(self) -> None:
        """Remove what an interrupted forward or backward pass has left in the module, as if it had never begun."""
        if self._autograd is not None:
            self._autograd.forget()
        for module in self._module.modules():
            for name in ("activations", "max_batch_len"):
                vars(module).pop(name, None)
        for p in self._trained:
            p.grad = None
            forget_samples(p)

    def on_part(self) -> None:
        """Clip and add what backward passes have left, if they have, before another part of the round's batch."""
        if any(passes_of(p) for p in self._trained):
            self._clip_and_sum(self._rounds.pending)

    __getstate__ = Rounds.__getstate__

    def _parameters(self) -> list[tuple[int, torch.dtype, bool]]:
        """Which parameters there are, in the optimizer and in the module, of which type, and which of them move."""
        groups = [*self.original_optimizer.param_groups, {"params": self._module.parameters()}]
        return [(id(p), p.dtype, p.requires_grad) for group in groups for p in group["params"]]

    def _check_parameters(self) -> None:
        if self._known != self._parameters():
            raise StepError(
                "parameters",
                "the parameters of the module or of the optimizer are not those that were made private (frozen, unfrozen, "
                "replaced, added or of another dtype since): the clip norm would not cover what moves. Prepare them before "
                "make_private; for a later phase of training make another engine",
            )

    def _only_after_a_release(self, *_: Any) -> None:
        if not self._released:
            raise StepError(
                "wrapped optimizer",
                "the optimizer that was made private cannot step by itself: its gradients are not clipped and have no noise; "
                "call step of the optimizer that the engine returned",
            )

    def _refuse_grad_scaler(self) -> None:
        if self.__dict__.pop("found_inf", None) is not None:
            self._rounds.abandon()
            raise StepError(
                "GradScaler",
                "GradScaler multiplies the losses, and with them the gradients of examples before they are clipped: all would be "
                "cut to the clip norm, and its search for overflows sees none of them. Use autocast with bfloat16, which needs "
                "no GradScaler, and loss.backward() and optimizer.step() as usual",
            )


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


def _why_there_are_none(module: nn.Module, half: list[Any], some: bool) -> str:
    """`half`: the parameters that a forward pass has used and no backward pass; `some` others have gradients."""
    if not module.training:
        why = (
            "The module is in eval mode, in which none are made: call module.train() before training; to leave out dropout, or "
            "to keep a frozen layer as it is, call eval() of that layer"
        )
    elif half:
        name = next(name for name, p in module.named_parameters() if p is half[0])
        why = (f"If the loss leaves out what {name!r} gives, add 0 * the sum of that to the loss. " if some else "") + (
            "A forward pass has had no backward pass, as it is after an error (out of memory) or an evaluation that makes "
            "gradients: enter the loop over the loader again, which issues the same batch afresh; evaluate under torch.no_grad()"
        )
    else:
        why = (
            "Each must be used in the forward pass of the module that the engine returned, in train mode, with one backward pass "
            "for each forward pass, and zero_grad not between backward and step. Freeze parameters that are not used, before "
            "make_private; a trained layer that is in eval mode makes none"
        )
    return f"there are no gradients of examples for {'some' if some else 'any'} of the parameters. {why}"


def _forget_raw_gradient(keep: Callable[[], Callable[[Any, Tensor], None] | None], p: Any) -> None:
    """After a backward pass: whatever optimizer takes the sum of the unclipped gradients finds zero, while `p` is private."""
    if hasattr(p, "grad_sample") and p.grad is not None:
        if (kept := keep()) is not None:
            kept(p, p.grad)
        p.grad.zero_()
