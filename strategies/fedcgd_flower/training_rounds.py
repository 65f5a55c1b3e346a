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
from fedcgd.noise.quantisation import Integers
from fedcgd.numeric import so_many
from fedcgd.passes import aligned, passes
from fedcgd.release import RecordedReleases, lattice_of
from fedcgd_flower import inner_state
from fedcgd_flower.adaptive_clipping import Scale, next_norm
from fedcgd_flower.arrays import Outgoing
from fedcgd_flower.cohort_selection import CohortSelector
from fedcgd_flower.flower_private import log_info, log_warning
from fedcgd_flower.inner import inner_step
from fedcgd_flower.inner_request import InnerRequest, inner_request
from fedcgd_flower.keeper_messages import Masking
from fedcgd_flower.keeper_openings import MaskedSum, OpeningFailedError, Openings, sum_of_masked_replies
from fedcgd_flower.keeper_transport import transport_of
from fedcgd_flower.layout import (
    Layout,
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
from fedcgd_flower.run_settings import RunSettings
from fedcgd_flower.user_directory import UserDirectory

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
    config: inner_state.EditedConfig
    """The configuration, as it was given and as the inner strategy left it."""
    unsaved: dict[str, str]
    """What the inner strategy held that cannot be saved, before the round."""
    grid: Grid
    """Where its nodes, and keepers, are."""
    masking: Masking | None
    """Where keepers make the noise: which, and for what."""
    floors: tuple[VarianceFloor, ...]
    """Below which noise brings no running variance of BatchNorm."""


class TrainingRounds:
    """The rounds of `plan` around the strategy `inner`: each is configured and aggregated, or given up. `open` comes first."""

    def __init__(self, settings: RunSettings, selector: CohortSelector) -> None:
        plan, adaptive = settings.plan, settings.adaptive_clipping
        self.clip_norm = plan.clip_norm
        """The norm of the next round: the plan's, unless it adapts."""
        self.dropped: Counter[RejectionReason] = Counter()
        """Replies dropped so far, by cause, and users that nodes left out."""
        self.report = RoundReport(0, plan.participation.rounds)
        """What the last try came to, for the operator's log."""
        self.openings: Openings | None = None
        """Where keepers make the noise, while there is a ledger."""
        self._settings = settings
        self._inner, self._plan, self._cohort_size = settings.inner, plan, settings.cohort.size
        self._selector = selector
        self._adaptive = adaptive
        self._indicator_norm = 0.0
        self._wire_plan = plan  # of what is summed and noised: with adaptive clipping, of vectors of norm at most 1
        if adaptive is not None:
            self._indicator_norm = adaptive.indicator_norm(plan.noise_multiplier, self._cohort_size)
            self._wire_plan = replace(plan, clip_norm=1.0)
        self._opened: tuple[Ledger, UserDirectory] | None = None
        self._record: RecordedReleases | None = None
        self._inner_texts: dict[str, str] = {}
        self._inner_state: bytes | None = None  # as this process knows it; None before the ledger was opened
        self._config: inner_state.EditedConfig | None = None
        self._checked = self._texts_told = False
        self._begun = False
        self._pending: PendingRound | None = None
        self._hinted: set[RejectionReason] = set()
        self._memory = np.empty(0, np.int64)
        """Where a round's sum is made, and then the model. It is kept for the next round: new memory takes longer than adding."""

    def open(self, ledger: Ledger, directory: UserDirectory) -> None:
        """Go on where `ledger` stands, with the users of `directory`."""
        self._opened = ledger, directory
        keepers, patience = self._settings.keepers, self._settings.patience
        if keepers is not None:
            transport = transport_of(keepers, self._settings.ledger, new=not ledger.openings())
            agreed = partial(self._agreement, keepers, ledger.stream_id)
            self.openings = Openings(
                keepers, transport, ledger, agreed, cohort_size=self._cohort_size, patience=patience
            )
        self._record = RecordedReleases(ledger, self._wire_plan, self._settings.key)
        self.resume()

    def _agreement(self, keepers: Keepers, run: str, size: int) -> Agreement:
        """What all parties agree on, for a model of so many coordinates."""
        users, evaluation = self._cohort_size, self._settings.evaluation
        return agree(
            self._wire_plan,
            size=size + (self._adaptive is not None),
            keepers=keepers,
            run=run,
            users=users,
            evaluation=None if evaluation is None else evaluation.sums(keepers, users),
        )

    def close(self) -> None:
        """Close the ledger, if it is open."""
        opened, self._opened, self._pending = self._opened, None, None
        self._memory = np.empty(0, np.int64)
        openings, self.openings = self.openings, None
        if openings is not None:
            openings.close()
        if opened is not None:
            opened[0].close()

    @property
    def is_open(self) -> bool:
        """Whether there is a ledger, so that rounds can be tried."""
        return self._opened is not None

    @property
    def ledger(self) -> Ledger:
        """The ledger. Raises ValueError if it is not open."""
        if self._opened is None:
            raise ValueError("the ledger is not open: call start, or use the strategy inside `with strategy:`")
        return self._opened[0]

    @property
    def record(self) -> RecordedReleases:
        """The releases on record. Raises ValueError if the ledger is not open."""
        assert self.ledger is not None
        assert self._record is not None  # it is made when the ledger is opened
        return self._record

    @property
    def directory(self) -> UserDirectory:
        """Who can be reached where."""
        assert self._opened is not None  # it is made when the ledger is opened
        return self._opened[1]

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
        """How many rounds are released so far, as the ledger said when it was open last."""
        return 0 if self._record is None else self._record.count

    def resume(self) -> Run:
        """Where the ledger says that the run stands; from here on these rounds and the inner strategy stand there too."""
        run = self.record.resume()
        texts = inner_state.texts(self._inner)
        if run.state is None:  # until the first release it is as it was given, and may be changed
            self._inner_state = inner_state.save(self._inner, texts)
        elif self._inner_state is not None:
            changed = inner_state.changed_since(self._inner, self._inner_state)
            texts = self._inner_texts | {name: texts[name] for name in changed if name in texts}
            if kept := [name for name in changed if name not in texts]:
                raise ValueError(
                    f"{', '.join(kept)} of {type(self._inner).__name__} changed after release {run.round}, and a run goes on "
                    "with the inner strategy as it was then: what shall change in a run belongs into a method of the strategy"
                )
        self._inner_texts = texts
        self._inner_state = self._inner_state if run.state is None else run.state
        texts = inner_state.restore(self._inner, self._inner_state, self._inner_texts)
        if texts and not self._texts_told:
            self._texts_told = True
            log_info(
                f"{', '.join(texts)} of {type(self._inner).__name__}: as this process set it, not as the run saved it; "
                "training never changed it"
            )
        self._config = inner_state.saved_config(self._inner_state)
        told = self.ledger.metrics("train")
        last = told[max(told)] if told else {}  # of the last release that was one: nothing is told with a spent round
        self.clip_norm = last.get("next-clip-norm", self._plan.clip_norm)
        return run

    def layout(self, arrays: ArrayRecord) -> Layout:
        """What of a model is trained."""
        return layout_of(arrays, trainable=self._settings.trainable, batch_norm=self._settings.batch_norm)

    def check_inner(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Let the inner strategy configure the next round once, and forget it: what cannot be sent is refused before any work.

        Raises ValueError for what `inner_request` refuses, if the strategy changes what no ledger can save, and for another
        configuration than that of the releases so far.
        """
        if self._config is not None and (changed := self._config.given_otherwise(config)):
            raise ValueError(
                f"train_config is not what this run has released with: {changed}. A run goes on with the configuration that it "
                "began with; with another one it is another run"
            )
        unsaved = inner_state.digests_of_unsaved(self._inner)
        try:
            request, _ = self._inner_request(arrays, self.layout(arrays), config)
            inner_state.check_unchanged(self._inner, unsaved)
        finally:
            inner_state.restore(self._inner, self._inner_state, self._inner_texts)
        self.directory.message_type = request.message_type
        self._checked = True

    def _inner_request(
        self, arrays: ArrayRecord, layout: Layout, given: ConfigRecord
    ) -> tuple[InnerRequest, inner_state.EditedConfig]:
        """What the inner strategy sends in the next round, and what it made of the configuration that was given."""
        edited = ConfigRecord(dict(given)) if self._config is None else self._config.for_next_round(given)
        trained = ArrayRecord({name: arrays[name] for name in layout.names})
        request = inner_request(self._inner, self.releases + 1, trained, edited)
        return request, inner_state.EditedConfig(ConfigRecord(dict(given)), edited)

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
        ledger = self.ledger  # before anything else: it raises for a strategy that is not open
        if not self._checked:
            self.check_inner(arrays, config)
        suspects = None if self.openings is None else self.openings.suspects
        chosen = self._selector.wait_for(round, grid, self.directory, ledger, self._settings.key, suspects)
        if isinstance(chosen, str):
            return self._skip(chosen, "too few users that may take part were reachable")
        masking = None if self.openings is None else self.openings.masking(grid, layout.size)
        if isinstance(masking, str):
            return self._skip(masking, "too few keepers were reachable")
        outgoing = Outgoing((layout.size,), np.float32)
        flatten(arrays, layout, outgoing.array)
        records = model_records(outgoing, layout)
        unsaved = inner_state.digests_of_unsaved(self._inner)
        self._begun = True
        request, train_config = self._inner_request(arrays, layout, config)
        adaptive = self._adaptive is not None
        lattice = lattice_of(self._wire_plan, layout.size + adaptive)
        told = {} if masking is None else {KEEPERS: masking.record()}  # to nodes, of the keepers
        scale = Scale.fixed(self.clip_norm)
        if adaptive:
            scale = Scale.of_round(self.clip_norm, self._indicator_norm, lattice)
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
            unsaved=unsaved,
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
            self.abort_round(f"at least {so_many(self._settings.cohort.min_answers, 'user', 'users')} must answer")
            return None, None
        try:
            noised_sum = self._noised_sum(pending, total)
            metrics = guarantee_metrics(self._plan, released=pending.task.round + 1)
            next_clip_norm = self._next_clip_norm(pending, noised_sum, metrics)
            noised = self._noised_model(pending, noised_sum)
            pending = self._pending = replace(pending, model=(), requests=())
            kept = noised_sum if noised_sum.nbytes <= _KEPT else None
            del total, noised_sum  # the inner strategy needs room
            stepped = inner_step(self._inner, pending.task.round + 1, noised)
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
        if self._adaptive is None:
            return self.clip_norm
        share = pending.scale.share(int(total[-1]), self._cohort_size)
        following = next_norm(self.clip_norm, share, self._adaptive)
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
        work, start = passes(len(noised)), 0
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
        inner_state.check_unchanged(self._inner, pending.unsaved)
        state = inner_state.save(self._inner, self._inner_texts, pending.config)
        # Durable first: what has left the process can then never be followed by another release under this noise.
        self.record.record(pending.task.attempt, released.data, state, pending.task.layout.to_json(), metrics)
        self._inner_state, self._config, self.clip_norm = state, pending.config, next_clip_norm
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
        inner_state.restore(self._inner, self._inner_state, self._inner_texts)


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
