"""Accuracy and loss on the users' own data, as noised sums with a budget of their own.

Each user of an evaluation's cohort measures the released model on its data and adds a vector of norm at most 1
(`evaluation_messages`). The sum gets the noise of the evaluation's plan, on the integer grid, and is read as the mean over the
planned cohort. Who did not answer counts as the middle of a metric's range.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedcgd.accounting import JointGuarantee
from fedcgd.keepers import Keepers, Sums, sums_of
from fedcgd.ledger import JointBudget, Ledger
from fedcgd.ledger.evaluations import EVALUATION_OF, evaluation_ledger, with_evaluations
from fedcgd.ledger.openings import KEEPERS as WHO_KEEPS
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.quantisation import Integers, Lattice
from fedcgd.numeric import as_positive
from fedcgd.participation.cohorts import cohort
from fedcgd.plan import Plan
from fedcgd.release import RecordedReleases, lattice_of
from fedcgd_flower.evaluation_messages import answers_task, evaluate_message, scale_of
from fedcgd_flower.flower_private import log
from fedcgd_flower.keeper_messages import Masking
from fedcgd_flower.keeper_openings import OpeningFailedError, Openings, keepers_description, sum_of_masked_replies
from fedcgd_flower.layout import Flat, Layout
from fedcgd_flower.messages import KEEPERS, TrainTask, by_node
from fedcgd_flower.replies import NodeSum, read_train_reply
from fedcgd_flower.send_and_receive import send_and_receive
from fedcgd_flower.user_directory import NodeIds, balance_users

_Answers = Sequence[tuple[Message | None, TrainTask]]


@dataclass(frozen=True, kw_only=True)
class PrivateEvaluation:
    """Every `every` releases, and after the last one, a cohort of users evaluates the released model on its own data.

    The budget comes on top of that of the training: the log and the result say ε of both together. The record is a ledger of its
    own beside that of the training (run.db.evaluation).

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
            raise ValueError(
                "the plan of a private evaluation needs noise (noise_multiplier above 0); forward_client_metrics=True of the "
                "strategy tells metrics as they are"
            )
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

    def to_description(self, cohort_size: int) -> dict[str, Any]:
        """All settings, as JSON-able values.

        Args:
            cohort_size: that of the training.
        """
        return {
            "plan": self.plan.to_description(),
            "bounds": dict(self.bounds),
            "every": self.every,
            "cohort_size": self.cohort_size or cohort_size,
        }

    def is_due(self, release: int, rounds: int) -> bool:
        """Whether a release is evaluated.

        Args:
            release: its number, from 1.
            rounds: those of the training.
        """
        return release > 0 and (release % self.every == 0 or release == rounds)

    def sums(self, keepers: Keepers, cohort_size: int) -> Sums:
        """How keepers sum what users measure.

        Args:
            keepers: of the run.
            cohort_size: that of the training.
        """
        users = self.cohort_size or cohort_size
        return sums_of(self.plan, size=len(self.bounds), keepers=keepers, users=users)

    def noise(self, cohort_size: int, keepers: Keepers | None = None) -> dict[str, float]:
        """The largest standard deviation of the noise on each metric, in its own units.

        Args:
            cohort_size: the users of an evaluation.
            keepers: who makes the noise, if it is not the server.
        """
        rounds = self.plan.participation.rounds
        inverse = self.plan.mechanism.inverse_row(rounds - 1, rounds)
        stddev = self.plan.noise_multiplier * float(np.linalg.norm(inverse))
        stddev *= (1.0 if keepers is None else keepers.shares.louder) / scale_of(len(self.bounds)) / cohort_size
        return {name: bound * stddev for name, bound in self.bounds.items()}


class Evaluator:
    """The evaluations of a run: asks, sums, adds noise, and keeps the record. One process at a time, as the ledger's."""

    def __init__(
        self,
        settings: PrivateEvaluation,
        *,
        training: Plan,
        cohort_size: int,
        key: NoiseKey,
        path: Path | None,
        training_stream: str,
        begun: bool,
        record_keys: tuple[str, str],
        keepers: Keepers | None,
        openings: Openings | None,
    ) -> None:
        self.settings, self._record_keys = settings, record_keys
        self.cohort_size = settings.cohort_size or cohort_size
        self._training = training
        self._key = key
        plan, metrics = settings.plan, len(settings.bounds)
        self.noise = settings.noise(self.cohort_size, keepers)
        """The largest standard deviation of the noise on each metric, in its own units."""
        configuration = {EVALUATION_OF: training_stream, **settings.to_description(self.cohort_size)}
        if keepers is not None:
            configuration[WHO_KEEPS] = keepers_description(keepers)
        target: Path | Literal[":memory:"] = ":memory:" if path is None else evaluation_ledger(path)
        if begun and isinstance(target, Path) and not target.exists():
            raise ValueError(
                f"{target}, the record of the evaluations of the run in {path}, is not there, and without it they would be "
                "repeated beyond their budget: put it back, or begin another run"
            )
        self._ledger = Ledger.open(target, plan=plan, configuration=configuration, key=key, purpose="evaluation")
        self._record = RecordedReleases(self._ledger, plan, key)
        self._openings = None if openings is None else openings.of_evaluations(self._ledger, self.cohort_size)
        self._lattice = lattice_of(plan, metrics)

    def close(self) -> None:
        """Close the ledger."""
        self._ledger.close()

    @cached_property
    def together(self) -> JointGuarantee:
        """ε of the planned training and the planned evaluations, for a user who is in both."""
        return with_evaluations(self._training, self.settings.plan)

    def summary(self) -> str:
        """What is promised: of the evaluations, and of training and evaluations together."""
        return (
            f"evaluations: {self.settings.plan.guarantee()}; training and evaluations together: {self.together}; "
            f"samplings: {self._training.participation.sampling}, {self.settings.plan.participation.sampling}"
        )

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
        nodes: Mapping[str, NodeIds],
        timeout: float,
    ) -> MetricRecord | None:
        """What users measured of the model that is release number `release`, with noise; None if it could not be measured.

        `nodes` says at which nodes each user can be asked.
        """
        plan, round = self.settings.plan, self._record.count
        if round >= plan.participation.rounds:  # keepers can spend one that then is missing at the end
            log(WARNING, "fedcgd: no evaluation: all %d that are planned are released or spent", round)
            return None
        choices = self._key.choices_of(self._ledger.stream_id)
        users = cohort(
            plan.participation,
            round,
            nodes.keys(),
            self._ledger.history(list(nodes)),
            cohort_size=self.cohort_size,
            key=choices,
        )
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
            asked = balance_users(users, nodes)
            requests = self._requests(round, attempt, model, layout, config, lattice, asked, masking)
            replies = send_and_receive(grid, [message for message, _ in requests], timeout)
            answers = list(zip(replies, (task for _, task in requests), strict=True))
            if masking is None:
                total = self._noised_sum(answers, attempt, lattice)
            else:
                total = self._opened_sum(answers, attempt, grid, masking)
            if total is None:
                self._skip("no user answered")
                return None
            joint = {"release": release, "epsilon-with-training": self.together.epsilon}
            measured = joint | self._read(total, lattice)
            self._record.record(attempt, b"", metrics=measured)
        except OpeningFailedError as error:
            reason = f"{'it is spent' if self._record.is_opening else 'not opened'}: {error}"
            log(WARNING, "fedcgd: no evaluation: %s", reason)
            self._record.abandon(reason)
            return None
        except BaseException:
            self._record.abandon("it could not be released")
            raise
        return _public_metrics(measured)

    def _skip(self, reason: str) -> None:
        log(WARNING, "fedcgd: no evaluation: %s", reason)
        self._record.skip(reason)

    def _requests(
        self,
        round: int,
        attempt: int,
        model: Flat,
        layout: Layout,
        config: ConfigRecord,
        lattice: Lattice,
        users: Mapping[str, int],
        masking: Masking | None,
    ) -> list[tuple[Message, TrainTask]]:
        """For each node the request, and the task that its answer is for."""
        told = {} if masking is None else {KEEPERS: masking.record()}
        requests = []
        for node_id, hosted in by_node(users):
            task = TrainTask(
                round=round,
                attempt=attempt,
                clip_norm=1.0,
                grid=lattice,
                users=hosted,
                layout=layout,
                record_keys=self._record_keys,
            )
            message = evaluate_message(node_id, model, config, task, self.settings.bounds, told)
            requests.append((message, answers_task(task, len(self.settings.bounds))))
        return requests

    def _noised_sum(self, answers: _Answers, attempt: int, lattice: Lattice) -> Integers | None:
        """Σ answers and noise, in steps; None if there is no answer, and whether there is one is no secret."""
        found = [read_train_reply(reply, task) for reply, task in answers]
        sums = [result for result in found if isinstance(result, NodeSum)]
        answered = sum(one.answered for one in sums)
        self._tell(answers, answered, {result for result in found if not isinstance(result, NodeSum)})
        if not answered and self.settings.plan.participation.sampling == "none":
            return None
        total = np.zeros(len(self.settings.bounds), np.int64)
        for one in sums:
            total += one.update
        self._record.add_noise(total, attempt, lattice)
        return total

    def _opened_sum(self, answers: _Answers, attempt: int, grid: Grid, masking: Masking) -> Integers | None:
        """As `_noised_sum`, by the keepers."""
        assert self._openings is not None
        summed, found = sum_of_masked_replies(answers, masking)
        asked = sum(result for result in found if isinstance(result, int))
        self._tell(answers, asked, {result for result in found if not isinstance(result, int)})
        return self._openings.opened(grid, masking, self._record, attempt, summed) if summed.members else None

    def _tell(self, answers: _Answers, answered: int, causes: Collection[str]) -> None:
        asked = sum(len(task.users) for _, task in answers)
        log(INFO, "fedcgd: evaluation: %d users asked at %d nodes, %d answered", asked, len(answers), answered)
        if causes:
            log(WARNING, "fedcgd: evaluation: %s: %s", ", ".join(sorted(causes)), _HINT)

    def _read(self, total: Integers, lattice: Lattice) -> dict[str, float]:
        values = lattice.from_steps(total) / scale_of(len(total)) / self.cohort_size + 0.5
        return {name: bound * float(v) for (name, bound), v in zip(self.settings.bounds.items(), values, strict=True)}


_HINT = (
    "nodes need an evaluate function that replies the metrics that bounds name, behind clipped_update_mod "
    "(ClientApp(mods=[clipped_update_mod]), not on the train function alone), or host_users(…, evaluate=…)"
)


def _public_metrics(kept: Mapping[str, Any]) -> MetricRecord:
    return MetricRecord({name: value for name, value in kept.items() if name != "release"})


def check_enough(settings: PrivateEvaluation, rounds: int) -> None:
    """Raise ValueError if the plan has fewer evaluations than a training of so many rounds has."""
    due: Sequence[int] = [release for release in range(1, rounds + 1) if settings.is_due(release, rounds)]
    planned = settings.plan.participation.rounds
    if planned < len(due):
        raise ValueError(
            f"{rounds} rounds, evaluated every {settings.every} and at the end, are {len(due)} evaluations, and their plan has "
            f"{planned}: plan Participation(rounds={len(due)}, …), or take a larger `every`"
        )


def check_evaluation(
    evaluation: PrivateEvaluation, plan: Plan, budget: JointBudget | None, forward_client_metrics: bool
) -> None:
    """Raise TypeError or ValueError unless a training of `plan` can be evaluated so."""
    if not isinstance(evaluation, PrivateEvaluation):
        raise TypeError(f"evaluation must be a PrivateEvaluation(…) or None, got {evaluation!r}")
    if forward_client_metrics:
        raise ValueError("evaluation= is private and forward_client_metrics=True is not: choose one")
    if budget is not None:
        raise ValueError(
            "a joint budget does not count the evaluations of the run that it is for: leave out evaluation= or budget="
        )
    if plan.noiseless:
        raise ValueError("a private evaluation goes with a training that has noise: leave evaluation= out while σ = 0")
    check_enough(evaluation, plan.participation.rounds)
