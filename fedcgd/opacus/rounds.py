"""A run as one value, and its rounds: what may happen between the loader that issues a batch and the step that releases it."""

from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn, optim
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from fedcgd.central.ranks import Ranks
from fedcgd.central.releases import Releases
from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus.ghost import remove_sample_hooks
from fedcgd.participation.samplings import Rows
from fedcgd.plan import Plan

_AGAIN = "enter the loop over the loader again: the round starts afresh, with the same batch"


@dataclass(frozen=True, kw_only=True)
class GradientSettings:
    """How gradients of examples are made, by the arguments of `make_private`."""

    mode: str
    batch_first: bool
    loss_reduction: Literal["mean", "sum"]
    wrap_model: bool
    copies: int


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The batches of an epoch: of `examples`, in `steps` rounds of so many `parts` on all processes together."""

    examples: int
    steps: int
    parts: int


@dataclass(frozen=True, kw_only=True)
class PrivateRun:
    """What is known of a run when everything that could be refused has been accepted."""

    module: nn.Module
    """The model itself, without Opacus' wrapper."""
    optimizer: optim.Optimizer
    """That of the program, of all that is trained."""
    plan: Plan
    key: NoiseKey
    gradients: GradientSettings
    epoch: Epoch
    ranks: Ranks | None

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that move, in the order of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def facts(self, data_loader: DataLoader[Any]) -> dict[str, object]:
        """What has to be the same on all ranks, by what an error calls it."""
        return {
            "the plan": repr(self.plan),
            "the key": self.key.fingerprint,
            "the parameters": [(name, p.shape, p.dtype, p.requires_grad) for name, p in self.module.named_parameters()],
            "how batches are made": (self.epoch, data_loader.batch_size, type(data_loader.sampler).__name__),
            "how gradients are made": self.gradients,
        }


class StepError(RuntimeError):
    """What would break the rule of `Rounds`; `reason` says in a word or two which part of it."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass
class PendingRound:
    """A round between the loader that issues its batch and the step that releases it."""

    rows: Rows
    """The examples of the round, of all processes."""
    parts_left: int
    """How many more parts the batch comes in, with gradient accumulation."""
    examples: int = 0
    """How many the loader has issued here."""
    clipped: int = 0
    """The gradients of how many are in the sums."""
    total: Tensor | None = None
    """The sum of the clipped gradients so far, flat, in whole steps of the lattice; None is zero."""
    called: bool = False
    """Whether the module was called for it, as a whole: what looks for examples that act on each other sees nothing else."""
    skips: list[bool] = field(default_factory=list)
    """For each part of the batch that `BatchMemoryManager` made, whether the step after it only adds to the sum."""


class Rounds:
    """The one rule: a release consumes, once, the clipped gradients of exactly the examples issued for its round.

    A round goes through `issue` and `pending` (as often as the batch has parts) and `release`; what comes in another order raises
    before there is noise. Leaving the loop and entering it again starts the round under way afresh.

    Args:
        plan: that of the run.
        releases: where sums get their noise.
    """

    def __init__(self, plan: Plan, releases: Releases) -> None:
        self.plan, self.releases = plan, releases
        self.next = 0
        """The round of the next step: one that is released already is computed again."""
        self.loop = 0
        """The number of the loop over the loader that began last: only it is given batches."""
        self.listener: Any = None
        """The private optimizer: `on_batch` forgets what is left of an earlier round, `on_part` adds what is there to the sum."""
        self._ended = False
        self._pending: PendingRound | None = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a private run cannot be copied or pickled, nor its loader, its accountant and its optimizer: two copies would "
            "release the round under way twice. Copy the module alone; for another run make another engine; save_checkpoint "
            "keeps where a run stands"
        )

    def enter(self) -> int:
        """A number for a loop over the loader that begins now; older loops end.

        Raises:
            StepError: after the last round.
        """
        self._check_not_finished()
        self.loop += 1
        return self.loop

    def is_over(self, loop: int, round: int) -> bool:
        """Whether `loop` ends before `round`, because that and later ones turned out to be released with other sums."""
        return loop == self.loop and round < self.next

    def issue(self, loop: int, round: int, rows: Rows, examples: int, part: tuple[int, int] = (0, 1)) -> None:
        """Begin `round` with `examples` examples of its `rows`, which go to `loop`; or go on with it.

        Args:
            loop: what `enter` returned.
            round: which one.
            rows: its examples, of all processes.
            examples: how many of them are in this part, here.
            part: (which part of its batch, how many there are here).

        Raises:
            StepError: for another round than the next one, or a loop that another one has overtaken.
        """
        self._check_not_finished()
        if loop != self.loop:
            self.abandon()
            raise StepError(
                "another loop",
                "another loop over the loader has begun since this one did, and a batch is issued to one of them: "
                f"use one at a time (for evaluation, make a loader of its own). To go on, {_AGAIN}",
            )
        if round != self.next:
            self.abandon()
            raise StepError(
                "order",
                f"the batch of round {round} was asked for when {self.next} rounds had been released: take one "
                "optimizer step for each batch (an empty or spoilt batch too; to evaluate, make a loader of its own); with "
                "BatchMemoryManager use num_workers=0; do not give the loader to Accelerate's prepare(), or to anything else "
                "that fetches a batch ahead of the step (module and optimizer may be given; Transformers' Trainer takes it from "
                "get_train_dataloader). To "
                f"accumulate gradients over batches, give make_private accumulation_steps. To go on, {_AGAIN}",
            )
        number, parts = part
        pending = self._pending if number else None
        try:
            if number == 0:
                self._pending = None  # while what an interrupted round has left is cleared away
                if self.listener is not None:
                    self.listener.on_batch()
                pending = PendingRound(rows, parts)
            elif pending is None or pending.parts_left != parts - number:
                raise StepError("missing part", f"a part of the batch is missing; {_AGAIN}")
            elif self.listener is not None:
                self.listener.on_part()
        except BaseException:
            self.abandon()
            raise
        pending.examples += examples
        pending.parts_left = parts - 1 - number
        self._pending = pending

    @property
    def pending(self) -> PendingRound:
        """The round under way. Raises StepError if no batch is out."""
        self._check_not_finished()
        if self._pending is None:
            raise StepError(
                "no batch",
                "there is no batch from the loader for this step. Take the loader that the engine returned; each batch is good "
                f"for one step, and only examples that the loader issued are accounted for. If a step failed before, {_AGAIN}",
            )
        return self._pending

    def issued(self) -> int:
        """How many examples of the round under way are out; 0 if there is none."""
        return 0 if self._pending is None else self._pending.examples

    def complete(self) -> PendingRound:
        """The round under way, which this ends; raises StepError unless exactly the examples issued are in its sum."""
        ended = self.pending
        self.abandon()
        if ended.clipped != ended.examples:
            raise StepError(
                "rows",
                "the step has gradients of "
                + ("fewer" if ended.clipped < ended.examples else "more")
                + " rows than the loader issued examples for its round: put each example of the batch through one forward "
                "and one backward pass (add losses up before the backward pass; leave no part of a batch out; make one row "
                "an example, or give make_private augmentation_multiplicity, with which the loader's batch has all copies of "
                "its examples; call zero_grad after a backward pass that is for something else, as an attack on the inputs). "
                f"To go on, {_AGAIN}",
            )
        if ended.clipped and not ended.called:
            raise StepError(
                "parts",
                "layers of the module were called by themselves, where nothing looks for examples that act on each other or at "
                "buffers that change: call the module that the engine returned, whose forward pass calls its layers. To go on, "
                f"{_AGAIN}",
            )
        return ended

    def release(self, total: Tensor, rows: Rows) -> Tensor | None:
        """The sum of the next round with its noise, as `Releases.release`; None where training goes on after later rounds."""
        noised = self.releases.release(total, self.next, rows)
        if noised is None:
            self.next = self.releases.count
            return None
        self.next += 1
        return noised

    def abandon(self) -> None:
        """Forget the round under way: what was added to its sum is never released."""
        self._pending = None

    def go_to(self, round: int) -> None:
        """Go on with `round`, afresh; loops that have begun end."""
        self.abandon()
        self.loop += 1
        self.next = round

    def end(self) -> None:
        """Issue and release nothing more: another run goes on with the model."""
        self.abandon()
        self._ended, self.listener = True, None

    def _check_not_finished(self) -> None:
        if self._ended:
            raise StepError(
                "ended",
                "the model or the optimizer of this run has been made private again: take the module, the optimizer and the "
                "loader that the last make_private returned",
            )
        rounds = self.plan.participation.rounds
        if self.next >= rounds:
            raise StepError(
                "finished",
                f"all {rounds} rounds of the plan have been released; plan for more epochs, and make another engine, to train on",
            )


@dataclass
class _Attachment:
    module: "ReferenceType[nn.Module]"
    handles: list[RemovableHandle]
    rounds: "ReferenceType[Any]"


_attached: WeakKeyDictionary[nn.Module, _Attachment] = WeakKeyDictionary()
"""By each layer of the models that are private; nothing in it keeps a model."""


def attach(module: nn.Module, handles: list[RemovableHandle], rounds: Any) -> None:
    """Note what belongs to the run of these `rounds`, whose model `module` is."""
    attachment = _Attachment(ref(module), handles, ref(rounds))
    for layer in module.modules():
        _attached[layer] = attachment


def detach_earlier_runs(module: nn.Module) -> int:
    """End the runs that `module` or parts of it belong to, and take off their hooks; how many rounds they have released."""
    found = {id(one): one for layer in module.modules() if (one := _attached.pop(layer, None)) is not None}
    released = 0
    for attachment in found.values():
        for handle in attachment.handles:
            handle.remove()
        if (owner := attachment.module()) is not None and owner is not module:  # they share layers
            remove_sample_hooks(owner)
        if (rounds := attachment.rounds()) is not None:
            released += rounds.releases.count
            rounds.end()
    return released
