"""`opacus.optimizers.DPOptimizer` that releases rounds: clips, adds row t of C⁻¹Z to the sum of step t, and moves the model."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn, optim

from fedcgd.keys import NoiseKey
from fedcgd.noise.quantisation import Grid
from fedcgd.noise.source import NoiseMode, NoiseSource, tensor_source
from fedcgd.noise.tensors import fingerprint
from fedcgd.opacus.agreement import disagreeing
from fedcgd.opacus.clipping import GRID_LOSS, Dense, Rows, add_clipped, check_size
from fedcgd.opacus.rounds import Rounds
from fedcgd.plan import Plan


class RoundNoise:
    """The noise of a plan's rounds for `size` parameters, on the grid, wherever the sums are."""

    def __init__(self, plan: Plan, key: NoiseKey, size: int, mode: NoiseMode | None) -> None:
        rounds = plan.participation.rounds
        largest = float(np.abs(plan.mechanism.inverse_row(rounds - 1, rounds)).sum())
        # `Grid.fitting` loses at most 2⁻¹⁰ of the norm that it is given.
        self.grid = Grid.fitting(
            clip_norm=plan.clip_norm * GRID_LOSS * 2**10, size=size, stddev=plan.stddev * max(1.0, largest)
        )
        self._plan, self._key, self._mode = plan, key, mode
        self._run = ""
        self._source = self._source_of("")

    def add(self, total: Tensor, run: str, nonces: Sequence[int]) -> int:
        """total = (total on the grid + ζσ·(C⁻¹Z)_t), in place, for t = len(`nonces`), those of earlier rounds; returns its nonce.

        `total` is float64, shape (size,). The nonce of a secret key is bound to it: two different sums never share their noise,
        whatever is copied. The noise is the same on every device.
        """
        if run != self._run:
            self._source, self._run = self._source_of(run), run
        total.div_(self.grid.step).round_()
        known_by = fingerprint(total, self._key.noise_of(run))
        nonce = self._key.nonce_of(run, known_by, earlier=nonces, attempt=0)
        self._source.add(total, [*nonces, nonce], self._plan.stddev)
        total.mul_(self.grid.step)
        return nonce

    def _source_of(self, run: str) -> NoiseSource:
        return tensor_source(self._plan, self._key, run, self.grid, self._mode)


class CorrelatedOptimizer(DPOptimizer):  # type: ignore[misc]
    """`opacus.optimizers.DPOptimizer` with correlated noise, for one engine's module, loader and plan.

    A step after a part of a batch (`BatchMemoryManager`, or the engine's `accumulation_steps`) adds its clipped gradients to the
    round's sum; the last one releases the sum. An example whose gradient is not finite adds zero. A step that fails abandons the
    round, and Ctrl-C waits for the end of a step: a round is released and moves the model, or neither. Gradients are used up by
    the step, so that any `zero_grad`, or none, will do.
    """

    _step_supports_amp_scaling = True
    """Makes a GradScaler say that it is there, by setting `found_inf`, so that `step` can refuse it."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        module: nn.Module,
        rounds: Rounds,
        noise: RoundNoise,
        expected_batch_size: float,
        loss_reduction: str,
        expanded: nn.Module | None = None,
    ) -> None:
        """`module` is the model itself; `expanded` is what makes its weights expanded ones, if anything does."""
        self._rounds = rounds
        self._noise = noise
        self._module = module
        self._released = False
        plan = rounds.plan
        super().__init__(
            optimizer,
            noise_multiplier=plan.noise_multiplier,
            max_grad_norm=plan.clip_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
        )
        self._kept = [*self._grouped(), *module.parameters()]  # while they are, no other parameter has their id
        self._known = self._parameters()
        self._moving = [p for p in self._grouped() if p.requires_grad]
        self._sum = torch.empty(0, dtype=torch.float64)
        """One for all rounds, where the parameters are: a fresh one costs as much as the additions to it."""
        # Weakly: Python does not find a circle through a tensor's hooks, and would keep the model for ever.
        forget = partial(_forget_raw_gradient, WeakMethod(self._keep_raw_gradient))
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._only_after_a_release),
            *(p.register_post_accumulate_grad_hook(forget) for p in self._moving),
        ]
        if expanded is not None:
            self._handles.append(expanded.register_forward_pre_hook(self._check_rows, with_kwargs=True))
        self._whole: dict[Any, list[Tensor]] = {}
        """Until some were compared: autograd's own gradients, of each backward pass since the last step."""
        self._compared = False
        self._rows: int | None = None
        """With expanded weights: of how many rows the forward passes since the last step were."""
        self._before: dict[str, tuple[int, int | None]] = {}
        rounds.on_hand_out, rounds.on_more = self._begin, self._absorb

    @property
    def max_grad_norm(self) -> float:
        """ζ of the plan. It cannot be set."""
        return self._rounds.plan.clip_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if value != self.max_grad_norm:
            raise ValueError(
                f"max_grad_norm cannot be changed from {self.max_grad_norm} to {value}: the correlated noise of all rounds is "
                "planned for one clip norm. Leave the scheduler out; for another norm make another plan and another engine"
            )

    @property
    def noise_multiplier(self) -> float:
        """σ of the plan. It cannot be set."""
        return self._rounds.plan.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        if value != self.noise_multiplier:
            raise ValueError(
                f"noise_multiplier cannot be changed from {self.noise_multiplier} to {value}: noise is correlated across rounds, "
                "and ε is accounted for one multiplier. Leave the scheduler out; for another one make a plan and another engine"
            )

    def signal_skip_step(self, do_skip: bool = True) -> None:
        self._rounds.flight.skips.append(do_skip)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Forget gradients that no step has used. What earlier parts of the batch added to the round's sum stays."""
        for p in self._moving:
            p.grad_sample = None
        self._whole = {}
        self.original_optimizer.zero_grad(set_to_none)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Clip and add to the round's sum; if the batch is complete, release it into `grad` and return True."""
        try:
            flight = self._rounds.flight
            self._check_parameters()
            self._clip()
            skipped = bool(flight.skips) and flight.skips.pop(0)
            if skipped or flight.parts_left:
                return False
            self._release()
        except BaseException:
            self._rounds.abandon()
            raise
        if self.step_hook:
            self.step_hook(self)
        return True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        if self.__dict__.pop("found_inf", None) is not None:
            self._rounds.abandon()
            raise RuntimeError(
                "GradScaler multiplies the losses, and with them the gradients of examples before they are clipped: all would be "
                "cut to the clip norm, and its search for overflows sees none of them. Use autocast with bfloat16, which needs "
                "no GradScaler, and loss.backward() and optimizer.step() as usual"
            )
        if closure is not None:
            with torch.enable_grad():
                closure()
        with _whole():
            if not self.pre_step():
                return None
            self._released = True
            try:
                return self.original_optimizer.step()  # type: ignore[no-any-return]
            finally:
                self._released = False

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "the private optimizer cannot be copied or pickled: two copies would release the round under way twice. Use the "
            "engine's save_checkpoint, or state_dict"
        )

    def retire(self) -> None:
        """Leave the wrapped optimizer to another engine; this one makes no more steps."""
        for handle in self._handles:
            handle.remove()
        self._rounds.on_hand_out = self._rounds.on_more = None
        self._known = ()

    def _check_rows(self, _module: nn.Module, inputs: tuple[Any, ...], by_keyword: dict[str, Any]) -> None:
        """A pre-hook for modules with expanded weights, which add all gradients since the last step up: raises for another
        number of rows, which would be added to rows of other examples (one row to all)."""
        if not torch.is_grad_enabled():
            return
        rows = next(len(t) for t in (*inputs, *by_keyword.values()) if isinstance(t, Tensor))
        if self._rows not in (None, rows):
            raise RuntimeError(
                f"a forward pass of {rows} rows after one of {self._rows} since the last step: grad_sample_mode 'ew' adds up the "
                "gradients of all of them, row by row. Use grad_sample_mode 'hooks', or rows of the same examples in each pass"
            )
        self._rows = rows

    def _absorb(self) -> None:
        """Clip and add what backward passes have left, if they have, before another part of the round's batch."""
        if any(_passes(p) for p in self._moving):
            self._check_parameters()
            self._clip()

    def _clip(self) -> None:
        """Use up the gradients of the backward passes since the last step."""
        flight = self._rounds.flight
        self._rows = None
        passes = [_passes(p) for p in self._moving]
        for p in self._moving:
            p.grad_sample = None
        if len({len(one) for one in passes}) > 1 or (not passes[0] and flight.clipped < flight.examples):
            raise RuntimeError(
                "there are no gradients of examples for "
                + ("any" if not any(passes) else "some")
                + " of the parameters: each must be used in the forward pass of the module that the engine returned, in train "
                "mode, with one backward pass for each forward pass, and zero_grad not between backward and step. Freeze "
                "parameters that are not used, before make_private"
            )
        self._compare(passes)
        if flight.total is None:
            device = self._moving[0].device
            if not len(self._sum) or self._sum.device != device:  # the module may be moved after make_private
                size = sum(p.numel() for p in self._moving)
                self._sum = torch.empty(size, dtype=torch.float64, device=device)
            flight.total = self._sum.zero_()
        totals = torch.split(flight.total, [p.numel() for p in self._moving])
        for rows in zip(*passes, strict=True):
            examples = max(row.examples for row in rows)
            odd = {p for p, row in zip(self._moving, rows, strict=True) if row.examples != examples}
            if odd:
                names = [name for name, p in self._module.named_parameters() if p in odd]
                raise RuntimeError(
                    f"the parameters have gradients of different numbers of examples, {names[0]!r} and {len(names) - 1} others "
                    f"of fewer than {examples}: the batch must be the first dimension (or batch_first=False) of the input of "
                    "every layer. Position ids that a model makes itself have one row for all; give it position_ids with a row "
                    "for each example, or freeze that layer"
                )
            flight.clipped += examples
            flight.length = max(flight.length, *(row.length for row in rows))
            if flight.clipped <= flight.examples:  # else `complete` will raise
                add_clipped(totals, rows, self._rounds.plan.clip_norm)

    def _compare(self, passes: Sequence[Sequence[Rows]]) -> None:
        """Raise RuntimeError unless the first gradients of examples add up to those of autograd."""
        gradients, self._whole = [self._whole.get(p, []) for p in self._moving], {}
        count = len(passes[0])
        # There are none with expanded weights, and earlier ones too where the model's zero_grad came between.
        if self._compared or not count or any(len(own) != len(gradients[0]) for own in gradients):
            return
        if len(gradients[0]) < count:
            return
        gradients = [own[-count:] for own in gradients]
        other = disagreeing(self._moving, passes, gradients, self.loss_reduction == "mean")
        if other:
            names = [name for name, p in self._module.named_parameters() if any(p is one for one in other)]
            raise RuntimeError(
                f"the gradients of the examples do not add up to the gradient of {names[0]!r} and {len(names) - 1} other "
                "parameters: they are used in a way that the layer's gradients do not cover, as a weight that another layer or a "
                "penalty in the loss takes by itself, tensors that a layer is given by keyword, "
                "or a hook that changes the gradient. Call the layer for all that it does, or make it one module with a forward "
                "pass of one tensor, with grad_sample_mode='functorch'"
            )
        self._compared = other is not None

    def _keep_raw_gradient(self, p: Any) -> None:
        if not self._compared:
            self._whole.setdefault(p, []).append(p.grad.detach().clone())

    def _release(self) -> None:
        """Make the round's sum, with its noise and divided by the batch size, the `grad` of the parameters."""
        rounds = self._rounds
        flight = rounds.complete()
        check_size(flight.examples, flight.length)
        assert flight.total is not None
        total = flight.total
        rounds.record(self._noise.add(total, rounds.run, rounds.nonces))
        if self.loss_reduction == "mean":
            total /= self.expected_batch_size
        for p in self._grouped():
            p.grad = None
        parts = torch.split(total, [p.numel() for p in self._moving])
        for p, part in zip(self._moving, parts, strict=True):
            p.grad = part.view_as(p).to(p.dtype, copy=True)

    def _grouped(self) -> list[Any]:
        return [p for group in self.original_optimizer.param_groups for p in group["params"]]

    def _parameters(self) -> tuple[tuple[int, bool], ...]:
        """Which parameters there are, in the optimizer and in the module, and which of them move."""
        return tuple((id(p), p.requires_grad) for p in (*self._grouped(), *self._module.parameters()))

    def _check_parameters(self) -> None:
        if self._known != self._parameters():
            raise RuntimeError(
                "the parameters of the module or of the optimizer are not those that were made private (frozen, unfrozen, "
                "replaced, or added since): the clip norm would not cover what moves. Prepare them before make_private; for "
                "a later phase of training make another engine"
            )
        after = self._versions()
        changed = [name for name in after if after[name] != self._before.get(name)]
        if changed:
            raise RuntimeError(
                f"{changed[0]!r} and {len(changed) - 1} other parameters and buffers of the module have changed since the loader "
                "handed out the batch: what a forward pass (running statistics) or another optimizer writes into them is not "
                "clipped and has no noise. Leave them alone between batch and step; a buffer that is not to be saved with the "
                "model can be registered with persistent=False"
            )

    def _only_after_a_release(self, *_: Any) -> None:
        if not self._released:
            raise RuntimeError(
                "the optimizer that was made private cannot step by itself: its gradients are not clipped and have no noise; "
                "call step of the optimizer that the engine returned"
            )

    def _versions(self) -> dict[str, tuple[int, int | None]]:
        """What changes whenever a parameter, or a buffer that is saved with the model, is replaced or written."""
        tensors = dict(self._module.named_parameters())
        for prefix, layer in self._module.named_modules():
            for name, buffer in layer._buffers.items():
                if buffer is not None and name not in layer._non_persistent_buffers_set:
                    tensors[f"{prefix}.{name}" if prefix else name] = buffer
        return {name: (id(t), None if t.is_inference() else t._version) for name, t in tensors.items()}

    def _begin(self) -> None:
        """Make the module ready for a round's batch."""
        self._forget()
        self._rows = None
        self._before = self._versions()

    def _forget(self) -> None:
        """Remove what an interrupted forward or backward pass has left in the module, as if it had never begun."""
        self._whole = {}
        for module in self._module.modules():
            for name in ("activations", "max_batch_len"):
                if name in module.__dict__:
                    delattr(module, name)
        for p in self._moving:
            p.grad = p.grad_sample = None
            p._forward_counter = 0
            if hasattr(p, "_current_grad_sample"):
                del p._current_grad_sample


@contextmanager
def _whole() -> Iterator[None]:
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


def _forget_raw_gradient(keep: Callable[[], Callable[[Any], None] | None], p: Any) -> None:
    """After a backward pass: whatever optimizer takes the sum of the unclipped gradients finds zero, while `p` is private."""
    if hasattr(p, "grad_sample") and p.grad is not None:
        if (kept := keep()) is not None:
            kept(p)
        p.grad.zero_()


def _passes(p: Any) -> list[Rows]:
    """The gradients of the examples for `p`, one entry for each backward pass."""
    found = getattr(p, "grad_sample", None)
    passes = found if isinstance(found, list) else [] if found is None else [found]
    return [Dense(one) if isinstance(one, Tensor) else one for one in passes]
