"""What `CorrelatedNoise.start` does and returns: tries rounds until all are released, and has each release evaluated."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcgd.accounting.guarantee import NO_NOISE, large_delta, rounded_up
from fedcgd.ledger import Ledger
from fedcgd.mechanisms.error import error_norms
from fedcgd.plan import Plan
from fedcgd.support.numbers import plural
from fedcgd_flower.evaluation import Evaluator
from fedcgd_flower.flower_private import log, log_info, log_warning
from fedcgd_flower.grid import receive
from fedcgd_flower.inner import own_aggregation, unsaved
from fedcgd_flower.inner import settings as inner_settings
from fedcgd_flower.layout import Layout, unflatten
from fedcgd_flower.problems import HINTS
from fedcgd_flower.round import RoundReport, TrainingRounds

if TYPE_CHECKING:
    from fedcgd_flower.strategy import RunSettings

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
        evaluate_metrics_clientapp: what users measured, with the noise of the `PrivateEvaluation`; None if this release was not
            evaluated.
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


OnRelease = Callable[[ReleaseEvent], object]


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
        spent = f", {self.spent} consumed without a model" if self.spent else ""
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


@dataclass(frozen=True)
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
        ledger = self.rounds.ledger
        consumed = {opened.round + 1 for opened in ledger.openings() if opened.state == "spent"}
        clipping, measured = ledger.metrics("train"), ledger.metrics("evaluate")
        for release in sorted(set(range(1, self.rounds.releases + 1)) - consumed):
            result.train_metrics_clientapp[release] = self._with_epsilon(release, clipping.get(release, {}))
        result.evaluate_metrics_serverapp |= {release: MetricRecord(kept) for release, kept in measured.items()}
        if self.evaluator is not None:
            result.evaluate_metrics_clientapp |= self.evaluator.released()
        # Before the first release too: what it refuses is refused before any work.
        layout = self.rounds.layout(initial_arrays)
        if not result.complete:
            self.rounds.check_inner(initial_arrays, self.train_config)
            if loud := drowned(self.rounds.settings, layout.size):
                log_warning(loud)
        if run.model is None:
            return result
        recorded = Layout.from_json(run.layout)
        if recorded != layout:
            raise ValueError(
                f"the ledger's model trains {recorded.size} parameters in {recorded}, and initial_arrays {layout.size} in "
                f"{layout}; give the same model and trainable"
            )
        model = np.frombuffer(run.model, np.float32)
        if result.complete:
            log_warning(
                f"all {result.planned} rounds of this run were released{' or consumed' * bool(result.spent)} before: nothing is "
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
                    self._evaluate(result)
                    self._call_on_release(result, on_release)
            except BaseException:
                rounds.abort_round("interrupted")
                raise
            failures, failure = (0, failure) if released else (failures + 1, rounds.report.failure)
            log(INFO if released and not rounds.report.noise_alone else WARNING, str(rounds.report))
        if not result.complete:
            reasons = [reason for reason, _ in rounds.report.lost.most_common()] if failures else []
            why = f"; not released: {failure}" if failure else ", as asked for"
            result.advice = "; ".join(HINTS[reason] for reason in reasons if reason in HINTS)
            if rounds.noise.gives_up:
                why, result.advice = f"; {rounds.noise.gives_up}; the last one: {failure}", rounds.noise.advice
            causes = f" ({', '.join(reasons)})" if reasons else ""
            result.stopped = f"after {plural(tries, 'try', 'tries')}{why}{causes}"
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
        metrics = self._with_epsilon(rounds.releases, metrics)
        result.train_metrics_clientapp[rounds.releases] = metrics
        rounds.report.add_epsilon(cast(float, metrics["epsilon"]), rounds.settings.plan.delta)
        return True

    def _with_epsilon(self, release: int, metrics: Mapping[str, Any]) -> MetricRecord:
        """`metrics` of a release after the ε spent by then, which follows from the plan: no release waits for it."""
        plan = self.rounds.settings.plan
        epsilon, planned = plan.quick_guarantee(released=release).epsilon, plan.guarantee().epsilon
        spent = {"epsilon": epsilon, "epsilon-planned": planned, "delta": plan.delta, "releases": release}
        return MetricRecord({**metrics, **spent})

    def _count(self, result: RunResult) -> None:
        result.spent = self.rounds.spent
        result.released = self.rounds.releases - result.spent

    def _evaluate(self, result: RunResult) -> None:
        """Have `evaluate_fn` look at the last released model; the ledger keeps what it says, for a run that goes on."""
        release = self.rounds.releases
        metrics = None if self.evaluate_fn is None else self.evaluate_fn(release, result.arrays)
        if metrics is not None:
            result.evaluate_metrics_serverapp[release] = metrics
            self.rounds.ledger.record_metrics("evaluate", release, metrics)
            self.rounds.report.notes.append(metrics_text("evaluate", metrics))

    def _evaluate_privately(self, result: RunResult) -> None:
        """Have users evaluate the last released model, if that is due and not done."""
        if self.evaluator is None:
            return
        release = self.rounds.releases
        measured = self.evaluator.evaluate(release, result.arrays, self.evaluate_config, self.grid, self.timeout)
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


# What a run promises, in words for the operator: ε, of what, and under which assumptions.


def log_guarantee(settings: "RunSettings", released: int) -> None:
    """Log what is promised of a run of which so many rounds are released, and under which assumptions."""
    plan, cohort, adaptive = settings.plan, settings.cohort, settings.adaptive_clipping
    if plan.noiseless:
        log_warning(f"{NO_NOISE}. Clipping is as in the real run; give the plan a noise_multiplier for that")
    if large := large_delta(plan.delta, max(cohort.expected_users, cohort.size), exposed=1.0):
        log_warning(large)
    log(INFO, f"\t├──> fedcgd: {plan.mechanism}, σ = {plan.noise_multiplier:.4g}, clip norm {plan.clip_norm:g}")
    if adaptive is not None:
        louder = 1 / math.sqrt(1 - adaptive.indicator_norm(plan.noise_multiplier, cohort.size) ** 2)
        log(INFO, f"\t│\t├── the clip norm adapts to the {adaptive.quantile:g} quantile: {louder:.4g} times the noise")
    log(INFO, f"\t│\t├── {plan.participation}; sampling: {plan.participation.sampling}")
    log(
        INFO,
        f"\t│\t├── {plural(cohort.size, 'user', 'users')} a round ({cohort.source}), and the mean is over so many",
    )
    log(INFO, "\t│\t├── each user counts once: numbers of examples per client are not used as weights")
    log(INFO, f"\t│\t├── the ledger: {settings.path.absolute() if settings.path else 'in memory; not kept'}")
    log(INFO, f"\t│\t├── this run: {epsilon_text(plan, released)}")
    log(INFO, "\t│\t└── ε so far, below, holds if nobody looks at a released model to decide when the run ends")


def drowned(settings: "RunSettings", size: int) -> str:
    """That the noise exceeds what users can add to a model of so many parameters by far, and what helps; "" if it does not.

    The noise in the last model is compared with all rounds' updates together, as if every user pulled in the same direction.
    """
    plan, cohort = settings.plan, settings.cohort.size
    rounds = plan.participation.rounds
    noise = (
        error_norms(plan.mechanism, rounds).max_se(plan.noise_multiplier)
        * settings.noise.louder
        * math.sqrt(size)
        / cohort
    )
    if noise <= rounds:
        return ""
    return (
        f"the noise exceeds the signal by far: after {plural(rounds, 'round', 'rounds')} it moves the model's {size} parameters "
        f"by about {noise:.3g} clip norms, and the updates of {plural(cohort, 'user', 'users')} a round by at most {rounds}, if "
        "all pulled in one direction. Such a model guesses. What helps: more users a round, fewer parameters (trainable=, a "
        "smaller model), or a larger ε; fedcgd plan says what is possible with the users there are"
    )


def log_inner(settings: "RunSettings") -> None:
    """Log the inner strategy with what of it changes training, and what of it does not apply here."""
    inner = settings.inner
    rates = ", ".join(f"{name} = {value}" for name, value in inner_settings(inner)["training"].items())
    log(INFO, f"\t├──> Inner strategy: {type(inner).__name__}({rates})")
    if held := unsaved(inner):
        log_info(
            f"{', '.join(held)} of {type(inner).__name__} cannot be saved with a release: what a round changes in it is lost "
            "where the run is resumed. Give the strategy state() and restore(state) if that matters"
        )
    if not _is_flowers(getattr(inner, "train_metrics_aggr_fn", None)):
        log_warning("train_metrics_aggr_fn is not called: metrics of training stay on the nodes")
    if (kind := own_aggregation(inner)) is not None:
        log_warning(
            f"{kind}.aggregate_train is its own, and sees a round's noised sum before the round is on record. If the server "
            "stops there, the round is repeated under other noise: what aggregate_train keeps of it (a model that it saves, "
            "sends or logs) is not covered by ε. Keep models in on_release, which is called with releases only"
        )
    fraction = getattr(inner, "fraction_evaluate", 1.0)
    if fraction and settings.evaluation is None:
        log_info(
            f"evaluation on clients (fraction_evaluate = {fraction:g}) is left out, because ε does not cover it; "
            "evaluation=PrivateEvaluation(…) measures with noise, and fraction_evaluate=0 says that none is wanted"
        )


def _is_flowers(function: object) -> bool:
    """Whether `function` is Flower's own, or None: not one of the app's author."""
    return function is None or str(getattr(function, "__module__", "")).startswith("flwr.")


def epsilon_text(plan: Plan, released: int, spent: int = 0) -> str:
    """ε of the planned run and, of a part of it, also the smaller one and the condition under which that holds.

    Of the rounds that count as `released`, `spent` gave no model.
    """
    whole = plan.guarantee()
    if released >= plan.participation.rounds or plan.noiseless:
        return str(whole)
    if not released:
        return f"nothing is released; the planned run: {whole}"
    so_far = plan.quick_guarantee(released=released)
    return (
        f"the planned run: {whole}; for the {plural(released, 'round', 'rounds')} released{' or consumed' * bool(spent)}, ε ≤ "
        f"{rounded_up(so_far.epsilon, 4)}, provided that nobody looked at a released model to decide that the run ends here"
    )


def log_other_runs(ledger: Ledger) -> None:
    """Say that people who were in earlier runs of the key, or of earlier keys of its register, pay for this one too."""
    others = ledger.other_runs()
    if not others:
        return
    named = [
        f"{run.ledger} ({plural(run.released, 'round', 'rounds')}{', sealed' * bool(run.sealed)})" for run in others
    ]
    more = f", and {len(named) - 5} before" if len(named) > 5 else ""
    log_warning(
        f"{plural(len(others), 'earlier run has', 'earlier runs have')} released rounds by the register of this key: "
        f"{', '.join(named[-5:])}{more}. For everybody in one of them and in this run, ε composes: fedcgd ledger compose "
        "with their ledgers and this one's says to what, and budget=JointBudget(…, after=[…]) keeps people within one ε"
    )


def metrics_text(where: str, metrics: MetricRecord) -> str:
    """One part of a line: what was measured, and where."""
    numbers = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )
    return f"{where}: {', '.join(numbers)}"
