"""Accuracy and loss on the users' own data, as noised sums with a budget of their own.

Each user of an evaluation's cohort measures the released model on its data and adds a vector of norm at most 1
(`messages.answer`). The sum gets the noise of the evaluation's plan, on the integer grid, and is read as the mean over the
planned cohort. Who did not answer counts as the middle of a metric's range.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from logging import INFO
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedcgd.accounting import JointGuarantee
from fedcgd.ledger import Ledger
from fedcgd.ledger.run_composition import EVALUATION_OF, evaluation_ledger, with_evaluations
from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd.release import ReleaseProtocol
from fedcgd.support.numbers import plural
from fedcgd.support.records import MEMORY
from fedcgd_flower.cohort import Draw
from fedcgd_flower.evaluation import PrivateEvaluation
from fedcgd_flower.flower_private import log, log_info, log_warning
from fedcgd_flower.grid import send_and_receive
from fedcgd_flower.inner import record_keys_of
from fedcgd_flower.layout import Flat, Layout
from fedcgd_flower.messages import TrainTask, answers_task, evaluate_message, scale_of
from fedcgd_flower.noise_provider import NoiseUnavailableError
from fedcgd_flower.problems import EVALUATION_HINT
from fedcgd_flower.round import TrainingRounds
from fedcgd_flower.settings import RunSettings
from fedcgd_flower.update import Clipping
from fedcgd_flower.users import UserDirectory


class Evaluator:
    """The evaluations of a run: asks, sums, adds noise, and keeps the record. One process at a time, as the ledger's."""

    def __init__(self, evaluation: PrivateEvaluation, settings: RunSettings, rounds: TrainingRounds) -> None:
        self.evaluation = evaluation
        self.cohort_size = evaluation.cohort_size or settings.cohort.size
        self._settings = settings
        self._record_keys = record_keys_of(settings.inner)
        configuration = {EVALUATION_OF: rounds.ledger.stream_id, **evaluation.to_description(self.cohort_size)}
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
        self._noise = rounds.noise.of_evaluations(evaluation.sums(settings.cohort.size), self._ledger)

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
        self,
        release: int,
        model: Flat,
        layout: Layout,
        config: ConfigRecord,
        grid: Grid,
        directory: UserDirectory,
        timeout: float,
    ) -> MetricRecord | None:
        """What users measured of the model that is release number `release`, with noise; None if it could not be measured."""
        plan, round = self.evaluation.plan, self._record.count
        if round >= plan.participation.rounds:  # a consumed one then is missing at the end
            log_warning(f"no evaluation: all {round} that are planned are released or consumed")
            return None
        if why := self._noise.gives_up:
            log_warning(f"no evaluation: {why}")
            return None
        nodes = directory.refresh(grid)
        choices = self._settings.key.choices_of(self._ledger.stream_id)
        draw = Draw(plan.participation, round, self._ledger.history(list(nodes)), choices)
        chosen = draw.at_nodes(draw.cohort(nodes.keys(), self.cohort_size), nodes, self._noise.least_nodes)
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
