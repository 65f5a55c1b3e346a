"""Accuracy and loss on the users' own data, as noised sums with a budget of their own.

Each user of an evaluation's cohort measures the released model on its data and adds a vector of norm at most 1
(`messages.answer`). The sum gets the noise of the evaluation's plan, on the integer grid, and is read as the mean over the
planned cohort. Who did not answer counts as the middle of a metric's range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import INFO
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedcgd.accounting import JointGuarantee
from fedcgd.ledger import JointBudget, Ledger
from fedcgd.ledger.store import EVALUATION_OF, evaluation_ledger
from fedcgd.ledger.verification import with_evaluations
from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd.plan import Plan
from fedcgd.release import ReleaseProtocol
from fedcgd.support.numbers import as_positive, plural
from fedcgd.support.records import MEMORY
from fedcgd_flower.clipping import Clipping
from fedcgd_flower.cohort import Draw
from fedcgd_flower.flower_private import log, log_info, log_warning
from fedcgd_flower.grid import send_and_receive
from fedcgd_flower.inner import record_keys_of
from fedcgd_flower.layout import flatten
from fedcgd_flower.messages import TrainTask, answers_task, evaluate_message, model_records, scale_of
from fedcgd_flower.noise_provider import NoiseUnavailableError, Sums
from fedcgd_flower.problems import EVALUATION_HINT

if TYPE_CHECKING:
    from fedcgd_flower.round import TrainingRounds
    from fedcgd_flower.strategy import RunSettings


@dataclass(frozen=True, kw_only=True)
class PrivateEvaluation:
    """Every `every` releases, and after the last one, a cohort of users evaluates the released model on its own data.

    The budget comes on top of that of the training: the log and the result say ε of both together. The record is a ledger of its
    own next to that of the training (run.db.evaluation).

    Args:
        plan: how many evaluations there may be, how often and how far apart one user takes part in them, and their noise. Its
            clip norm is 1: what a user adds has that norm.
        bounds: the metrics that the nodes' evaluate functions reply, and the largest value of each; what is larger, or below 0,
            is cut. The noise is in proportion to the bound.
        every: so many releases lie between two evaluations.
        cohort_size: users of an evaluation, and divisor of the mean; by default that of the training.

    Raises:
        ValueError: for values out of range, and a plan without noise.
        TypeError: for what is no plan.

    >>> from fedcgd import DPSGD, Participation
    >>> plan = Plan.calibrated(DPSGD(), Participation(rounds=5), clip_norm=1.0, epsilon=1, delta=1e-5)
    >>> evaluation = PrivateEvaluation(plan=plan, bounds={"eval_acc": 1.0, "eval_loss": 4.0}, every=10)
    >>> {name: round(stddev, 3) for name, stddev in evaluation.noise(cohort_size=1000).items()}
    {'eval_acc': 0.006, 'eval_loss': 0.024}
    """

    plan: Plan
    bounds: Mapping[str, float]
    every: int = 1
    cohort_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.plan, Plan):
            raise TypeError(f"plan must be a fedcgd Plan, for example Plan.calibrated(…); got {self.plan!r}")
        if self.plan.noiseless:
            raise ValueError("the plan of a private evaluation needs noise: noise_multiplier above 0")
        if self.plan.clip_norm != 1:
            raise ValueError(f"the plan of an evaluation has clip_norm 1, what a user adds; got {self.plan.clip_norm}")
        if not self.bounds:
            raise ValueError('bounds must name a metric, for example {"eval_acc": 1.0}')
        for name, bound in self.bounds.items():
            as_positive(f"the bound of {name!r}", bound)
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        if self.cohort_size is not None and self.cohort_size < 1:
            raise ValueError(f"cohort_size must be at least 1, got {self.cohort_size}")

    def to_description(self) -> dict[str, Any]:
        """All settings, as JSON-able values."""
        return {**vars(self), "plan": self.plan.to_description(), "bounds": dict(self.bounds)}

    def is_due(self, release: int, rounds: int) -> bool:
        """Whether a release is evaluated.

        Args:
            release: its number, from 1.
            rounds: those of the training.
        """
        return release > 0 and (release % self.every == 0 or release == rounds)

    def sums(self) -> Sums:
        """What is summed in an evaluation. Its `cohort_size` is given, or the training has set it."""
        return Sums(plan=self.plan, size=lambda _: len(self.bounds), cohort_size=self.cohort_size or 1)

    def noise(self, cohort_size: int, louder: float = 1.0) -> dict[str, float]:
        """The largest standard deviation of the noise on each metric, in its own units.

        Args:
            cohort_size: the users of an evaluation.
            louder: the standard deviation of the noise, in units of the plan's (`NoiseShares.louder` of keepers).
        """
        rounds = self.plan.participation.rounds
        inverse = self.plan.mechanism.inverse_row(rounds - 1, rounds)
        stddev = self.plan.noise_multiplier * float(np.linalg.norm(inverse)) * louder
        stddev /= scale_of(len(self.bounds)) * cohort_size
        return {name: bound * stddev for name, bound in self.bounds.items()}

    def check(self, plan: Plan, budget: JointBudget | None) -> None:
        """Refuse a training that cannot be evaluated so.

        Args:
            plan: of the training.
            budget: its joint budget.

        Raises:
            ValueError: for a joint budget, a training without noise, and a plan of too few evaluations.
        """
        if budget is not None:
            raise ValueError(
                "a joint budget does not count the evaluations of the run that it is for: leave out evaluation= or budget="
            )
        if plan.noiseless:
            raise ValueError(
                "a private evaluation goes with a training that has noise: leave evaluation= out while σ = 0"
            )
        rounds, planned = plan.participation.rounds, self.plan.participation.rounds
        due = sum(self.is_due(release, rounds) for release in range(1, rounds + 1))
        if planned < due:
            raise ValueError(
                f"{rounds} rounds, evaluated every {self.every} and at the end, are {due} evaluations, and their plan has "
                f"{planned}: plan Participation(rounds={due}, …), or take a larger `every`"
            )


class Evaluator:
    """The evaluations of a run: asks, sums, adds noise, and keeps the record. One process at a time, as the ledger's."""

    def __init__(self, evaluation: PrivateEvaluation, settings: "RunSettings", rounds: "TrainingRounds") -> None:
        self.evaluation = evaluation
        self.cohort_size = evaluation.sums().cohort_size
        self._settings, self._rounds = settings, rounds
        self._record_keys = record_keys_of(settings.inner)
        configuration = {EVALUATION_OF: rounds.ledger.stream_id, **evaluation.to_description()}
        configuration |= settings.noise.to_description()
        path = None if settings.path is None else evaluation_ledger(settings.path)
        if path is not None and rounds.releases and not path.exists():
            raise ValueError(
                f"{path}, the record of the evaluations of the run in {settings.ledger}, is not there, and without it they would "
                "be repeated beyond their budget: put it back, or begin another run"
            )
        self._ledger = Ledger.open(
            path or MEMORY, plan=evaluation.plan, configuration=configuration, key=settings.key, purpose="evaluation"
        )
        self._record = ReleaseProtocol(self._ledger, evaluation.plan, settings.key)
        self._noise = rounds.noise.of_evaluations(evaluation.sums(), self._ledger)

    def close(self) -> None:
        """Close the ledger."""
        self._ledger.close()

    @cached_property
    def together(self) -> JointGuarantee:
        """ε of the planned training and the planned evaluations, for a user who is in both."""
        return with_evaluations(self._settings.plan, self.evaluation.plan)

    def summary(self) -> str:
        """What is promised: of the evaluations, and of training and evaluations together."""
        return (
            f"evaluations: {self.evaluation.plan.guarantee()}; training and evaluations together: {self.together}; "
            f"samplings: {self._settings.plan.participation.sampling}, {self.evaluation.plan.participation.sampling}"
        )

    def log_guarantee(self) -> None:
        """Log what is promised, and how large the noise on each metric is."""
        log(INFO, f"\t├──> fedcgd: {self.summary()}")
        noise = self.evaluation.noise(self.cohort_size, self._settings.noise.louder)
        metrics = ", ".join(f"{name} ± {stddev:.2g}" for name, stddev in noise.items())
        log(INFO, f"\t│\t└── {plural(self.cohort_size, 'user', 'users')} an evaluation; noise: {metrics}")

    def released(self) -> dict[int, MetricRecord]:
        """Release of the training → what was measured of it."""
        kept = self._ledger.metrics("train").values()
        return {int(metrics["release"]): _public_metrics(metrics) for metrics in kept}

    def evaluate(
        self, release: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, timeout: float
    ) -> MetricRecord | None:
        """What users measured of the model that is release number `release`, with noise.

        None if it is not to be measured, or was already, or could not be.
        """
        if release in self.released() or not self.evaluation.is_due(release, self._settings.plan.participation.rounds):
            return None
        plan, round = self.evaluation.plan, self._record.count
        if round >= plan.participation.rounds:  # a consumed one then is missing at the end
            log_warning(f"no evaluation: all {round} that are planned are released or consumed")
            return None
        if why := self._noise.gives_up:
            log_warning(f"no evaluation: {why}")
            return None
        nodes, layout = self._rounds.directory.refresh(grid), self._rounds.layout(arrays)
        config, model = (
            ConfigRecord({**config, "server-round": release}),
            model_records(flatten(arrays, layout), layout),
        )
        choices = self._settings.key.choices_of(self._ledger.stream_id)
        draw = Draw(plan.participation, round, self._ledger.history(list(nodes)), choices)
        chosen = draw.at_nodes(nodes, self.cohort_size, self._noise.least_nodes)
        if chosen is None:
            self._skip("too few users that may take part in an evaluation were reachable")
            return None
        terms = self._noise.terms(grid, layout.size)
        if isinstance(terms, str):
            self._skip(terms)
            return None
        attempt = self._record.plan_round(list(chosen))
        try:
            task = TrainTask(
                round=round,
                attempt=attempt,
                clipping=Clipping(clip_norm=1.0, grid=terms.lattice),
                users=tuple(chosen),
                layout=layout,
                record_keys=self._record_keys,
            )
            tasks = task.by_node(chosen)
            requests = [evaluate_message(model, config, each, self.evaluation.bounds, terms.records) for each in tasks]
            replies = send_and_receive(grid, requests, timeout)
            metrics = len(self.evaluation.bounds)
            total = self._sum_of(replies, [answers_task(each, metrics) for each in tasks], terms)
            if total is None:
                self._skip("no user answered")
                return None
            noised = self._noise.add_noise(total, self._record, attempt, terms, grid)
            joint = {"release": release, "epsilon-with-training": self.together.epsilon}
            measured = joint | self._read(noised, terms.lattice)
            self._record.record(attempt, b"", metrics=measured)
        except NoiseUnavailableError as error:
            reason = f"{'it is consumed' if self._record.is_consumed else 'not opened'}: {error}"
            log_warning(f"no evaluation: {reason}")
            self._record.abandon(reason)
            return None
        except BaseException:
            self._record.abandon("it could not be released")
            raise
        return _public_metrics(measured)

    def _skip(self, reason: str) -> None:
        log_warning(f"no evaluation: {reason}")
        self._record.skip(reason)

    def _sum_of(self, replies: Sequence[Message | None], tasks: Sequence[TrainTask], terms: Any) -> Any:
        """Σ answers; None if there is no answer and that is no secret."""
        total, found = self._noise.sum_of(zip(replies, tasks, strict=True), terms, len(self.evaluation.bounds))
        answered = sum(result for result in found if isinstance(result, int))
        asked = sum(len(task.users) for task in tasks)
        where = f"{plural(asked, 'user', 'users')} asked at {plural(len(tasks), 'node', 'nodes')}"
        log_info(f"evaluation: {where}, {answered} answered")
        if causes := {result for result in found if not isinstance(result, int)}:
            log_warning(f"evaluation: {', '.join(sorted(causes))}: {EVALUATION_HINT}")
        return total if answered or self.evaluation.plan.participation.is_secret else None

    def _read(self, total: Integers, lattice: Lattice) -> dict[str, float]:
        values = lattice.from_steps(total) / scale_of(len(total)) / self.cohort_size + 0.5
        return {name: bound * float(v) for (name, bound), v in zip(self.evaluation.bounds.items(), values, strict=True)}


def _public_metrics(kept: Mapping[str, Any]) -> MetricRecord:
    return MetricRecord({name: value for name, value in kept.items() if name != "release"})
