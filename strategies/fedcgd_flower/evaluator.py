"""Accuracy and loss on the users' own data, as noised sums with a budget of their own.

Each user of an evaluation's cohort measures the released model on its data and adds a vector of norm at most 1
(`evaluation_messages`). The sum gets the noise of the evaluation's plan, on the integer grid, and is read as the mean over the
planned cohort. Who did not answer counts as the middle of a metric's range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from logging import INFO
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedcgd.accounting import JointGuarantee
from fedcgd.ledger import Ledger
from fedcgd.ledger.evaluations import EVALUATION_OF, evaluation_ledger, with_evaluations
from fedcgd.ledger.openings import KEEPERS as WHO_KEEPS
from fedcgd.ledger.transactions import MEMORY
from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd.participation.cohorts import cohort
from fedcgd.release import RecordedReleases, lattice_of
from fedcgd.support.numbers import plural
from fedcgd_flower.cohort import spread
from fedcgd_flower.evaluation import PrivateEvaluation
from fedcgd_flower.flower_private import log, log_info, log_warning
from fedcgd_flower.grid import send_and_receive
from fedcgd_flower.inner import record_keys_of
from fedcgd_flower.keepers.messages import Masking
from fedcgd_flower.keepers.openings import MaskedSum, OpeningFailedError, keepers_description, sum_of_masked_replies
from fedcgd_flower.layout import Flat, Layout
from fedcgd_flower.messages import KEEPERS, TrainTask, answers_task, by_node, evaluate_message, scale_of
from fedcgd_flower.replies import sum_of_replies
from fedcgd_flower.round import TrainingRounds
from fedcgd_flower.settings import RunSettings
from fedcgd_flower.users import UserDirectory, balance_users

_Answers = Sequence[tuple[Message | None, TrainTask]]


class Evaluator:
    """The evaluations of a run: asks, sums, adds noise, and keeps the record. One process at a time, as the ledger's."""

    def __init__(self, evaluation: PrivateEvaluation, settings: RunSettings, rounds: TrainingRounds) -> None:
        self.evaluation = evaluation
        self.cohort_size = evaluation.cohort_size or settings.cohort.size
        self._settings = settings
        self._record_keys = record_keys_of(settings.inner)
        configuration = {EVALUATION_OF: rounds.ledger.stream_id, **evaluation.to_description(self.cohort_size)}
        if settings.keepers is not None:
            configuration[WHO_KEEPS] = keepers_description(settings.keepers)
        path = None if settings.ledger is None else evaluation_ledger(settings.ledger)
        if path is not None and rounds.releases and not path.exists():
            raise ValueError(
                f"{path}, the record of the evaluations of the run in {settings.ledger}, is not there, and without it they would "
                "be repeated beyond their budget: put it back, or begin another run"
            )
        self._ledger = Ledger.open(
            path or MEMORY, plan=evaluation.plan, configuration=configuration, key=settings.key, purpose="evaluation"
        )
        self._record = RecordedReleases(self._ledger, evaluation.plan, settings.key)
        openings = rounds.openings
        self._openings = None if openings is None else openings.of_evaluations(self._ledger, self.cohort_size)
        self._lattice = lattice_of(evaluation.plan, len(evaluation.bounds))

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
        noise = self.evaluation.noise(self.cohort_size, self._settings.keepers)
        told = ", ".join(f"{name} ± {stddev:.2g}" for name, stddev in noise.items())
        log(INFO, f"\t│\t└── {plural(self.cohort_size, 'user', 'users')} an evaluation; noise: {told}")

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
        if round >= plan.participation.rounds:  # keepers can spend one that then is missing at the end
            log_warning(f"no evaluation: all {round} that are planned are released or spent")
            return None
        if self._openings is not None and (why := self._openings.suspects.gives_up):
            log_warning(f"no evaluation: {why}")
            return None
        choices = self._settings.key.choices_of(self._ledger.stream_id)
        there = directory.refresh(grid)
        history = self._ledger.history(list(there))
        suspects = None if self._openings is None else self._openings.suspects
        for nodes in directory.allowed(there, suspects):
            users = cohort(plan.participation, round, nodes.keys(), history, cohort_size=self.cohort_size, key=choices)
            if users is not None:
                least = 1 if suspects is None else suspects.least
                users = spread(plan.participation, round, users, nodes, history, least=least, key=choices)
                break
        if users is None:
            self._skip("too few users that may take part in an evaluation were reachable")
            return None
        masking = None if self._openings is None else self._openings.masking(grid, layout.size)
        if isinstance(masking, str):
            self._skip(masking)
            return None
        attempt = self._record.plan_round(users)
        try:
            lattice = self._lattice if masking is None else Lattice(masking.agreement.step)
            task = TrainTask(
                round=round,
                attempt=attempt,
                clip_norm=1.0,
                grid=lattice,
                users=tuple(users),
                layout=layout,
                record_keys=self._record_keys,
            )
            told = {} if masking is None else {KEEPERS: masking.record()}
            requests, tasks = [], []
            for node_id, hosted in by_node(balance_users(users, nodes)):
                asked = replace(task, users=hosted)
                requests.append(evaluate_message(node_id, model, config, asked, self.evaluation.bounds, told))
                tasks.append(answers_task(asked, len(self.evaluation.bounds)))
            replies = send_and_receive(grid, requests, timeout)
            to = [request.metadata.dst_node_id for request in requests]
            total = self._noised_sum(list(zip(replies, tasks, strict=True)), to, attempt, grid, masking)
            if total is None:
                self._skip("no user answered")
                return None
            joint = {"release": release, "epsilon-with-training": self.together.epsilon}
            measured = joint | self._read(total, lattice)
            self._record.record(attempt, b"", metrics=measured)
        except OpeningFailedError as error:
            reason = f"{'it is spent' if self._record.is_opening else 'not opened'}: {error}"
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

    def _noised_sum(
        self, answers: _Answers, nodes: Sequence[int], attempt: int, grid: Grid, masking: Masking | None
    ) -> Integers | None:
        """Σ answers and noise, in steps; None if there is no answer, and whether there is one is no secret."""
        total: Integers | MaskedSum
        if masking is None:
            total, found = sum_of_replies(answers, len(self.evaluation.bounds))
        else:
            masked, found = sum_of_masked_replies(answers, masking)
            total = masked.at(nodes, found)
        answered = sum(result for result in found if isinstance(result, int))
        asked = sum(len(task.users) for _, task in answers)
        where = f"{plural(asked, 'user', 'users')} asked at {plural(len(answers), 'node', 'nodes')}"
        log_info(f"evaluation: {where}, {answered} answered")
        if causes := {result for result in found if not isinstance(result, int)}:
            log_warning(f"evaluation: {', '.join(sorted(causes))}: {_HINT}")
        if isinstance(total, MaskedSum):
            assert self._openings is not None  # who masks has keepers
            assert masking is not None
            return self._openings.opened(grid, masking, self._record, attempt, total) if total.members else None
        if not answered and not self.evaluation.plan.participation.is_secret:
            return None
        self._record.add_noise(total, attempt, self._lattice)
        return total

    def _read(self, total: Integers, lattice: Lattice) -> dict[str, float]:
        values = lattice.from_steps(total) / scale_of(len(total)) / self.cohort_size + 0.5
        return {name: bound * float(v) for (name, bound), v in zip(self.evaluation.bounds.items(), values, strict=True)}


_HINT = (
    "nodes need an evaluate function that replies the metrics that bounds name, behind clipped_update_mod "
    "(ClientApp(mods=[clipped_update_mod]), not on the train function alone), or host_users(…, evaluate=…)"
)


def _public_metrics(kept: Mapping[str, Any]) -> MetricRecord:
    return MetricRecord({name: value for name, value in kept.items() if name != "release"})
