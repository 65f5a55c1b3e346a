"""What a strategy is made with, checked: each `ValueError` names the value, the limit and the remedy, before anything runs."""

from dataclasses import dataclass

from flwr.serverapp.strategy import Strategy

from fedcgd.ledger import JointBudget
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd_flower.enough_users import users_needed
from fedcgd_flower.evaluation import PrivateEvaluation, check_enough
from fedcgd_flower.inner import planned_cohort


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """How many users a round is planned with (`size`, which `source` set), must answer, and must be there before the first."""

    size: int
    source: str
    min_answers: int
    expected_users: int


def cohort_settings(
    participation: Participation,
    inner: Strategy,
    *,
    cohort_size: int | None,
    expected_users: int | None,
    min_answers: int | None,
) -> CohortSettings:
    """These numbers; for those that are None what the inner strategy and the participation say. Raises ValueError."""
    source = "cohort_size"
    if cohort_size is None:
        cohort_size, source = planned_cohort(inner, expected_users)
    if not isinstance(cohort_size, int) or cohort_size < 1:
        raise ValueError(
            f"cohort_size must be at least 1 and whole, got {cohort_size!r}: the planned number of users of a round"
        )
    sampled = participation.sampling != "none"
    if min_answers is None:
        min_answers = 0 if sampled else 1
    if not 0 <= min_answers <= (0 if sampled else cohort_size):
        raise ValueError(
            f"min_answers must be between 0 and cohort_size = {cohort_size}, and 0 with a secret sampling, because who "
            f"was drawn may not decide whether a round is released; got {min_answers}"
        )
    if expected_users is None:
        expected_users = users_needed(participation, cohort_size)
    return CohortSettings(size=cohort_size, source=source, min_answers=min_answers, expected_users=expected_users)


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
