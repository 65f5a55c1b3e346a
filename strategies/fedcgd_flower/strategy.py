"""The Flower server strategy: user updates are clipped and summed, correlated noise is added, the inner strategy steps."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from fedcgd.keys import NoiseKey
from fedcgd.ledger import Ledger
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Integers, from_lattice, lattice_step
from fedcgd.noise.source import RunNoise
from fedcgd.participation.cohorts import cohort
from fedcgd.plan import Plan
from fedcgd_flower.inner import inner_config, inner_state, inner_step, restore_inner_state, undone_on_failure
from fedcgd_flower.layout import BatchNorm, Flat, Layout, flatten, layout_of, unflatten
from fedcgd_flower.messages import Cause, NodeSum, TrainTask, read_train_reply, train_message
from fedcgd_flower.roster import Identity, Roster
from fedcgd_flower.send_and_receive import send_and_receive

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

_POLL = 1.0  # seconds between looks at who is there


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The round in flight: what was sent, and what each message asked for."""

    round: int
    attempt: int
    model: Flat
    layout: Layout
    step: float
    requests: tuple[tuple[Message, TrainTask], ...]


class CorrelatedNoise(Strategy):
    """DP-λCGD, or any mechanism, around an inner strategy: it is given model + (Σ clipped updates + ζσ(C⁻¹Z)_t) / cohort.

    >>> CorrelatedNoise(FedAvg(min_train_nodes=60), plan, key=NoiseKey.generate(), ledger=Path("run.db"))

    All rounds of `plan` together are (ε, δ)-DP under adding or removing one user, against whoever sees every released model.

    - `cohort_size`: the users asked in a round, and the divisor of the mean however many answer. By default the inner strategy's
      `min_train_nodes`. With a sampling (Balls-in-Bins, Poisson) it is only the divisor: the expected number of users a round.
    - `key`: all noise and all secret choices come from it. `NoiseKey.simulation(seed)` makes runs repeatable and not private.
    - `ledger`: the file that records the run, and from which the same run goes on after a crash; in memory by default.
    - `identity`: "declared" (a node lists its users) or "authenticated" (a node is one user, named by its registration).
    - `expected_users`: how many users must be reachable before the first round.
    - `min_answers`: a round that fewer users answer is not released, and is tried again (default 1; 0 with a sampling).
    - `patience`: seconds to wait for enough users before a round is skipped.
    - `trainable`: the names of the arrays that are trained, where not all are (frozen layers, LoRA); the others, and counters, go
      along to the nodes and into the result unchanged.
    - `batch_norm`: running statistics are refused, "private" (clipped and noised like parameters) or "fixed" (left as they are).
    - `forward_client_metrics`: also evaluate on clients as the inner strategy does, and return the averages. They are not
      differentially private: ε no longer covers what the run tells.

    `start` opens the ledger and closes it when it ends or fails. `with CorrelatedNoise(…) as strategy:` keeps it open for
    several calls of `start`; a run without a ledger file can be started again only there, because its record ends with it.

    FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad and FedProx work unchanged inside. Strategies that compare clients
    with each other (Krum, FedMedian, QFedAvg) see a single reply and cannot work.

    Raises ValueError for settings that contradict each other. Nothing is opened before `start`.
    """

    def __init__(
        self,
        inner: Strategy,
        plan: Plan,
        *,
        key: NoiseKey,
        ledger: Path | None = None,
        cohort_size: int | None = None,
        identity: Identity = "declared",
        expected_users: int = 1,
        min_answers: int | None = None,
        patience: float = 600.0,
        trainable: Collection[str] | None = None,
        batch_norm: BatchNorm = "refuse",
        forward_client_metrics: bool = False,
    ) -> None:
        planned = getattr(inner, "min_train_nodes", 0) if cohort_size is None else cohort_size
        if planned < 1:
            raise ValueError(
                f"cohort_size must be at least 1, got {planned}: it is the planned number of users of a round"
            )
        sampled = plan.participation.sampling != "none"
        if min_answers is None:
            min_answers = 0 if sampled else 1
        if not 0 <= min_answers <= (0 if sampled else planned):
            raise ValueError(
                f"min_answers must be between 0 and cohort_size = {planned}, and 0 with a secret sampling, because who was "
                f"drawn may not decide whether a round is released; got {min_answers}"
            )
        self.inner = inner
        self.plan = plan
        self.cohort_size = planned
        self.expected_users = expected_users
        self.min_answers = min_answers
        self.patience = patience
        self.trainable = trainable
        self.batch_norm: BatchNorm = batch_norm
        self.forward_client_metrics = forward_client_metrics
        self.dropped: Counter[Cause] = Counter()
        """Replies dropped so far, by cause, and users that nodes left out. It tells about users: for the operator's eyes only."""
        self._roster = Roster(identity)
        self._key = key
        self._ledger_path = ledger
        self._opened: tuple[Ledger, RunNoise] | None = None
        self._attempts: list[int] = []
        self._asked: _Asked | None = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        """Open the ledger: from here on no other process can release anything for this run."""
        if self._ledger_path is None and self._attempts:
            raise ValueError(
                f"{self.releases} rounds of this run are released, and their record was in memory; give a ledger file, or call "
                "start inside `with strategy:`"
            )
        configuration = {"cohort_size": self.cohort_size, "inner": type(self.inner).__name__}
        path = ":memory:" if self._ledger_path is None else self._ledger_path
        ledger = Ledger.open(path, plan=self.plan, configuration=configuration, key=self._key)
        try:
            noise = RunNoise(self.plan, NoiseStream(self._key.noise_of(ledger.stream_id)))
            self._attempts = list(ledger.resume().attempts)
        except BaseException:
            ledger.close()
            raise
        self._opened = ledger, noise

    def close(self) -> None:
        """Close the ledger, if it is open."""
        opened, self._opened, self._asked = self._opened, None, None
        if opened is not None:
            opened[0].close()

    @property
    def _ledger(self) -> Ledger:
        if self._opened is None:
            raise ValueError("the ledger is not open: call start, or use the strategy inside `with strategy:`")
        return self._opened[0]

    @property
    def _noise(self) -> RunNoise:
        assert self._opened is not None  # it is opened together with the ledger
        return self._opened[1]

    @property
    def releases(self) -> int:
        """How many rounds are released so far, as the ledger said when it was open last."""
        return len(self._attempts)

    def _layout(self, arrays: ArrayRecord) -> Layout:
        return layout_of(arrays, trainable=self.trainable, batch_norm=self.batch_norm)

    def summary(self) -> None:
        """Log what is promised and under which assumptions."""
        plan = self.plan
        log(INFO, "\t├──> fedcgd: %s, σ = %.4g, clip norm %g", plan.mechanism, plan.noise_multiplier, plan.clip_norm)
        log(INFO, "\t│\t├── %s", plan.participation)
        log(INFO, "\t│\t├── whole run: %s", plan.guarantee())
        log(INFO, "\t│\t└── each user counts once in the mean: numbers of examples that nodes report are ignored")
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """One message for each node that hosts a user of this round's cohort; none if the round is skipped.

        Raises ValueError if the plan's rounds are used up.
        """
        round = self.releases
        if self._asked is not None:
            self._asked = None
            self._ledger.skip(round, "its replies were never aggregated")
        if round >= self.plan.participation.rounds:
            raise ValueError(f"all {round} planned rounds are released; a further one would not be accounted for")
        layout = self._layout(arrays)
        chosen = self._choose(round, grid)
        if chosen is None:
            return []
        model = flatten(arrays, layout)
        train_config = inner_config(self.inner, round + 1, unflatten(model, layout, carried=False), config)
        by_node: dict[int, list[str]] = {}
        for user, node_id in chosen.items():
            by_node.setdefault(node_id, []).append(user)
        step = lattice_step(clip_norm=self.plan.clip_norm, size=layout.size, stddev=self._noise.largest_stddev)
        attempt = self._ledger.plan_round(round, list(chosen))
        requests = []
        for node_id, users in sorted(by_node.items()):
            task = TrainTask(
                round=round,
                attempt=attempt,
                clip_norm=self.plan.clip_norm,
                step=step,
                users=tuple(users),
                layout=layout,
            )
            requests.append((train_message(node_id, model, train_config, task), task))
        self._asked = _Asked(
            round=round, attempt=attempt, model=model, layout=layout, step=step, requests=tuple(requests)
        )
        return [message for message, _ in requests]

    def _choose(self, round: int, grid: Grid) -> dict[str, int] | None:
        """Users of the round and the node of each; None if too few are there within `patience` seconds."""
        deadline = time.monotonic() + self.patience
        wanted = self.expected_users if round == 0 else 1
        while True:
            nodes = self._roster.refresh(grid)
            users = cohort(
                self.plan.participation,
                round,
                nodes,
                self._ledger.history(list(nodes)),
                cohort_size=self.cohort_size,
                key=self._key.choices_of(self._ledger.stream_id),
            )
            if users is not None and len(nodes) >= wanted:
                return {user: nodes[user] for user in users}
            if time.monotonic() >= deadline:
                log(
                    WARNING,
                    "fedcgd: round %d is skipped: too few users that may take part were reachable for %.0f s "
                    "(%d reachable, cohort of %d). Nothing is released and no noise is used",
                    round + 1,
                    self.patience,
                    len(nodes),
                    self.cohort_size,
                )
                self._ledger.skip(round, "too few users that may take part were reachable")
                return None
            time.sleep(min(_POLL, self.patience))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's next model after the noised mean of the replies, and the ε spent; (None, None) without release."""
        asked, self._asked = self._asked, None
        if asked is None:
            return None, None
        answers = {reply.metadata.reply_to_message_id: reply for reply in replies}
        total = np.zeros(asked.layout.size, np.int64)
        answered = 0
        for message, task in asked.requests:
            result = read_train_reply(answers.get(message.metadata.message_id), task)
            if isinstance(result, NodeSum):
                total += result.update
                answered += result.answered
                if result.answered < len(task.users):
                    self.dropped["left out by its node"] += len(task.users) - result.answered
            else:
                self.dropped[result] += 1
        if answered < self.min_answers:
            log(WARNING, "fedcgd: round %d is not released: too few users answered. It is tried again", asked.round + 1)
            self._ledger.skip(asked.round, "too few users answered")
            return None, None
        plan = self.plan
        self._ledger.record_aggregated(asked.round, asked.attempt)
        try:
            with undone_on_failure(self.inner):
                released = self._release(asked, total)
        except Exception:
            with suppress(Exception):  # what is raised is the failure, not that nothing can be recorded either
                self._ledger.skip(asked.round, "it could not be released")
            raise
        self._attempts.append(asked.attempt)
        guarantee = plan.quick_guarantee(released=self.releases)
        log(INFO, "fedcgd: round %d of %d is released; %s", self.releases, plan.participation.rounds, guarantee)
        metrics = MetricRecord({"epsilon": guarantee.epsilon, "delta": guarantee.delta, "releases": self.releases})
        return unflatten(released, asked.layout), metrics

    def _release(self, asked: _Asked, total: Integers) -> Flat:
        """The model of the round in flight, from the sum of its updates; it is in the ledger when this returns."""
        self._noise.add(total, [*self._attempts, asked.attempt], asked.step)
        noised_mean = asked.model.astype(np.float64) + from_lattice(total, asked.step) / self.cohort_size
        noised = unflatten(noised_mean.astype(np.float32), asked.layout, carried=False)
        stepped = inner_step(self.inner, asked.round + 1, noised)
        released = flatten(stepped, asked.layout)
        # Durable first: what has left the process can then never be followed by another release under this noise.
        self._ledger.record_released(asked.round, asked.attempt, released.tobytes(), inner_state(self.inner))
        return released

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
    ) -> Result:
        """Run until all planned rounds are released, or for `num_rounds` tries if that is fewer (a skipped round is a try).

        As Flower's `Strategy.start`, with replies matched to requests and the end that the plan sets. Metrics of the training are
        the ε spent, by release; `evaluate_fn(release, arrays)` sees the initial model as release 0 and then every released one.
        """
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
    ) -> Result:
        log(INFO, "Starting %s around %s:", type(self).__name__, type(self.inner).__name__)
        self.summary()
        result = Result()
        result.arrays = arrays = self._resume(initial_arrays)
        if evaluate_fn is not None:
            self._evaluate(result, self.releases, arrays, evaluate_fn)
        planned = self.plan.participation.rounds
        for server_round in range(1, (planned if num_rounds is None else num_rounds) + 1):
            if self.releases >= planned:
                break
            config = ConfigRecord() if train_config is None else train_config
            messages = self.configure_train(server_round, arrays, config, grid)
            replies = [reply for reply in send_and_receive(grid, messages, timeout) if reply is not None]
            released, metrics = self.aggregate_train(server_round, replies)
            if released is None or metrics is None:
                continue
            result.arrays = arrays = released
            result.train_metrics_clientapp[self.releases] = metrics
            self._evaluate_on_clients(result, grid, arrays, evaluate_config, timeout)
            if evaluate_fn is not None:
                self._evaluate(result, self.releases, arrays, evaluate_fn)
        return result

    def _resume(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """The model to go on from: the last one released, if the ledger has one, with the inner strategy's state."""
        run = self._ledger.resume()
        if run.model is None or run.state is None:
            return initial_arrays
        layout = self._layout(initial_arrays)
        model = np.frombuffer(run.model, np.float32)
        if len(model) != layout.size:
            raise ValueError(
                f"the ledger's model has {len(model)} parameters, and initial_arrays {layout.size}; give the same model"
            )
        restore_inner_state(self.inner, run.state)
        log(INFO, "fedcgd: going on after release %d of %d", run.round, self.plan.participation.rounds)
        return unflatten(model, layout)

    def _evaluate(self, result: Result, release: int, arrays: ArrayRecord, evaluate_fn: EvaluateFn) -> None:
        metrics = evaluate_fn(release, arrays)
        if metrics is not None:
            result.evaluate_metrics_serverapp[release] = metrics

    def _evaluate_on_clients(
        self, result: Result, grid: Grid, arrays: ArrayRecord, config: ConfigRecord | None, timeout: float
    ) -> None:
        config = ConfigRecord() if config is None else config
        messages = list(self.configure_evaluate(self.releases, arrays, config, grid))
        if not messages:
            return
        replies = [reply for reply in send_and_receive(grid, messages, timeout) if reply is not None]
        metrics = self.aggregate_evaluate(self.releases, replies)
        if metrics is not None:
            result.evaluate_metrics_clientapp[self.releases] = metrics
