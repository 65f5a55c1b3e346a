"""The releases of a run: which rounds were released, and what may still happen to the one that is under way."""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from opacus.accountants import IAccountant
from torch import Tensor

from fedcgd.noise import STREAM
from fedcgd.plan import Plan, plan_differences

_NO_RECORD = (
    "nothing says whether rounds after the {rounds} of this checkpoint were released by a process that has ended since: there "
    "is no record=. They would be released again, with fresh noise, and ε counts them once, which is true if nobody has seen a "
    "model of theirs. CorrelatedPrivacyEngine(key, record=path) notes each release durably, and then says how many there were"
)
_AGAIN = "enter the loop over the loader again: the round starts afresh, with the same batch"


@dataclass
class PendingStep:
    """A round between the loader that issues its batch and the step that releases it."""

    examples: int
    """How many the loader issued."""
    microbatches_left: int = 0
    """How many more parts the batch comes in, with gradient accumulation."""
    clipped: int = 0
    """The gradients of how many are in the sum."""
    length: int = 1
    """The longest sequence among them, for ghost clipping."""
    total: Tensor | None = None
    """The sum of the clipped gradients of this part of the batch so far, flat, float64; None is zero."""
    earlier: Tensor | None = None
    """That of earlier parts, on the lattice; None is zero."""
    kept: list[Any] = field(default_factory=list)
    """Clipped gradients of parts that are in neither sum yet, of a model that is spread over the ranks."""
    whole: int = 0
    """How many examples were issued for the round to all processes."""
    skips: list[bool] = field(default_factory=list)
    """For each part of the batch that `BatchMemoryManager` made, whether the step after it only adds to the sum."""


class StepListener(Protocol):
    """Who prepares the model for batches: the private optimizer."""

    def on_batch(self) -> None:
        """A round begins: whatever is left of the one before it has to go."""
        ...

    def on_microbatch(self) -> None:
        """Another part of the round's batch is about to be issued: the gradients of those before it are clipped and added."""
        ...


class SharedExamples(Protocol):
    """The examples of a run, which other runs of this process may have too."""

    def tell(self, run: str) -> None:
        """Warn if another run than `run` has released something of them."""
        ...

    def note_release(self, run: str) -> None:
        """Something of them is released by `run`."""
        ...


class NullAccountant(IAccountant):  # type: ignore[misc]
    """What an engine answers before it has made a run private."""

    def __init__(self) -> None:
        self.history: list[tuple[float, float, int]] = []

    def __len__(self) -> int:
        return 0

    @classmethod
    def mechanism(cls) -> str:
        """The accountant's name."""
        return "fedcgd"

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Raises RuntimeError."""
        raise RuntimeError("there is no run: call make_private first")

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """0: nothing is released."""
        return 0.0

    def state_dict(self, destination: Any = None) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError("there is no run to save: call make_private first")


class ReleaseTracker(IAccountant):  # type: ignore[misc]
    """The one rule: a release consumes, once, the clipped gradients of exactly the examples issued for its round.

    Stands where Opacus keeps its accountant, and answers as one. A round goes through `issue_batch` and `pending` (as often as
    the batch has parts), `complete` and `record`; what comes in another order raises before there is noise. Whoever leaves the
    loop and enters it again starts the round under way afresh.
    """

    def __init__(
        self,
        plan: Plan,
        run: str,
        sample_rate: float,
        fingerprint: str = "",
        assumed_independent: str | None = None,
        recorded: bool = False,
        examples: "SharedExamples | None" = None,
    ) -> None:
        """The tracker of a run that has released nothing.

        Args:
            plan: what the run is accounted for.
            run: names it among all runs with its key.
            sample_rate: the part of the examples that a round takes on average.
            fingerprint: the key's, for checkpoints.
            assumed_independent: why the author takes examples for independent, whatever a check finds; on record.
            recorded: whether each release is on a durable record, which tells of those that are in no checkpoint.
            examples: all of them, to tell of other runs over them; None says nothing.
        """
        self.plan = plan
        self.fingerprint = fingerprint
        self.sample_rate = sample_rate
        self.run = run
        """Names the run among all with its key: no two share noise or batches. Empty with a simulation key."""
        self.nonces: list[int] = []
        """Of each released round: which of its noises was used."""
        self.assumed_independent = assumed_independent
        self._recorded = recorded
        self._examples = examples
        self._pending: PendingStep | None = None
        self._ended = False
        self.loop = 0
        """The number of the loop over the loader that began last: only it is given batches."""
        self.listener: StepListener | None = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a private run cannot be copied or pickled, nor its loader, its accountant and its optimizer: two copies would "
            "release the round under way twice. Copy the module alone; for another run make another engine; save_checkpoint "
            "keeps where a run stands"
        )

    @property
    def released(self) -> int:
        """How many rounds have been released."""
        return len(self.nonces)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, rounds released), as Opacus' accountants have it; empty before the first release."""
        return [(self.plan.noise_multiplier, self.sample_rate, self.released)] if self.nonces else []

    def __len__(self) -> int:
        return self.released

    @classmethod
    def mechanism(cls) -> str:
        """The accountant's name, which no accountant of Opacus has: their checkpoints and these do not mix."""
        return "fedcgd"

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Raises RuntimeError: a step that nobody took cannot be counted."""
        raise RuntimeError("rounds are counted when the private optimizer releases them, and in no other way")

    def enter(self) -> int:
        """A number for a loop over the loader that begins now; older loops end.

        Raises:
            RuntimeError: after the last round.
        """
        self.check_not_finished()
        if self._examples is not None:
            self._examples.tell(self.run)
        self.loop += 1
        return self.loop

    def check_not_finished(self) -> None:
        """Raise RuntimeError if all rounds of the plan have been released, or the run has ended."""
        if self._ended:
            raise RuntimeError(
                "the model or the optimizer of this run has been made private again: take the module, the optimizer and the "
                "loader that the last make_private returned"
            )
        rounds = self.plan.participation.rounds
        if self.released >= rounds:
            raise RuntimeError(
                f"all {rounds} rounds of the plan have been released; plan for more epochs, and make another engine, to train on"
            )

    def end(self) -> None:
        """Issue and release nothing more: another run goes on with the model."""
        self.abandon()
        self._ended, self.listener = True, None

    def issue_batch(
        self, loop: int, round: int, examples: int, *, part: int = 0, parts: int = 1, whole: int | None = None
    ) -> None:
        """Begin `round` with `examples` examples, which go to `loop`; or go on with it, after the first of its `parts`.

        All processes together are issued `whole` for the round, if there are others.

        Raises:
            RuntimeError: for another round than the next one, or a loop that another one has overtaken.
        """
        self.check_not_finished()
        if loop != self.loop:
            self.abandon()
            raise RuntimeError(
                "another loop over the loader has begun since this one did, and a batch is issued to one of them: "
                f"use one at a time (for evaluation, make a loader of its own). To go on, {_AGAIN}"
            )
        if round != self.released:
            self.abandon()
            raise RuntimeError(
                f"the batch of round {round} was asked for when {self.released} rounds had been released: take one "
                "optimizer step for each batch (an empty or spoilt batch too; to evaluate, make a loader of its own); with "
                "BatchMemoryManager use num_workers=0; do not give the loader to Accelerate's prepare(), or to anything else "
                "that fetches a batch ahead of the step (module and optimizer may be given; Transformers' Trainer takes it from "
                "get_train_dataloader). To "
                f"accumulate gradients over batches, give make_private accumulation_steps. To go on, {_AGAIN}"
            )
        if part:
            self._issue_microbatch(examples, parts - 1 - part)
            return
        self._pending = None  # while what an interrupted round has left is cleared away
        if self.listener is not None:
            self.listener.on_batch()
        self._pending = PendingStep(examples, microbatches_left=parts - 1, whole=examples if whole is None else whole)

    def _issue_microbatch(self, examples: int, left: int) -> None:
        """Another part of the batch: the gradients of those before it are clipped and added to the sum now."""
        try:
            if self.pending.microbatches_left != left + 1:
                raise RuntimeError(f"a part of the batch is missing; {_AGAIN}")
            if self.listener is not None:
                self.listener.on_microbatch()
        except BaseException:
            self.abandon()
            raise
        self._pending = replace(self.pending, examples=self.pending.examples + examples, microbatches_left=left)

    @property
    def pending(self) -> PendingStep:
        """The round under way. Raises RuntimeError if no batch is out."""
        self.check_not_finished()
        if self._pending is None:
            raise RuntimeError(
                "there is no batch from the loader for this step. Take the loader that the engine returned; each batch is good "
                f"for one step, and only examples that the loader issued are accounted for. If a step failed before, {_AGAIN}"
            )
        return self._pending

    def issued(self) -> int:
        """How many examples of the round under way are out; 0 if there is none."""
        return 0 if self._pending is None else self._pending.examples

    def complete(self) -> PendingStep:
        """The round under way, which this ends; raises RuntimeError unless exactly the examples issued are in its sum."""
        step = self.pending
        self._pending = None
        if step.clipped != step.examples:
            raise RuntimeError(
                "the step has gradients of "
                + ("fewer" if step.clipped < step.examples else "more")
                + " rows than the loader issued examples for its round: put each example of the batch through one forward "
                "and one backward pass (add losses up before the backward pass; leave no part of a batch out; make one row "
                "an example, or give make_private augmentation_multiplicity, with which the loader's batch has all copies of "
                "its examples; call zero_grad after a backward pass that is for something else, as an attack on the inputs). "
                f"To go on, {_AGAIN}"
            )
        return step

    def record(self, nonce: int) -> None:
        """Count the next round as released under `nonce`."""
        self.nonces = [*self.nonces, nonce]
        if self._examples is not None and len(self.nonces) == 1:
            self._examples.note_release(self.run)
            self._examples.tell(self.run)  # where two loops began together

    def abandon(self) -> None:
        """Forget the round under way: what was added to its sum is never released."""
        self._pending = None

    def get_epsilon(self, delta: float, *, alphas: Any = None, eps_error: Any = None, delta_error: Any = None) -> float:
        """An upper bound on ε of the rounds so far; adjacency is zero out one example.

        Their number must not depend on what they released: else the ε of the whole plan holds. Under Balls-in-Bins this takes
        seconds, each time. Opacus' `alphas` (orders to search) and errors (how coarse an answer may be) change nothing: there is
        no order, and the bound holds.
        """
        if self.released == 0:
            return 0.0
        return replace(self.plan, delta=delta).guarantee(released=self.released).epsilon

    def state_dict(self, destination: Any = None) -> dict[str, Any]:
        """What a checkpoint has to hold so that the noise goes on in the right round; put into `destination` if there is one."""
        state: dict[str, Any] = {} if destination is None else destination
        state["plan"] = self.plan.to_description()
        state["run"], state["noise stream"], state["key"] = self.run, STREAM, self.fingerprint
        state["nonces"] = [f"{nonce:032x}" for nonce in self.nonces]
        state["history"], state["mechanism"] = self.history, self.mechanism()
        if self.assumed_independent is not None:
            state["assumed independent"] = self.assumed_independent
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; the round under way starts afresh.

        Raises:
            ValueError: if it is another plan's or key's, or if this object has released rounds that the state does not know: they
                would be released twice.
        """
        if "plan" not in state:
            raise ValueError("the checkpoint is not of a fedcgd engine: it has no plan, and nobody knows its noise")
        plan, run, nonces = state["plan"], str(state["run"]), [int(nonce, 16) for nonce in state["nonces"]]
        if plan != self.plan.to_description():
            changed = ", ".join(plan_differences(plan, self.plan.to_description()))
            raise ValueError(
                f"the checkpoint is of another plan (in it → here): {changed}; make the engine private by its plan"
            )
        if state.get("noise stream") != STREAM:
            raise ValueError(
                f"the checkpoint's noise is of the stream {state.get('noise stream')}, and this version makes {STREAM}: later "
                "rounds would not cancel it. End that run with the version that began it"
            )
        if (run == "") != (self.run == ""):
            raise ValueError(
                "one of checkpoint and engine has a simulation key, the other a secret one; use the checkpoint's"
            )
        if state.get("key", self.fingerprint) != self.fingerprint:
            raise ValueError(
                f"the checkpoint's noise comes from the key with fingerprint {state['key']}, and the engine has another, "
                f"{self.fingerprint}: later rounds would not cancel it. Keep the key: NoiseKey.from_file(path, create=True)"
            )
        if self.nonces and (run != self.run or nonces[: len(self.nonces)] != self.nonces):
            raise ValueError(
                f"this engine has released {len(self.nonces)} rounds, and the checkpoint goes back behind them: training on from "
                "there would release rounds twice, and ε counts them once"
            )
        if run != self.run and not self._recorded and len(nonces) < plan["participation"]["rounds"]:
            warnings.warn(_NO_RECORD.format(rounds=len(nonces)), stacklevel=2)
        self.abandon()
        self.loop += 1
        self.run, self.nonces = run, nonces
        self.assumed_independent = self.assumed_independent or state.get("assumed independent")
