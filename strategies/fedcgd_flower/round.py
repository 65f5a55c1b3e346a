"""The rounds of a run, one try at a time: users are asked, the sum of their updates gets its noise, the inner strategy steps.

The privacy promise rests on the order of the steps. A user's turn is in the ledger before the user is asked, the nonce before its
noise is drawn, and the release before anybody sees it. If a step fails, the round is aborted: its noise is never used again, and
the inner strategy gets back the state that it had at the last release.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord
from flwr.serverapp import Grid

from fedcgd.keepers import Agreement, Keepers, agree
from fedcgd.ledger import Ledger, Run
from fedcgd.native.vector_kernels import aligned, kernels_for
from fedcgd.noise.quantisation import Integers
from fedcgd.release import RecordedReleases, lattice_of
from fedcgd.support.numbers import plural
from fedcgd_flower.adaptive_clipping import Scale, next_norm
from fedcgd_flower.cohort import CohortSelector
from fedcgd_flower.flower_private import log_warning
from fedcgd_flower.inner import InnerRequest, inner_request, inner_step
from fedcgd_flower.inner_state import EditedConfig, InnerState
from fedcgd_flower.keepers.messages import Masking
from fedcgd_flower.keepers.openings import MaskedSum, OpeningFailedError, Openings, sum_of_masked_replies
from fedcgd_flower.keepers.transport import transport_of
from fedcgd_flower.layout import (
    Layout,
    Outgoing,
    VarianceFloor,
    flat_arrays,
    flatten,
    layout_of,
    raise_variances,
    unflatten,
    variance_floors,
)
from fedcgd_flower.messages import KEEPERS, TrainTask, by_node, model_records, train_message
from fedcgd_flower.replies import HINTS, RejectionReason, sum_of_replies
from fedcgd_flower.reporting import RoundReport, guarantee_metrics
from fedcgd_flower.settings import RunSettings
from fedcgd_flower.users import UserDirectory

_KEPT = 2**30
"""Bytes: the memory of a smaller sum is kept for the next round, because new memory costs time. That of a larger one is freed."""


@dataclass(frozen=True, kw_only=True)
class PendingRound:
    """The round in flight: what was sent, and what each message asked for."""

    task: TrainTask
    """What all nodes are asked together."""
    model: tuple[Array, ...]
    """What is trained, before the round: as it was given, so that the messages may go when they are sent."""
    scale: Scale
    """How the sum is read."""
    requests: tuple[tuple[Metadata, TrainTask], ...]
    """Of each message, and what it asks for."""
    config: EditedConfig
    """The configuration, as it was given and as the inner strategy left it."""
    grid: Grid
    """Where its nodes, and keepers, are."""
    masking: Masking | None
    """Where keepers make the noise: which, and for what."""
    floors: tuple[VarianceFloor, ...]
    """Below which noise brings no running variance of BatchNorm."""


class TrainingRounds:
    """The rounds of a run that has a ledger: each is configured and aggregated, or given up.

    Args:
        settings: of the run.
        selector: draws the cohorts.
        inner: the state of the inner strategy.
        ledger: open; `close` closes it, and so does what this raises.
        directory: who can be reached where.
        dropped: counts the replies that are dropped, by cause, and users that nodes left out.
    """

    def __init__(
        self,
        settings: RunSettings,
        selector: CohortSelector,
        inner: InnerState,
        ledger: Ledger,
        directory: UserDirectory,
        dropped: Counter[RejectionReason],
    ) -> None:
        plan = settings.plan
        self.ledger, self.directory, self.dropped = ledger, directory, dropped
        self.clip_norm = plan.clip_norm
        """The norm of the next round: the plan's, unless it adapts."""
        self.report = RoundReport(0, plan.participation.rounds)
        """What the last try came to, for the operator's log."""
        self.openings: Openings | None = None
        """Where keepers make the noise."""
        self._settings = settings
        self._plan, self._cohort_size = plan, settings.cohort.size
        self._selector = selector
        self._inner = inner
        self._checked = False
        self._begun = False
        self._pending: PendingRound | None = None
        self._hinted: set[RejectionReason] = set()
        self._memory = np.empty(0, np.int64)
        """Where a round's sum is made, and then the model. It is kept for the next round: new memory takes longer than adding."""
        keepers = settings.keepers
        try:
            if keepers is not None:
                transport = transport_of(keepers, settings.ledger, new=not ledger.openings())
                agreed = partial(self._agreement, keepers, ledger.stream_id)
                self.openings = Openings(
                    keepers,
                    transport,
                    ledger,
                    agreed,
                    cohort_size=self._cohort_size,
                    patience=settings.patience,
                )
            self.record = RecordedReleases(ledger, settings.wire_plan, settings.key)
            self.resume()
        except BaseException:
            self.close()
            raise

    def _agreement(self, keepers: Keepers, run: str, size: int) -> Agreement:
        """What all parties agree on, for a model of so many coordinates."""
        users, evaluation = self._cohort_size, self._settings.evaluation
        return agree(
            self._settings.wire_plan,
            size=size + (self._settings.adaptive_clipping is not None),
            keepers=keepers,
            run=run,
            users=users,
            evaluation=None if evaluation is None else evaluation.sums(keepers, users),
        )

    def close(self) -> None:
        """Close the ledger, and what reaches the keepers."""
        self._pending, self._memory = None, np.empty(0, np.int64)
        if self.openings is not None:
            self.openings.close()
        self.ledger.close()

    @property
    def spent(self) -> int:
        """How many of the rounds on record gave no model: keepers were asked to open them, and that failed."""
        return sum(opened.state == "spent" for opened in self.ledger.openings())

    @property
    def gives_up(self) -> str:
        """Why no further round is tried, where keepers make the noise; "" if there is no reason."""
        return "" if self.openings is None else self.openings.suspects.gives_up

    @property
    def releases(self) -> int:
        """How many rounds are released so far."""
        return self.record.count

    def resume(self) -> Run:
        """Where the ledger says that the run stands; from here on these rounds and the inner strategy stand there too."""
        run = self.record.resume()
        self._inner.resume(run.state, run.round)
        told = self.ledger.metrics("train")
        last = told[max(told)] if told else {}  # of the last release that was one: nothing is told with a spent round
        self.clip_norm = last.get("next-clip-norm", self._plan.clip_norm)
        return run

    def layout(self, arrays: ArrayRecord) -> Layout:
        """What of a model is trained."""
        return layout_of(arrays, trainable=self._settings.trainable, batch_norm=self._settings.batch_norm)

    def check_inner(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Let the inner strategy configure the next round once, and forget it: what cannot be sent is refused before any work.

        Raises ValueError for what `inner_request` refuses, and for another configuration than that of the releases so far.
        """
        if self._inner.config is not None and (changed := self._inner.config.given_otherwise(config)):
            raise ValueError(
                f"train_config is not what this run has released with: {changed}. A run goes on with the configuration that it "
                "began with; with another one it is another run"
            )
        try:
            request, _ = self._inner_request(arrays, self.layout(arrays), config)
        finally:
            self._inner.put_back()
        self.directory.message_type = request.message_type
        self._checked = True

    def _inner_request(
        self, arrays: ArrayRecord, layout: Layout, given: ConfigRecord
    ) -> tuple[InnerRequest, EditedConfig]:
        """What the inner strategy sends in the next round, and what it made of the configuration that was given."""
        before = self._inner.config
        edited = ConfigRecord(dict(given)) if before is None else before.for_next_round(given)
        trained = ArrayRecord({name: arrays[name] for name in layout.names})
        request = inner_request(self._inner.inner, self.releases + 1, trained, edited)
        return request, EditedConfig(ConfigRecord(dict(given)), edited)

    def configure(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """One message for each node that hosts a user of this round's cohort; none if the round is skipped.

        Raises ValueError if the plan's rounds are used up.
        """
        round = self.releases
        if self._begun:
            self.abort_round("its replies were never aggregated")
        self.report = RoundReport(round, self._plan.participation.rounds)
        if round >= self._plan.participation.rounds:
            raise ValueError(
                f"all {round} planned rounds are released, and ε covers no further one. Begin another run from this model, with "
                "a plan and a key of its own: fedcgd ledger compose says what both cost together"
            )
        layout = self.layout(arrays)
        if not self._checked:
            self.check_inner(arrays, config)
        suspects = None if self.openings is None else self.openings.suspects
        chosen = self._selector.wait_for(round, grid, self.directory, self.ledger, self._settings.key, suspects)
        if isinstance(chosen, str):
            return self._skip(chosen, "too few users that may take part were reachable")
        masking = None if self.openings is None else self.openings.masking(grid, layout.size)
        if isinstance(masking, str):
            return self._skip(masking, "too few keepers were reachable")
        outgoing = Outgoing((layout.size,), np.float32)
        flatten(arrays, layout, outgoing.array)
        records = model_records(outgoing, layout)
        self._begun = True
        request, train_config = self._inner_request(arrays, layout, config)
        adaptive = self._settings.adaptive_clipping is not None
        lattice = lattice_of(self._settings.wire_plan, layout.size + adaptive)
        told = {} if masking is None else {KEEPERS: masking.record()}  # to nodes, of the keepers
        scale = Scale.fixed(self.clip_norm)
        if adaptive:
            scale = Scale.of_round(self.clip_norm, self._settings.indicator_norm, lattice)
        task = TrainTask(
            round=round,
            attempt=self.record.plan_round(list(chosen)),
            clip_norm=scale.part,
            grid=lattice,
            users=tuple(chosen),
            layout=layout,
            update_scale=scale.update_scale,
            indicator=scale.indicator,
            record_keys=request.record_keys,
        )
        messages, requests = [], []
        for node_id, users in by_node(chosen):
            asked = replace(task, users=users)
            message = train_message(
                node_id, records, request.config, asked, request.message_type, request.records, told
            )
            messages.append(message)
            requests.append((message.metadata, asked))
        self._pending = PendingRound(
            task=task,
            model=tuple(arrays[name] for name in layout.names),
            scale=scale,
            requests=tuple(requests),
            config=train_config,
            grid=grid,
            masking=masking,
            floors=variance_floors(arrays, layout),
        )
        self.report.asked, self.report.nodes = len(chosen), len(requests)
        return messages

    def _skip(self, reason: str, recorded: str) -> list[Message]:
        """No messages: the round is not tried this time."""
        self.report.failure = reason
        self.ledger.skip(self.releases, recorded)
        return []

    def aggregate(self, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's next model after the noised mean of the replies, and the ε spent; (None, None) without release."""
        pending = self._pending
        if pending is None:
            return None, None
        total, results = self._sum_of(replies, pending)
        self._record_answers(pending, results)
        if self.report.answered < self._settings.cohort.min_answers:
            self.abort_round(f"at least {plural(self._settings.cohort.min_answers, 'user', 'users')} must answer")
            return None, None
        try:
            noised_sum = self._noised_sum(pending, total)
            metrics = guarantee_metrics(self._plan, released=pending.task.round + 1)
            next_clip_norm = self._next_clip_norm(pending, noised_sum, metrics)
            noised = self._noised_model(pending, noised_sum)
            pending = self._pending = replace(pending, model=(), requests=())
            kept = noised_sum if noised_sum.nbytes <= _KEPT else None
            del total, noised_sum  # the inner strategy needs room
            stepped = inner_step(self._inner.inner, pending.task.round + 1, noised)
            del noised
            released = self._release(pending, stepped, kept, metrics, next_clip_norm)
        except OpeningFailedError as error:
            self.abort_round(f"{'the round is spent' if self.record.is_opening else 'not opened'}: {error}")
            return None, None
        except BaseException:
            self.abort_round("it could not be released")
            raise
        self._begun, self._pending = False, None
        self.report.epsilon, self.report.delta = cast(float, metrics["epsilon"]), self._plan.delta
        return released, metrics

    def _sum_of(
        self, replies: Iterable[Message], pending: PendingRound
    ) -> tuple[Integers | MaskedSum, list[int | RejectionReason]]:
        """The sum of the updates, and of each request how many users are in it, or why none is."""
        answered: list[int] = []
        matched = _matched(replies, pending.requests, answered)
        total: Integers | MaskedSum
        if pending.masking is None:
            total, found = sum_of_replies(matched, pending.task.size, self._memory_of(pending.task.size))
        else:
            masked, found = sum_of_masked_replies(matched, pending.masking)
            total = masked.at((pending.requests[position][0].dst_node_id for position in answered), found)
        results: list[int | RejectionReason] = ["no answer"] * len(pending.requests)
        for position, result in zip(answered, found, strict=True):
            results[position] = result
        return total, results

    def _memory_of(self, size: int) -> Integers:
        """Room for a sum of `size` coordinates: that of the last round, where it was kept."""
        memory = self._memory if len(self._memory) == size else np.empty(size, np.int64)
        self._memory = memory if memory.nbytes <= _KEPT else np.empty(0, np.int64)
        return memory

    def _record_answers(self, pending: PendingRound, results: Sequence[int | RejectionReason]) -> None:
        """Record who answered and why others are lost, and tell the operator what to do about it, once."""
        report = self.report
        for (metadata, task), result in zip(pending.requests, results, strict=True):
            cause: RejectionReason = "left out by its node" if isinstance(result, int) else result
            answered = result if isinstance(result, int) else 0
            missing = len(task.users) - answered
            self.dropped[cause] += missing if isinstance(result, int) else 1
            report.answered += answered
            if missing:
                report.lost[cause] += missing
                # Which of its users are missing, a node does not say.
                node_id = None if answered else metadata.dst_node_id
                self._selector.record_dropouts(pending.task.round, task.users, node_id)
        self.dropped += Counter()  # without zeros
        for lost in report.lost.keys() & HINTS.keys() - self._hinted:
            self._hinted.add(lost)
            log_warning(f"{lost}: {HINTS[lost]}")

    def _noised_sum(self, pending: PendingRound, total: Integers | MaskedSum) -> Integers:
        """The sum of the updates with its noise, of which the nonce is on record; the server's is in the memory of `total`.

        From the moment in which keepers are asked for theirs the round is released or spent.
        """
        if isinstance(total, MaskedSum):
            assert self.openings is not None  # who masks has keepers
            assert pending.masking is not None
            return self.openings.opened(pending.grid, pending.masking, self.record, pending.task.attempt, total)
        self.record.add_noise(total, pending.task.attempt, pending.task.grid)
        return total

    def _next_clip_norm(self, pending: PendingRound, total: Integers, metrics: MetricRecord) -> float:
        """The clip norm of the next round; where it adapts, `metrics` and the operator are told how, and of what share."""
        adaptive = self._settings.adaptive_clipping
        if adaptive is None:
            return self.clip_norm
        share = pending.scale.share(int(total[-1]), self._cohort_size)
        following = next_norm(self.clip_norm, share, adaptive)
        self.report.clipping = f"clip norm {self.clip_norm:.4g} → {following:.4g} (share within: {share:.2f})"
        metrics.update({"clip-norm": self.clip_norm, "share-within-norm": share, "next-clip-norm": following})
        return following

    def _noised_model(self, pending: PendingRound, total: Integers) -> ArrayRecord:
        """The model plus the noised mean of the updates whose noised sum is `total`.

        `total` holds nothing of use then: the model is made in its memory.
        """
        layout = pending.task.layout
        noised = total.view(np.float32)[: layout.size]  # what is written lies before what is still to be read
        step, unit = pending.task.grid.step, pending.scale.update_scale
        work, start = kernels_for(len(noised)), 0
        for part in flat_arrays(dict(zip(layout.names, pending.model, strict=True)), layout):
            here = slice(start, start + len(part))
            work.mean(aligned(part), total[here], step, unit, self._cohort_size, noised[here])
            start = here.stop
        return unflatten(noised, layout, passthrough=False)

    def _release(
        self,
        pending: PendingRound,
        stepped: ArrayRecord,
        memory: Integers | None,
        metrics: MetricRecord,
        next_clip_norm: float,
    ) -> ArrayRecord:
        """The model of the round in flight, as the inner strategy made it; it is in the ledger when this returns.

        `memory`, of the round's sum if that is still there, holds nothing of use any more.
        """
        out = None if memory is None else memory.view(np.float32)[: pending.task.layout.size]
        released = flatten(stepped, pending.task.layout, out)
        self.report.raised = raise_variances(released, pending.floors)  # of what is released already: it costs nothing
        state = self._inner.save(pending.config)
        # Durable first: what has left the process can then never be followed by another release under this noise.
        self.record.record(pending.task.attempt, released.data, state, pending.task.layout.to_json(), metrics)
        self._inner.released(state, pending.config)
        self.clip_norm = next_clip_norm
        return unflatten(released, pending.task.layout, same=stepped)

    def abort_round(self, reason: str) -> None:
        """Leave the round in flight unreleased: its noise is never used again, and the inner strategy has not seen it.

        A round that keepers were asked to open is spent: it counts as released, without a new model.
        """
        begun, self._begun, self._pending = self._begun, False, None
        self.report.failure = self.report.failure or reason
        if not begun:
            return
        self.record.abandon(reason)
        self._inner.put_back()


def _matched(
    replies: Iterable[Message], requests: Sequence[tuple[Metadata, TrainTask]], answered: list[int]
) -> Iterator[tuple[Message, TrainTask]]:
    """The first reply to each request with its task, as it comes; `answered` gets the requests' positions, in the same order."""
    positions: dict[str, int] = {}
    seen: set[int] = set()
    for reply in replies:
        request = reply.metadata.reply_to_message_id
        # A message has its id when it is sent, which may be after replies to others are there.
        if request not in positions:
            positions |= {metadata.message_id: i for i, (metadata, _) in enumerate(requests)}
        position = positions.get(request)
        if position is None or position in seen:
            continue
        seen.add(position)
        answered.append(position)
        matched = [(reply, requests[position][1])]
        del reply  # what holds it here keeps its memory while the next one is made
        yield matched.pop()
