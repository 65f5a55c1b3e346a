"""What `CorrelatedNoise.start` does and returns: tries rounds until all are released, and has each release evaluated."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from logging import INFO, WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcgd.ledger import client_metrics
from fedcgd.support.numbers import plural
from fedcgd_flower.evaluator import Evaluator
from fedcgd_flower.flower_private import log, log_info, log_warning
from fedcgd_flower.grid import receive, send_and_receive
from fedcgd_flower.inner_state import EditedConfig
from fedcgd_flower.layout import Layout, equal_arrays, flatten, unflatten
from fedcgd_flower.problems import HINTS, RejectionReason
from fedcgd_flower.reporting import RoundReport, config_text, drowned, epsilon_text, metrics_text
from fedcgd_flower.round import TrainingRounds

OnRelease = Callable[["ReleaseEvent"], object]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, kw_only=True)
class ReleaseEvent:
    """What `on_release` is given after a release: nothing that is not released.

    Metrics have the names that Flower's `Result` has.

    Attributes:
        release: its number, from 1.
        planned: the rounds of the plan.
        arrays: the whole model, as in the result.
        train_metrics: the ε spent, as `train_metrics_clientapp` of the result has it.
        evaluate_metrics_serverapp: what `evaluate_fn` measured; None if there is none, or it returned None.
        evaluate_metrics_clientapp: what users measured: with noise if it is a `PrivateEvaluation`, without if metrics of clients
            are forwarded; None if this release was not evaluated.
    """

    release: int
    planned: int
    arrays: ArrayRecord
    train_metrics: MetricRecord
    evaluate_metrics_serverapp: MetricRecord | None
    evaluate_metrics_clientapp: MetricRecord | None

    @property
    def metrics(self) -> dict[str, float]:
        """All numbers of the three records, for `fedcgd.release.to_wandb` and the like."""
        records = (self.train_metrics, self.evaluate_metrics_serverapp, self.evaluate_metrics_clientapp)
        return {n: v for record in records for n, v in (record or {}).items() if isinstance(v, int | float)}


@dataclass(repr=False)
class RunResult(Result):
    """Flower's `Result` of all releases of a run, also of those before it was resumed.

    Attributes:
        arrays (ArrayRecord): the model that was released last, or the initial one.
        train_metrics_clientapp (dict[int, MetricRecord]): release → the ε spent.
        evaluate_metrics_serverapp (dict[int, MetricRecord]): release → what `evaluate_fn` measured.
        evaluate_metrics_clientapp (dict[int, MetricRecord]): release → what users measured.
        planned: the rounds of the plan.
        released: the rounds that gave a model by now.
        spent: the rounds that gave none and are not tried again: others were asked for their noise, in vain.
        stopped: why the run ended before its plan; empty if it did not.
        advice: what can be done about that, as far as it is known.
    """

    planned: int = 0
    released: int = 0
    spent: int = 0
    stopped: str = ""
    advice: str = ""

    @property
    def complete(self) -> bool:
        """Whether every planned round is released, or spent."""
        return self.released + self.spent == self.planned

    @property
    def done(self) -> str:
        """How many rounds are released, and how many are spent, if any are."""
        spent = f", {self.spent} spent without a model" if self.spent else ""
        return f"{self.released} of {plural(self.planned, 'round', 'rounds')} released{spent}"

    def __repr__(self) -> str:
        stopped = f" ({self.stopped})" if self.stopped else ""
        return f"{self.done}{stopped}\n\n{super().__repr__()}"


class IncompleteRunError(RuntimeError):
    """A run ended before its plan without being asked to. With its ledger and its key it can go on.

    Attributes:
        result (RunResult): what was released.
    """

    def __init__(self, result: RunResult, *, recorded: bool = True) -> None:
        remedy = (
            f"{'Then start' if result.advice else 'Start'} again with the same ledger and key to go on"
            if recorded
            else "Its record is in memory and ends with this process; with a ledger file and a key file a run can go on"
        )
        nodes = "" if result.released else ". The reason for a node's failure is in that node's log alone"
        super().__init__(
            f"{result.done}: {result.stopped}{nodes}. "
            f"{f'What helps: {result.advice}. ' if result.advice else ''}{remedy}"
        )
        self.result = result


@dataclass(frozen=True, kw_only=True)
class RunLoop:
    """The loop over `rounds`, by way of the methods of `strategy`, as Flower's own loop calls them."""

    strategy: Strategy
    rounds: TrainingRounds
    evaluator: Evaluator | None
    grid: Grid
    timeout: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFn | None

    def begin(self, initial_arrays: ArrayRecord) -> RunResult:
        """Where the run stands: the last model that was released, if the ledger has one, and the metrics of all releases."""
        inner, plan = self.rounds.settings.inner, self.rounds.settings.plan
        log(INFO, f"Starting {type(self.strategy).__name__} around {type(inner).__name__}:")
        run = self.rounds.resume()
        result = RunResult(initial_arrays, planned=plan.participation.rounds)
        self._count(result)
        for kind, metrics in _kinds(result).items():
            metrics |= {release: MetricRecord(kept) for release, kept in self.rounds.ledger.metrics(kind).items()}
        if self.evaluator is not None:
            result.evaluate_metrics_clientapp |= self.evaluator.released()
        # Before the first release too: what it refuses is refused before any work.
        layout = self.rounds.layout(initial_arrays)
        if not result.complete:
            self.rounds.check_inner(initial_arrays, self.train_config)
            if loud := drowned(self.rounds.settings, layout.size):
                log_warning(loud)
            if pairs := equal_arrays(initial_arrays, layout):
                one, other = pairs[0]
                log_warning(
                    f"the arrays {one} and {other} are equal. If they are one tensor of the model, it would be clipped and "
                    "noised twice: begin with initial_arrays=arrays_of(model), which has it once. If one is a copy, all is well"
                )
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
            log_warning(
                f"all {result.planned} rounds of this run were released{' or spent' * bool(result.spent)} before: nothing is "
                "trained, and the result is its last model. Another run has another ledger and another key"
            )
        else:
            log_info(f"going on after release {run.round} of {result.planned}")
        result.arrays = unflatten(model, layout)
        return result

    def run(self, result: RunResult, num_rounds: int | None, on_release: OnRelease | None) -> RunResult:
        """All releases, when the last planned round is released or `num_rounds` tries are made; `result` is what began.

        Raises IncompleteRunError if the run ends before its plan without being asked to.
        """
        started = time.monotonic()
        log(INFO, f"\t├── Rounds: {result.done}")
        log(INFO, f"\t├── ConfigRecord (train): {config_text(self.train_config)}")
        log(INFO, f"\t├── ConfigRecord (evaluate): {config_text(self.evaluate_config)}")
        self.strategy.summary()
        rounds = self.rounds
        rounds.report = RoundReport(rounds.releases - 1, result.planned)
        self._evaluate(result)
        if rounds.report.notes:
            log(INFO, f"Release {rounds.releases}: {rounds.report.notes[0]}")
        self._evaluate_privately(result)  # if the server died before it could
        asked_for_less = num_rounds is not None and num_rounds < result.planned - rounds.releases
        if num_rounds is not None and num_rounds > result.planned:
            log_warning(f"num_rounds is {num_rounds}, and the plan ends after {result.planned}")
        tries = failures = 0
        failure = ""
        most_tries = num_rounds if asked_for_less else None
        # After ten tries in a row without a release something is wrong that another try does not mend.
        while rounds.releases < result.planned and tries != most_tries and failures < 10:
            if rounds.noise.gives_up:
                break
            tries += 1
            try:
                released = self._try_round(result)
                if released:
                    self._evaluate_privately(result)
                    self._evaluate_on_clients(result)
                    self._evaluate(result)
                    self._call_on_release(result, on_release)
            except BaseException:
                rounds.abort_round("interrupted")
                raise
            failures, failure = (0, failure) if released else (failures + 1, rounds.report.failure)
            log(INFO if released and not rounds.report.noise_alone else WARNING, str(rounds.report))
        if not result.complete:
            lost = rounds.report.lost if failures else Counter[RejectionReason]()
            reasons = [reason for reason, _ in lost.most_common()]
            why = f"; not released: {failure}" if failure else ", as asked for"
            why = f"; {rounds.noise.gives_up}; the last one: {failure}" if rounds.noise.gives_up else why
            result.stopped = f"after {plural(tries, 'try', 'tries')}{why}" + (
                f" ({', '.join(reasons)})" if reasons else ""
            )
            result.advice = "; ".join(HINTS[reason] for reason in reasons if reason in HINTS)
            if rounds.noise.gives_up:
                result.advice = rounds.noise.advice
        log(INFO, f"Finished in {time.monotonic() - started:.1f} s with {result.done}")
        log(INFO, f"\t└── {epsilon_text(self.rounds.settings.plan, rounds.releases, result.spent)}")
        if self.evaluator is not None:
            log(INFO, f"\t└── {self.evaluator.summary()}")
        if not result.complete:
            log_warning(f"the run ended before its plan: {result.stopped}")
            if not asked_for_less or rounds.noise.gives_up:
                raise IncompleteRunError(result, recorded=self.rounds.settings.ledger is not None)
        return result

    def _try_round(self, result: RunResult) -> bool:
        """Whether a round was released; then `result` has its model."""
        strategy, rounds = self.strategy, self.rounds
        messages = list(strategy.configure_train(rounds.releases + 1, result.arrays, self.train_config, self.grid))
        # Summed up as they come, so that no two of a large model need be here at once.
        replies = receive(self.grid, messages, self.timeout)
        del messages  # they hold a model
        released, metrics = strategy.aggregate_train(rounds.releases + 1, replies)
        self._count(result)
        if released is None or metrics is None:
            return False
        result.arrays = released
        result.train_metrics_clientapp[rounds.releases] = metrics
        return True

    def _count(self, result: RunResult) -> None:
        result.spent = self.rounds.spent
        result.released = self.rounds.releases - result.spent

    def _evaluate(self, result: RunResult) -> None:
        """Have `evaluate_fn` look at the last released model."""
        if self.evaluate_fn is not None:
            self._keep("evaluate", result, self.evaluate_fn(self.rounds.releases, result.arrays))

    def _evaluate_on_clients(self, result: RunResult) -> None:
        """Have clients evaluate the last released model as the inner strategy does, if their metrics are forwarded."""
        strategy, release, ledger = self.strategy, self.rounds.releases, self.rounds.ledger
        given, saved = self.evaluate_config, ledger.metrics(client_metrics.CONFIG)
        config = ConfigRecord(dict(given))
        if saved:  # what the inner strategy has made of it so far
            config = EditedConfig.from_description(saved[0]).for_next_round(given)
        messages = list(strategy.configure_evaluate(release, result.arrays, config, self.grid))
        if dict(config) != dict(given):
            ledger.record_metrics(client_metrics.CONFIG, 0, EditedConfig(given, config).to_description())
        if not messages:
            return
        replies = [reply for reply in send_and_receive(self.grid, messages, self.timeout) if reply is not None]
        self._keep(client_metrics.KIND, result, strategy.aggregate_evaluate(release, replies))

    def _evaluate_privately(self, result: RunResult) -> None:
        """Have users evaluate the last released model, if that is due and not done."""
        evaluator, release = self.evaluator, self.rounds.releases
        if evaluator is None or release in evaluator.released():
            return
        if not evaluator.evaluation.is_due(release, result.planned):
            return
        layout = self.rounds.layout(result.arrays)
        config = ConfigRecord(dict(self.evaluate_config))
        config["server-round"] = release
        model = flatten(result.arrays, layout)
        measured = evaluator.evaluate(release, model, layout, config, self.grid, self.rounds.directory, self.timeout)
        if measured is not None:
            result.evaluate_metrics_clientapp[release] = measured
            self.rounds.report.notes.append(metrics_text("evaluate on users, private", measured))

    def _call_on_release(self, result: RunResult, on_release: OnRelease | None) -> None:
        """Tell the hook of the last release, which is on record, and what was measured of it."""
        if on_release is None:
            return
        release = self.rounds.releases
        arrays = ArrayRecord()
        arrays.update(result.arrays)  # its own record: what is put in or taken out there does not reach the next round
        event = ReleaseEvent(
            release=release,
            planned=result.planned,
            arrays=arrays,
            train_metrics=result.train_metrics_clientapp[release],
            evaluate_metrics_serverapp=result.evaluate_metrics_serverapp.get(release),
            evaluate_metrics_clientapp=result.evaluate_metrics_clientapp.get(release),
        )
        on_release(event)

    def _keep(self, kind: str, result: RunResult, metrics: MetricRecord | None) -> None:
        """Put what was measured after the last release in the result and in the ledger, for the result of a run that goes on."""
        if metrics is not None:
            release = self.rounds.releases
            _kinds(result)[kind][release] = metrics
            self.rounds.ledger.record_metrics(kind, release, metrics)
            self.rounds.report.notes.append(metrics_text(kind, metrics))


def _kinds(result: RunResult) -> dict[str, dict[int, MetricRecord]]:
    """Where the metrics that the ledger keeps by kind are in the result."""
    return {
        "train": result.train_metrics_clientapp,
        client_metrics.KIND: result.evaluate_metrics_clientapp,
        "evaluate": result.evaluate_metrics_serverapp,
    }
