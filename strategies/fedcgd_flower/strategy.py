"""The Flower server strategy: user updates are clipped and summed, correlated noise is added, the inner strategy steps."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log

from fedcgd.keys import NoiseKey
from fedcgd.ledger import JointBudget, Ledger, Run
from fedcgd.ledger.evaluations import EVALUATION
from fedcgd.noise.quantisation import Grid as IntegerGrid
from fedcgd.noise.quantisation import Integers
from fedcgd.noise.source import NoiseSource, grid_of, grid_source
from fedcgd.passes import passes
from fedcgd.plan import Plan
from fedcgd_flower import inner_state
from fedcgd_flower.adaptive_clipping import AdaptiveClipping, Scale, next_norm
from fedcgd_flower.causes import HINTS, Cause
from fedcgd_flower.cohort_choice import CohortChoice
from fedcgd_flower.evaluation import Evaluator, PrivateEvaluation, needed
from fedcgd_flower.inner import check_inner, inner_config, inner_step, keys_of, planned_cohort
from fedcgd_flower.layout import BatchNorm, Flat, Layout, Outgoing, flatten, layout_of, unflatten, view
from fedcgd_flower.messages import (
    FLAT,
    MODEL,
    TrainTask,
    model_records,
    train_message,
)
from fedcgd_flower.progress import RoundReport, config_text, metrics_text
from fedcgd_flower.promise import epsilon_text, log_promise
from fedcgd_flower.replies import sum_of_replies
from fedcgd_flower.result import IncompleteRunError, RunResult
from fedcgd_flower.roster import Identity, Roster
from fedcgd_flower.send_and_receive import send_and_receive
from fedcgd_flower.turns import users_needed

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

_NOTHING = np.empty(0, np.float32)
_MOST_FAILURES = 10  # tries in a row without a release before a run gives up


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The round in flight: what was sent, and what each message asked for."""

    round: int
    attempt: int
    model: Flat
    layout: Layout
    grid: IntegerGrid
    scale: Scale | None
    """With adaptive clipping, how the sum is read."""
    requests: tuple[tuple[Message, TrainTask], ...]
    unsaved: dict[str, str]
    """What the inner strategy held that cannot be saved, before the round."""


class CorrelatedNoise(Strategy):
    """DP-λCGD, or any mechanism, around an inner strategy: it is given model + (Σ clipped updates + ζσ(C⁻¹Z)_t) / cohort.

    >>> CorrelatedNoise(FedAvg(min_train_nodes=60), plan, key=NoiseKey.generate(), ledger=Path("run.db"))

    All rounds of `plan` together are (ε, δ)-DP under adding or removing one user, against whoever sees every released model.

    - `cohort_size`: the users asked in a round, and the divisor of the mean however many answer. By default what the inner
      strategy says: `min_train_nodes`, or with `expected_users` also `fraction_train`. With a sampling (Balls-in-Bins, Poisson)
      it is only the divisor: the expected number of users a round.
    - `key`: all noise and all secret choices come from it. `NoiseKey.simulation(seed)` makes runs repeatable and not private.
    - `ledger`: the file that records the run, and from which the same run goes on after a crash; in memory by default.
    - `budget`: what this run and earlier ones may cost each user together; whoever has too little left is refused.
    - `identity`: "declared" (a node lists its users) or "authenticated" (a node is one user, its registered name). A user whom a
      registered node has declared belongs to that node for the whole run.
    - `hosts`: user → registered name of the only node that may declare it; no other user takes part.
    - `trusted_nodes`: every node that can connect is yours. Without it, a sampling (whose rounds must stay secret) asks
      registered nodes only; with a simulation key nothing is secret.
    - `expected_users`: how many users must be reachable before the first round. By default as many as the plan cannot do without:
      each round takes a cohort out of those who may take part.
    - `min_answers`: a round that fewer users answer is not released, and is tried again (default 1; 0 with a sampling).
    - `patience`: seconds to wait for enough users before a round is skipped, or before the first one, given up.
    - `trainable`: the names of the arrays that are trained, where not all are (frozen layers, LoRA); the others, and counters, go
      along to the nodes and into the result unchanged.
    - `batch_norm`: running statistics are refused, "private" (clipped and noised like parameters) or "fixed" (left as they are).
    - `adaptive_clipping`: the clip norm follows a quantile of the users' norms, beginning with the plan's; ε stays what it is.
    - `evaluation`: users also evaluate released models on their data, as noised sums with a budget of their own.
    - `forward_client_metrics`: also evaluate on clients as the inner strategy does, and return the averages. They are not
      differentially private: ε no longer covers what the run tells.

    `start` opens the ledger and closes it when it ends or fails. `with CorrelatedNoise(…) as strategy:` keeps it open for
    several calls of `start`; a run without a ledger file can be started again only there, because its record ends with it.

    FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad and FedProx work unchanged inside, and so does a strategy of yours that makes a
    model of one reply, the noised mean. What it keeps from round to round is saved with each release (see `inner_state`).

    Raises TypeError or ValueError for settings that are wrong or contradict each other. Nothing is opened before `start`.
    """

    def __init__(
        self,
        inner: Strategy,
        plan: Plan,
        *,
        key: NoiseKey,
        ledger: Path | str | None = None,
        cohort_size: int | None = None,
        budget: JointBudget | None = None,
        identity: Identity = "declared",
        hosts: Mapping[str, str] | None = None,
        trusted_nodes: bool = False,
        expected_users: int | None = None,
        min_answers: int | None = None,
        patience: float = 600.0,
        trainable: Collection[str] | None = None,
        batch_norm: BatchNorm = "refuse",
        adaptive_clipping: AdaptiveClipping | None = None,
        evaluation: PrivateEvaluation | None = None,
        forward_client_metrics: bool = False,
    ) -> None:
        self.inner = check_inner(inner)
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a fedcgd Plan, for example Plan.calibrated(…); got {plan!r}")
        if not isinstance(key, NoiseKey):  # not shown: it may be a key
            raise TypeError(f"key must be a NoiseKey, for example NoiseKey.from_file(path); got {type(key).__name__}")
        if identity not in ("declared", "authenticated"):
            raise ValueError(f"identity must be 'declared' or 'authenticated', got {identity!r}")
        if cohort_size is None:
            self.cohort_size, self._cohort_source = planned_cohort(inner, expected_users)
        else:
            self.cohort_size, self._cohort_source = cohort_size, "cohort_size"
        if not isinstance(self.cohort_size, int) or self.cohort_size < 1:
            raise ValueError(
                f"cohort_size must be at least 1 and whole, got {self.cohort_size!r}: the planned number of users of a round"
            )
        sampled = plan.participation.sampling != "none"
        if min_answers is None:
            min_answers = 0 if sampled else 1
        if not 0 <= min_answers <= (0 if sampled else self.cohort_size):
            raise ValueError(
                f"min_answers must be between 0 and cohort_size = {self.cohort_size}, and 0 with a secret sampling, because who "
                f"was drawn may not decide whether a round is released; got {min_answers}"
            )
        if adaptive_clipping is not None and not isinstance(adaptive_clipping, AdaptiveClipping):
            raise TypeError(f"adaptive_clipping must be an AdaptiveClipping(…) or None, got {adaptive_clipping!r}")
        if evaluation is not None:
            if not isinstance(evaluation, PrivateEvaluation):
                raise TypeError(f"evaluation must be a PrivateEvaluation(…) or None, got {evaluation!r}")
            if forward_client_metrics:
                raise ValueError("evaluation= is private and forward_client_metrics=True is not: choose one")
            if budget is not None:
                raise ValueError(
                    "a joint budget does not count the evaluations of the run that it is for: leave out evaluation= or budget="
                )
            if plan.noiseless:
                raise ValueError(
                    "a private evaluation goes with a training that has noise: leave evaluation= out while σ = 0"
                )
            needed(evaluation, plan.participation.rounds)
        self.evaluation = evaluation
        self._plan = plan
        self.adaptive_clipping = adaptive_clipping
        self.clip_norm = plan.clip_norm
        """The norm of the next round: the plan's, unless it adapts."""
        self._indicator_norm = 0.0
        self._on_the_wire = plan  # of what is summed and noised: with adaptive clipping, of vectors of norm at most 1
        if adaptive_clipping is not None:
            self._indicator_norm = adaptive_clipping.indicator_norm(plan.noise_multiplier, self.cohort_size)
            self._on_the_wire = replace(plan, clip_norm=1.0)
        self.expected_users = (
            users_needed(plan.participation, self.cohort_size) if expected_users is None else expected_users
        )
        self.min_answers = min_answers
        self.trainable = trainable
        self.batch_norm: BatchNorm = batch_norm
        self.forward_client_metrics = forward_client_metrics
        self.dropped: Counter[Cause] = Counter()
        """Replies dropped so far, by cause, and users that nodes left out. It tells about users: for the operator's eyes only."""
        self._budget = budget
        self._choice = CohortChoice(
            plan.participation, self.cohort_size, expected_users=self.expected_users, patience=patience, budget=budget
        )
        self._identity: Identity = identity
        self._hosts = hosts
        secret = sampled or (evaluation is not None and evaluation.plan.participation.sampling != "none")
        self._registered_only = secret and not trusted_nodes and not key.simulated
        self._key = key
        self._ledger_path = None if ledger is None else Path(ledger)
        self._settings = inner_state.settings(inner)
        self._inner_state = inner_state.save(inner)
        self._opened: tuple[Ledger, Roster] | None = None
        self._evaluator: Evaluator | None = None
        self._noise: NoiseSource | None = None
        self._nonces: list[int] = []
        self._asked: _Asked | None = None
        self._hinted: set[Cause] = set()
        self._begun = False
        self._report = RoundReport(0, plan.participation.rounds)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        """Open the ledger: from here on no other process can release anything for this run."""
        if self._ledger_path is None and self._nonces:
            raise ValueError(
                f"{self.releases} rounds of this run are released, and their record was in memory; give a ledger file, or call "
                "start inside `with strategy:`"
            )
        # With another identity, people would get other ids, and turns beyond their k.
        configuration: dict[str, Any] = {
            "cohort_size": self.cohort_size,
            "identity": self._identity,
            "inner": self._settings,
        }
        if self.adaptive_clipping is not None:
            configuration["adaptive_clipping"] = self.adaptive_clipping.to_description()
        if self.evaluation is not None:  # so that later runs over the same people cannot leave it out
            configuration[EVALUATION] = self.evaluation.to_description(self.cohort_size)
        path = ":memory:" if self._ledger_path is None else self._ledger_path
        if self._budget is not None:
            admission = self._budget.admission(self.plan, key=self._key, ledger=path)
            self._choice.refused = admission.refused
            configuration |= admission.configuration
        ledger = Ledger.open(path, plan=self.plan, configuration=configuration, key=self._key)
        try:
            self._opened = ledger, Roster(self._identity, ledger.pin, self._hosts, self._registered_only)
            self._load(ledger.resume())
            if self.evaluation is not None:
                self._evaluator = Evaluator(
                    self.evaluation,
                    training=self.plan,
                    cohort_size=self.cohort_size,
                    key=self._key,
                    path=self._ledger_path,
                    training_stream=ledger.stream_id,
                    begun=self.releases > 0,
                    keys=keys_of(self.inner),
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the ledger, if it is open."""
        opened, self._opened, self._noise, self._asked = self._opened, None, None, None
        evaluator, self._evaluator = self._evaluator, None
        try:
            if opened is not None:
                opened[0].close()
        finally:
            if evaluator is not None:
                evaluator.close()

    def _load(self, run: Run) -> None:
        """Stand where the ledger says."""
        self._nonces = list(run.nonces)
        if run.state is not None:
            self._inner_state = run.state
        inner_state.restore(self.inner, self._inner_state)
        last = self._ledger.metrics("train").get(self.releases)
        self.clip_norm = self.plan.clip_norm if last is None else last.get("next-clip-norm", self.plan.clip_norm)

    @property
    def plan(self) -> Plan:
        """What runs and what is accounted for. It cannot be set: the noise is that of the plan given at first."""
        return self._plan

    @property
    def _ledger(self) -> Ledger:
        if self._opened is None:
            raise ValueError("the ledger is not open: call start, or use the strategy inside `with strategy:`")
        return self._opened[0]

    @property
    def _roster(self) -> Roster:
        assert self._opened is not None  # it is made when the ledger is opened
        return self._opened[1]

    @property
    def over_budget(self) -> int:
        """How many of the users that are there may not take part, because earlier runs have used up the joint budget."""
        return self._choice.over_budget

    @property
    def releases(self) -> int:
        """How many rounds are released so far, as the ledger said when it was open last."""
        return len(self._nonces)

    def _layout(self, arrays: ArrayRecord) -> Layout:
        return layout_of(arrays, trainable=self.trainable, batch_norm=self.batch_norm)

    def summary(self) -> None:
        """Log what is promised and under which assumptions."""
        log_promise(
            self.plan,
            released=self.releases,
            cohort_size=self.cohort_size,
            cohort_source=self._cohort_source,
            adaptive_clipping=self.adaptive_clipping,
            ledger=self._ledger_path,
            evaluator=self._evaluator,
            forward_client_metrics=self.forward_client_metrics,
        )
        log(INFO, "\t├──> Inner strategy (its fractions and numbers of nodes for training are not used):")
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """One message for each node that hosts a user of this round's cohort; none if the round is skipped.

        Raises ValueError if the plan's rounds are used up.
        """
        round = self.releases
        if self._begun:
            self._give_up("its replies were never aggregated")
        self._report = RoundReport(round, self.plan.participation.rounds)
        if round >= self.plan.participation.rounds:
            raise ValueError(
                f"all {round} planned rounds are released, and ε covers no further one. Begin another run from this model, with "
                "a plan and a key of its own: fedcgd ledger compose says what both cost together"
            )
        layout = self._layout(arrays)
        chosen = self._choose(round, grid)
        if chosen is None:
            return []
        outgoing = Outgoing((layout.size,), np.float32)
        flatten(arrays, layout, outgoing.array)
        records = model_records(outgoing, layout)
        unsaved = inner_state.fingerprint(self.inner)
        trained = ArrayRecord({name: arrays[name] for name in layout.names})
        train_config = inner_config(self.inner, round + 1, trained, config)
        by_node: dict[int, list[str]] = {}
        for user, node_id in chosen.items():
            by_node.setdefault(node_id, []).append(user)
        adaptive = self.adaptive_clipping is not None
        integer_grid = grid_of(self._on_the_wire, layout.size + adaptive)
        scale = Scale.of_round(self.clip_norm, self._indicator_norm, integer_grid) if adaptive else None
        self._begun = True
        attempt = self._ledger.plan_round(round, list(chosen))
        requests = []
        for node_id, users in sorted(by_node.items()):
            task = TrainTask(
                round=round,
                attempt=attempt,
                clip_norm=self.plan.clip_norm if scale is None else scale.part,
                grid=integer_grid,
                users=tuple(users),
                layout=layout,
                unit=1.0 if scale is None else scale.unit,
                indicator=0 if scale is None else scale.indicator,
                keys=keys_of(self.inner),
            )
            requests.append((train_message(node_id, records, train_config, task), task))
        self._asked = _Asked(
            round=round,
            attempt=attempt,
            model=view(records[MODEL][FLAT]),
            layout=layout,
            grid=integer_grid,
            scale=scale,
            requests=tuple(requests),
            unsaved=unsaved,
        )
        self._report.asked, self._report.nodes = len(chosen), len(requests)
        return [message for message, _ in requests]

    def _choose(self, round: int, grid: Grid) -> dict[str, int] | None:
        """Users of the round and the node of each; None if too few are there."""
        ledger = self._ledger  # first: it raises for a strategy that is not open
        chosen = self._choice.wait_for(round, grid, self._roster, ledger, self._key)
        if isinstance(chosen, str):
            self._report.failure = chosen
            ledger.skip(round, "too few users that may take part were reachable")
            return None
        return chosen

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's next model after the noised mean of the replies, and the ε spent; (None, None) without release."""
        asked = self._asked
        if asked is None:
            return None, None
        answers = {reply.metadata.reply_to_message_id: reply for reply in replies}
        report = self._report
        tasks = [task for _, task in asked.requests]
        matched = [(answers.get(message.metadata.message_id), task) for message, task in asked.requests]
        total, results = sum_of_replies(matched, asked.layout.size + (asked.scale is not None))
        for task, result in zip(tasks, results, strict=True):
            cause: Cause = "left out by its node"
            answered = 0
            if isinstance(result, int):
                answered = result
                self.dropped[cause] += len(task.users) - answered
            else:
                cause = result
                self.dropped[cause] += 1
            report.answered += answered
            if answered < len(task.users):
                report.lost[cause] += len(task.users) - answered
                self._choice.note_silence(asked.round, task.users)  # which of them, the node does not say
        self.dropped += Counter()  # without zeros
        for lost in report.lost.keys() & HINTS.keys() - self._hinted:
            self._hinted.add(lost)
            log(WARNING, "fedcgd: %s: %s", lost, HINTS[lost])
        if report.answered < self.min_answers:
            self._give_up(f"at least {self.min_answers} users must answer")
            return None, None
        nonce = self._key.nonce_of(self._ledger.stream_id, total, earlier=self._nonces, attempt=asked.attempt)
        try:
            self._ledger.record_aggregated(asked.round, asked.attempt, nonce)
            noised, metrics, following = self._noised(asked, total, nonce)
            asked = self._asked = replace(asked, model=_NOTHING, requests=())
            del total, matched, answers  # the inner strategy needs room
            stepped = inner_step(self.inner, asked.round + 1, noised)
            del noised
            released = self._release(asked, stepped, metrics, following)
        except BaseException:
            self._give_up("it could not be released")
            raise
        self._begun, self._asked = False, None
        self._nonces.append(nonce)
        report.epsilon, report.delta = cast(float, metrics["epsilon"]), self.plan.delta
        return released, metrics

    def _metrics(self, release: int) -> MetricRecord:
        """What is told of a release: ε of the whole plan, and of the rounds until then."""
        guarantee = self.plan.quick_guarantee(released=release)
        whole = self.plan.guarantee().epsilon
        return MetricRecord(
            {"epsilon": guarantee.epsilon, "epsilon-planned": whole, "delta": guarantee.delta, "releases": release}
        )

    def _give_up(self, reason: str) -> None:
        """Leave the round in flight unreleased: its noise is never used again, and the inner strategy has not seen it."""
        begun, self._begun, self._asked = self._begun, False, None
        self._report.failure = self._report.failure or reason
        if begun:
            with suppress(Exception):  # what is raised is the failure, not that nothing can be recorded either
                self._ledger.skip(self._report.round, reason)
            self._noise = None  # it may have stopped halfway
            inner_state.restore(self.inner, self._inner_state)

    def _noised(self, asked: _Asked, total: Integers, nonce: int) -> tuple[ArrayRecord, MetricRecord, float]:
        """The model plus the noised mean of the updates whose sum is `total`; what is told with it; the next round's clip norm.

        `total` holds nothing of use then: the noise is added in it, and the model is made in its memory.
        """
        if self._noise is None:
            self._noise = grid_source(self._on_the_wire, self._key, self._ledger.stream_id, asked.grid)
        self._noise.add(total, [*self._nonces, nonce], self._on_the_wire.stddev)
        metrics = self._metrics(asked.round + 1)
        following, unit = self.clip_norm, 1.0
        if self.adaptive_clipping is not None and asked.scale is not None:
            unit = asked.scale.unit
            share = asked.scale.share(int(total[-1]), self.cohort_size)
            following = next_norm(self.clip_norm, share, self.adaptive_clipping)
            self._report.clipping = f"clip norm {self.clip_norm:.4g} → {following:.4g} (share within: {share:.2f})"
            metrics.update({"clip-norm": self.clip_norm, "share-within-norm": share, "next-clip-norm": following})
        noised = total.view(np.float32)[: asked.layout.size]  # what is written lies before what is still to be read
        passes(len(noised)).mean(asked.model, total, asked.grid.step, unit, self.cohort_size, noised)
        return unflatten(noised, asked.layout, carried=False), metrics, following

    def _release(self, asked: _Asked, stepped: ArrayRecord, metrics: MetricRecord, following: float) -> ArrayRecord:
        """The model of the round in flight, as the inner strategy made it; it is in the ledger when this returns."""
        released = flatten(stepped, asked.layout)
        changed = dict(inner_state.fingerprint(self.inner).items() ^ asked.unsaved.items())
        if changed:
            name = type(self.inner).__name__
            raise ValueError(
                f"{name} changed {', '.join(sorted(changed))} in a round, and the ledger cannot save it: a run that is resumed "
                "would go on without it. Keep what changes in arrays, numbers, texts, lists, dicts or Flower's records"
            )
        state = inner_state.save(self.inner)
        # Durable first: what has left the process can then never be followed by another release under this noise.
        self._ledger.record_released(asked.round, asked.attempt, released.data, state, asked.layout.to_json(), metrics)
        self._inner_state, self.clip_norm = state, following
        return unflatten(released, asked.layout, same=stepped)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's evaluation of the released model on clients, if client metrics are forwarded; else nothing."""
        if not self.forward_client_metrics:
            return []
        return list(self.inner.configure_evaluate(server_round, arrays, config, grid))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The inner strategy's average of client metrics, if they are forwarded: not differentially private."""
        return self.inner.aggregate_evaluate(server_round, replies) if self.forward_client_metrics else None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> RunResult:
        """Run until all planned rounds are released, or for `num_rounds` tries if fewer than are left (an unreleased one counts).

        As Flower's `Strategy.start`, with replies matched to requests and the end that the plan sets. Metrics of the training are
        the ε spent, by release; `evaluate_fn(release, arrays)` sees the initial model as release 0 and then every released one.
        Raises IncompleteRunError if the run ends before its plan, unless `num_rounds` is smaller than what was left of it.
        """
        if not isinstance(initial_arrays, ArrayRecord):
            raise TypeError(
                "initial_arrays must be an ArrayRecord, for example ArrayRecord(model.state_dict()); got "
                f"{type(initial_arrays).__name__}"
            )
        opened_here = self._opened is None
        if opened_here:
            self._open()
        try:
            return self._run(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        finally:
            if opened_here:
                self.close()

    def _run(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> RunResult:
        started = time.monotonic()
        log(INFO, "Starting %s around %s:", type(self).__name__, type(self.inner).__name__)
        result = self._resume(initial_arrays)
        log(INFO, "\t├── Rounds: %d planned, %d released", result.planned, result.released)
        log(INFO, "\t├── ConfigRecord (train): %s", config_text(train_config))
        log(INFO, "\t├── ConfigRecord (evaluate): %s", config_text(evaluate_config))
        self.summary()
        self._report = RoundReport(self.releases - 1, result.planned)
        if evaluate_fn is not None:
            self._evaluate(result, evaluate_fn)
            if self._report.evaluated:
                log(INFO, "Release %d: %s", self.releases, self._report.evaluated[0])
        self._evaluate_privately(result, grid, evaluate_config, timeout)  # if the server died before it could
        asked_for_less = num_rounds is not None and num_rounds < result.planned - result.released
        if num_rounds is not None and num_rounds > result.planned:
            log(WARNING, "fedcgd: num_rounds is %d, and the plan ends after %d", num_rounds, result.planned)
        tries = failures = 0
        failure = ""
        most_tries = num_rounds if asked_for_less else None
        while self.releases < result.planned and tries != most_tries and failures < _MOST_FAILURES:
            tries += 1
            try:
                released = self._try_round(result, grid, timeout, train_config)
                if released:
                    self._evaluate_privately(result, grid, evaluate_config, timeout)
                    self._evaluate_on_clients(result, grid, evaluate_config, timeout)
                    if evaluate_fn is not None:
                        self._evaluate(result, evaluate_fn)
            except BaseException:
                self._give_up("interrupted")
                raise
            failures, failure = (0, failure) if released else (failures + 1, self._report.failure)
            log(INFO if released else WARNING, "%s", self._report)
        if not result.complete:
            result.stopped = f"after {tries} tries" + (f"; not released: {failure}" if failure else ", as asked for")
        log(
            INFO,
            "Finished in %.1f s with %d of %d rounds released",
            time.monotonic() - started,
            result.released,
            result.planned,
        )
        log(INFO, "\t└── %s", epsilon_text(self.plan, result.released))
        if self._evaluator is not None:
            log(INFO, "\t└── %s", self._evaluator.summary())
        if not result.complete:
            log(WARNING, "fedcgd: the run ended before its plan: %s", result.stopped)
            if not asked_for_less:
                raise IncompleteRunError(result, recorded=self._ledger_path is not None)
        return result

    def _try_round(self, result: RunResult, grid: Grid, timeout: float, train_config: ConfigRecord | None) -> bool:
        config = ConfigRecord() if train_config is None else train_config
        messages = self.configure_train(self.releases + 1, result.arrays, config, grid)
        replies = [reply for reply in send_and_receive(grid, messages, timeout) if reply is not None]
        del messages  # they hold a model
        released, metrics = self.aggregate_train(self.releases + 1, replies)
        if released is None or metrics is None:
            return False
        result.arrays, result.released = released, self.releases
        result.train_metrics_clientapp[self.releases] = metrics
        return True

    def _resume(self, initial_arrays: ArrayRecord) -> RunResult:
        """Where the run stands: the last model that was released, if the ledger has one, and the metrics of all releases."""
        run = self._ledger.resume()
        self._load(run)
        result = RunResult(initial_arrays, planned=self.plan.participation.rounds, released=self.releases)
        for kind, metrics in self._kinds(result).items():
            metrics |= {release: MetricRecord(kept) for release, kept in self._ledger.metrics(kind).items()}
        if self._evaluator is not None:
            result.evaluate_metrics_clientapp |= self._evaluator.released()
        layout = self._layout(
            initial_arrays
        )  # before the first release too: what it refuses is refused before any work
        if run.model is None:
            return result
        recorded = Layout.from_json(run.layout)
        if recorded != layout:
            raise ValueError(
                f"the ledger's model trains {recorded.size} parameters in {recorded}, and initial_arrays {layout.size} in "
                f"{layout}; give the same model, trainable and batch_norm"
            )
        model = np.frombuffer(run.model, np.float32)
        if result.complete:
            log(
                WARNING,
                "fedcgd: all %d rounds of this run were released before: nothing is trained, and the result is its last model. "
                "Another run has another ledger and another key",
                result.planned,
            )
        else:
            log(INFO, "fedcgd: going on after release %d of %d", run.round, result.planned)
        result.arrays = unflatten(model, layout)
        return result

    @staticmethod
    def _kinds(result: RunResult) -> dict[str, dict[int, MetricRecord]]:
        return {
            "train": result.train_metrics_clientapp,
            "evaluate on clients": result.evaluate_metrics_clientapp,
            "evaluate": result.evaluate_metrics_serverapp,
        }

    def _keep(self, kind: str, result: RunResult, metrics: MetricRecord | None) -> None:
        """Put what was measured after the last release in the result and in the ledger, for the result of a run that goes on."""
        if metrics is not None:
            self._kinds(result)[kind][self.releases] = metrics
            self._ledger.record_metrics(kind, self.releases, metrics)
            self._report.evaluated.append(metrics_text(kind, metrics))

    def _evaluate(self, result: RunResult, evaluate_fn: EvaluateFn) -> None:
        self._keep("evaluate", result, evaluate_fn(self.releases, result.arrays))

    def _evaluate_on_clients(self, result: RunResult, grid: Grid, config: ConfigRecord | None, timeout: float) -> None:
        config = ConfigRecord() if config is None else config
        messages = list(self.configure_evaluate(self.releases, result.arrays, config, grid))
        if not messages:
            return
        replies = [reply for reply in send_and_receive(grid, messages, timeout) if reply is not None]
        self._keep("evaluate on clients", result, self.aggregate_evaluate(self.releases, replies))

    def _evaluate_privately(self, result: RunResult, grid: Grid, config: ConfigRecord | None, timeout: float) -> None:
        """Have users evaluate the last released model, if that is due and not done."""
        evaluator, release = self._evaluator, self.releases
        if evaluator is None or release in evaluator.released():
            return
        if not evaluator.settings.is_due(release, result.planned):
            return
        layout = self._layout(result.arrays)
        wanted = ConfigRecord({} if config is None else dict(config))
        wanted["server-round"] = release
        nodes = self._roster.refresh(grid)
        measured = evaluator.evaluate(release, flatten(result.arrays, layout), layout, wanted, grid, nodes, timeout)
        if measured is not None:
            result.evaluate_metrics_clientapp[release] = measured
            self._report.evaluated.append(metrics_text("evaluate on users, private", measured))
