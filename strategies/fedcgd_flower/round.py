"""The rounds of a run, one try at a time: users are asked, the sum of their updates gets its noise, the inner strategy steps.

The privacy promise rests on the order of the steps. A user's turn is in the ledger before the user is asked, the nonce before its
noise is drawn, and the release before anybody sees it. If a step fails, the round is aborted: its noise is never used again, and
the inner strategy gets back the state that it had at the last release.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord
from flwr.serverapp import Grid

from fedcgd.accounting.guarantee import NO_NOISE, rounded_up
from fedcgd.ledger import Admission, Ledger, Run
from fedcgd.native.vector_kernels import aligned, kernels
from fedcgd.release import ReleaseProtocol
from fedcgd.support.numbers import plural
from fedcgd_flower.clipping import Clipping, adaptive_round, next_norm, share_within
from fedcgd_flower.cohort import CohortSelector
from fedcgd_flower.flower_private import log_warning
from fedcgd_flower.inner import EditedConfig, InnerRequest, inner_request, inner_step, restore_state, saved_state
from fedcgd_flower.inner import settings as inner_settings
from fedcgd_flower.layout import Flat, Layout, flatten, layout_of, unflatten
from fedcgd_flower.messages import TrainTask, model_records, train_message
from fedcgd_flower.noise_provider import NoiseUnavailableError, Results
from fedcgd_flower.problems import HINTS, RejectionReason
from fedcgd_flower.users import UserDirectory

if TYPE_CHECKING:
    from fedcgd_flower.strategy import RunSettings


@dataclass(frozen=True, kw_only=True)
class PendingRound:
    """The round in flight: what was sent, and what each message asked for."""

    task: TrainTask
    """What all nodes are asked together."""
    model: Flat
    """What is trained, before the round."""
    requests: tuple[tuple[Metadata, TrainTask], ...]
    """Of each message, and what it asks for."""
    config: EditedConfig
    """The configuration, as it was given and as the inner strategy left it."""
    grid: Grid
    """Where its nodes are."""
    terms: Any
    """Of who makes the noise (`NoiseProvider.terms`)."""


@dataclass
class RoundReport:
    """What happened to one try of a round."""

    round: int
    rounds: int
    asked: int = 0
    nodes: int = 0
    answered: int = 0
    lost: Counter[RejectionReason] = field(default_factory=Counter)
    """Users who were asked and are not in the sum, by cause."""
    failure: str = ""
    """Why the round was not released; empty if it was."""
    notes: list[str] = field(default_factory=list)
    """What else happened: ε, how the clip norm moved, what was measured."""

    def add_epsilon(self, epsilon: float, delta: float) -> None:
        """The round is released, at this ε so far: before the other notes."""
        text = NO_NOISE if math.isinf(epsilon) else f"ε ≤ {rounded_up(epsilon, 4)} so far at δ = {delta:g}"
        self.notes[:0] = [text, "nobody answered: what is released is noise alone"] if self.noise_alone else [text]

    @property
    def noise_alone(self) -> bool:
        """Whether a release has spent ε and learned nothing, because everybody who was asked failed."""
        return bool(self.asked) and not self.answered and not self.failure

    def __str__(self) -> str:
        parts = []
        if self.asked or not self.failure:
            causes = ", ".join(f"{cause}: {count}" for cause, count in sorted(self.lost.items()))
            where = f"{plural(self.asked, 'user', 'users')} asked at {plural(self.nodes, 'node', 'nodes')}"
            asked = f"{where}, {self.answered} answered"
            parts.append(f"{asked} ({causes})" if causes else asked)
        if self.failure:
            parts.append(f"not released: {self.failure}")
        return f"[ROUND {self.round + 1}/{self.rounds}] " + " | ".join(parts + self.notes)


class TrainingRounds:
    """The rounds of a run that has a ledger: each is configured and aggregated, or given up.

    Args:
        settings: of the run.
        ledger: open; `close` closes it, and so does what this raises.
        admission: who may take part by the joint budget.
    """

    def __init__(self, settings: "RunSettings", ledger: Ledger, admission: Admission | None) -> None:
        plan = settings.plan
        self.settings, self.ledger = settings, ledger
        self.directory = UserDirectory(settings.identity, ledger.bind_users, settings.hosts, settings.registered_only)
        """Who can be reached where."""
        self.selector = CohortSelector(settings, admission)
        self.dropped: Counter[RejectionReason] = Counter()
        """The replies that are dropped, by cause, and users that nodes left out."""
        self.clip_norm = plan.clip_norm
        """The norm of the next round: the plan's, unless it adapts."""
        self.report = RoundReport(0, plan.participation.rounds)
        """What the last try came to, for the operator's log."""
        self.inner_settings = inner_settings(settings.inner)
        """Those of the inner strategy, as they were when the ledger was opened."""
        self._plan, self._cohort_size = plan, settings.cohort.size
        self._state = b""  # of the inner strategy at the last release, and what it has made of the configuration
        self._config: EditedConfig | None = None
        self._begun = False
        self._pending: PendingRound | None = None
        self._hinted: set[RejectionReason] = set()
        try:
            self.noise = settings.noise.provider(
                settings.training_sums, settings.evaluation_sums, ledger, settings.path, settings.patience
            )
        except BaseException:
            ledger.close()
            raise
        try:
            self.record = ReleaseProtocol(ledger, settings.wire_plan, settings.key)
            self.resume()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the ledger, and what makes the noise."""
        self._pending = None
        self.noise.close()
        self.ledger.close()

    @property
    def spent(self) -> int:
        """How many of the rounds on record gave no model: others were asked for their noise, in vain."""
        return sum(opened.state == "spent" for opened in self.ledger.openings())

    @property
    def releases(self) -> int:
        """How many rounds are released so far."""
        return self.record.count

    def resume(self) -> Run:
        """Where the ledger says that the run stands; from here on these rounds and the inner strategy stand there too."""
        run = self.record.resume()
        self._state = run.state or saved_state(self.settings.inner, None)
        self._put_back()
        metrics = self.ledger.metrics("train")
        last = metrics[max(metrics)] if metrics else {}  # a consumed round has none
        self.clip_norm = last.get("next-clip-norm", self._plan.clip_norm)
        return run

    def layout(self, arrays: ArrayRecord) -> Layout:
        """What of a model is trained."""
        return layout_of(arrays, trainable=self.settings.trainable)

    def check_inner(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Let the inner strategy configure the next round once, and forget it: what cannot be sent is refused before any work.

        Raises ValueError for what `inner_request` refuses, and for another configuration than that of the releases so far.
        """
        if self._config is not None and dict(config) != (before := dict(self._config.given)):
            raise ValueError(
                f"train_config is {dict(config)}, and this run has released with {before}. A run goes on with the configuration "
                "that it began with; with another one it is another run"
            )
        try:
            self._inner_request(arrays, self.layout(arrays), config)
        finally:
            self._put_back()

    def _inner_request(
        self, arrays: ArrayRecord, layout: Layout, given: ConfigRecord
    ) -> tuple[InnerRequest, EditedConfig]:
        """What the inner strategy sends in the next round, and what it made of the configuration that was given."""
        edited = ConfigRecord(dict(given if self._config is None else self._config.edited))
        trained = ArrayRecord({name: arrays[name] for name in layout.names})
        request = inner_request(self.settings.inner, self.releases + 1, trained, edited)
        return request, EditedConfig(ConfigRecord(dict(given)), edited)

    def configure(self, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """One message for each node that hosts a user of this round's cohort; none if the round is skipped.

        Raises ValueError if the plan's rounds are used up, and for a model with numbers that are not finite.
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
        model = flatten(arrays, layout)
        if not np.isfinite(model).all():
            raise ValueError(
                "the model has numbers that are NaN, infinite or beyond float32, and nobody can train from it: give finite "
                "initial_arrays; if a release was like that, take a smaller server learning rate in another run"
            )
        chosen = self.selector.wait_for(round, grid, self.directory, self.ledger, self.noise)
        if isinstance(chosen, str):
            return self._skip(chosen, "too few users that may take part were reachable")
        terms = self.noise.terms(grid, layout.size)
        if isinstance(terms, str):
            return self._skip(terms, "too few parties that make the noise were reachable")
        records = model_records(model, layout)
        self._begun = True
        request, train_config = self._inner_request(arrays, layout, config)
        clipping = Clipping(clip_norm=self.clip_norm, grid=terms.lattice)
        if self.settings.adaptive_clipping is not None:
            clipping = adaptive_round(self.clip_norm, self.settings.indicator_norm, terms.lattice)
        task = TrainTask(
            round=round,
            attempt=self.record.plan_round(list(chosen)),
            clipping=clipping,
            users=tuple(chosen),
            layout=layout,
            record_keys=request.record_keys,
        )
        messages, requests = [], []
        for asked in task.by_node(chosen):
            message = train_message(records, request.config, asked, terms.records)
            messages.append(message)
            requests.append((message.metadata, asked))
        self._pending = PendingRound(
            task=task,
            model=model,
            requests=tuple(requests),
            config=train_config,
            grid=grid,
            terms=terms,
        )
        self.report.asked, self.report.nodes = len(chosen), len(requests)
        return messages

    def _skip(self, reason: str, recorded: str) -> list[Message]:
        """No messages: the round is not tried this time."""
        self.report.failure = reason
        self.ledger.skip(self.releases, recorded)
        return []

    def aggregate(self, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's next model after the noised mean of the replies, and how its clip norm adapted, if it does.

        (None, None) without release.
        """
        pending = self._pending
        if pending is None:
            return None, None
        round, metrics = pending.task.round + 1, MetricRecord()
        try:
            stepped = inner_step(self.settings.inner, round, self._noised_model(replies, pending, metrics))
            released = self._release(pending, stepped, metrics)
        except NoiseUnavailableError as error:
            self.abort_round(f"the round is consumed: {error}" if self.record.is_consumed else str(error))
            return None, None
        except BaseException:
            self.abort_round("it could not be released")
            raise
        self._begun, self._pending = False, None
        return released, metrics

    def _noised_model(self, replies: Iterable[Message], pending: PendingRound, metrics: MetricRecord) -> ArrayRecord:
        """The model plus the noised mean of the replies; where the clip norm adapts, `metrics` says how.

        Raises NoiseUnavailableError if too few users answered, or the sum has no noise. It alone holds the sum.
        """
        answered: list[int] = []
        matched = _matched(replies, pending.requests, answered)
        total, found = self.noise.sum_of(matched, pending.terms, pending.task.size)
        results: Results = ["no answer"] * len(pending.requests)
        for position, result in zip(answered, found, strict=True):
            results[position] = result
        self._record_answers(pending, results)
        if self.report.answered < (least := self.settings.cohort.min_answers):
            raise NoiseUnavailableError(f"at least {plural(least, 'user', 'users')} must answer")
        # From the moment in which other parties are asked for their noise the round is released or consumed.
        total = self.noise.add_noise(total, self.record, pending.task.attempt, pending.terms, pending.grid)
        layout, clipping, model = pending.task.layout, pending.task.clipping, aligned(pending.model)
        self._adapt(int(total[-1]), clipping, metrics)
        noised = total.view(np.float32)[: layout.size]  # in the memory of the sum
        kernels().mean(
            model, total[: layout.size], clipping.grid.step, clipping.update_scale, self._cohort_size, noised
        )
        return unflatten(noised, layout, passthrough=False)

    def _record_answers(self, pending: PendingRound, results: Results) -> None:
        """Record who answered and why others are lost, and tell the operator what to do about it, once."""
        report = self.report
        for (_, task), result in zip(pending.requests, results, strict=True):
            cause: RejectionReason = "left out" if isinstance(result, int) else result
            answered = result if isinstance(result, int) else 0
            missing = len(task.users) - answered
            self.dropped[cause] += missing if isinstance(result, int) else 1
            report.answered += answered
            if missing:
                report.lost[cause] += missing
                self.selector.record_dropouts(pending.task.round, task.users)  # which of them, a node does not say
        self.dropped += Counter()  # without zeros
        for lost in report.lost.keys() & HINTS.keys() - self._hinted:
            self._hinted.add(lost)
            log_warning(f"{lost}: {HINTS[lost]}")

    def _adapt(self, counted: int, clipping: Clipping, metrics: MetricRecord) -> None:
        """Where the clip norm adapts, tell `metrics` and the operator of what share of users, and what it is next."""
        adaptive = self.settings.adaptive_clipping
        if adaptive is None:
            return
        share = share_within(counted, clipping, self._cohort_size)
        following = next_norm(self.clip_norm, share, adaptive)
        self.report.notes.append(f"clip norm {self.clip_norm:.4g} → {following:.4g} (share within: {share:.2f})")
        metrics.update({"clip-norm": self.clip_norm, "share-within-norm": share, "next-clip-norm": following})

    def _release(self, pending: PendingRound, stepped: ArrayRecord, metrics: MetricRecord) -> ArrayRecord:
        """The model of the round in flight, as the inner strategy made it; it is in the ledger when this returns."""
        layout = pending.task.layout
        released = flatten(stepped, layout)
        state = saved_state(self.settings.inner, pending.config)
        # Durable first: what has left the process can then never be followed by another release under this noise.
        self.record.record(pending.task.attempt, released.data, state, layout.to_json(), metrics or None)
        self._state, self._config = state, pending.config
        self.clip_norm = cast(float, metrics.get("next-clip-norm", self.clip_norm))
        return unflatten(released, layout)

    def _put_back(self) -> None:
        """Set the inner strategy to its state at the last release."""
        self._config = restore_state(self.settings.inner, self._state)

    def abort_round(self, reason: str) -> None:
        """Leave the round in flight unreleased: its noise is never used again, and the inner strategy has not seen it.

        A round for whose noise others were asked is consumed: it counts as released, without a new model.
        """
        begun, self._begun, self._pending = self._begun, False, None
        self.report.failure = self.report.failure or reason
        if not begun:
            return
        self.record.abandon(reason)
        self._put_back()


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
        yield reply, requests[position][1]
