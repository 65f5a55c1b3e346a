"""What a private evaluation is: how often users evaluate the released model, which metrics, and at what cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcgd.ledger import JointBudget
from fedcgd.plan import Plan
from fedcgd.support.numbers import as_positive
from fedcgd_flower.messages import scale_of
from fedcgd_flower.noise_provider import Sums


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

    def sums(self, cohort_size: int) -> Sums:
        """What is summed in an evaluation.

        Args:
            cohort_size: that of the training.
        """
        users = self.cohort_size or cohort_size
        return Sums(plan=self.plan, size=lambda _: len(self.bounds), cohort_size=users)

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
