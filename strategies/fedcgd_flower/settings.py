"""What one `CorrelatedNoise` was told, checked and with its defaults filled in: the rounds, the loop and the logs read it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedcgd.ledger import JointBudget
from fedcgd.ledger.run_composition import EVALUATION
from fedcgd.noise.keys import NoiseKey
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd_flower.adaptive_clipping import AdaptiveClipping
from fedcgd_flower.evaluation import PrivateEvaluation
from fedcgd_flower.inner import FLOWERS_DEFAULT, check_inner, check_scheduled_rounds, planned_cohort, settings
from fedcgd_flower.noise_provider import NoiseParties, Sums, noise_parties
from fedcgd_flower.users import Identity

if TYPE_CHECKING:
    from fedcgd.keepers import Keepers

EXPECTED_USERS = "expected_users"
"""The argument's name: the number of users to begin with was given."""


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


@dataclass(frozen=True, kw_only=True)
class CohortSettings:
    """How many users a round is planned with (`size`, which `source` set), must answer, and must be there before the first."""

    size: int
    source: str
    min_answers: int
    expected_users: int
    expected_source: str
    """Who says how many are expected."""


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
    if min_answers is None:
        min_answers = 0 if participation.is_secret else 1
    if not 0 <= min_answers <= (0 if participation.is_secret else cohort_size):
        raise ValueError(
            f"min_answers must be between 0 and cohort_size = {cohort_size}, and 0 with a secret sampling, because who "
            f"was drawn may not decide whether a round is released; got {min_answers}"
        )
    expected_source = EXPECTED_USERS
    if expected_users is None:
        expected_users, expected_source = users_needed(participation, cohort_size), "what the plan cannot do without"
        available = getattr(inner, "min_available_nodes", 0)
        if available > max(expected_users, FLOWERS_DEFAULT):
            expected_users, expected_source = available, f"min_available_nodes = {available}"
    return CohortSettings(
        size=cohort_size,
        source=source,
        min_answers=min_answers,
        expected_users=expected_users,
        expected_source=expected_source,
    )


def users_needed(participation: Participation, cohort_size: int) -> int:
    """The fewest users that all rounds can be done with, a full cohort each; 1 with a sampling, where cohorts vary."""
    if participation.is_secret:
        return 1
    return participation.users_for(cohort_size)


@dataclass(frozen=True, eq=False, repr=False)
class RunSettings:
    """What `CorrelatedNoise` was given, by its names there, checked and with its defaults filled in. None of it can change."""

    inner: Strategy
    plan: Plan
    _: KW_ONLY
    key: NoiseKey
    ledger: Path | str | None = None
    cohort_size: int | None = None
    budget: JointBudget | None = None
    identity: Identity = "declared"
    hosts: Mapping[str, str] | None = None
    trusted_nodes: bool = False
    expected_users: int | None = None
    min_answers: int | None = None
    patience: float = 600.0
    trainable: Collection[str] | None = None
    adaptive_clipping: AdaptiveClipping | None = None
    evaluation: PrivateEvaluation | None = None
    on_release: OnRelease | None = None
    keepers: "Keepers | None" = None
    cohort: CohortSettings = field(init=False)
    noise: NoiseParties = field(init=False)
    """Who makes the noise."""

    def __post_init__(self) -> None:
        check_inner(self.inner, has_hook=self.on_release is not None)
        plan, key, hosts, trainable = self.plan, self.key, self.hosts, self.trainable
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a fedcgd Plan, for example Plan.calibrated(…); got {plan!r}")
        check_scheduled_rounds(self.inner, plan.participation.rounds)
        if not isinstance(key, NoiseKey):  # not shown: it may be a key
            raise TypeError(f"key must be a NoiseKey, for example NoiseKey.from_file(path); got {type(key).__name__}")
        if hosts is not None and not isinstance(hosts, Mapping):
            raise TypeError(f"hosts must say the node of each user, {{user: name}}; got {type(hosts).__name__}")
        if isinstance(trainable, str):
            raise TypeError(f"trainable must be the names of arrays, for example [{trainable!r}]; got one text")
        if not isinstance(self.patience, int | float) or not self.patience >= 0:
            raise ValueError(f"patience must be a number of seconds, at least 0, got {self.patience!r}")
        if self.identity not in ("declared", "authenticated"):
            raise ValueError(f"identity must be 'declared' or 'authenticated', got {self.identity!r}")
        adaptive, evaluation, hook = self.adaptive_clipping, self.evaluation, self.on_release
        if adaptive is not None and not isinstance(adaptive, AdaptiveClipping):
            raise TypeError(f"adaptive_clipping must be an AdaptiveClipping(…) or None, got {adaptive!r}")
        if hook is not None and not callable(hook):
            raise TypeError(f"on_release must be a function of one ReleaseEvent, got {hook!r}")
        cohort = cohort_settings(
            plan.participation,
            self.inner,
            cohort_size=self.cohort_size,
            expected_users=self.expected_users,
            min_answers=self.min_answers,
        )
        derived = {
            "ledger": None if self.ledger is None else Path(self.ledger),
            "cohort": cohort,
            "cohort_size": cohort.size,
            "expected_users": cohort.expected_users,
            "min_answers": cohort.min_answers,
            "noise": noise_parties(self.keepers),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        _ = self.indicator_norm  # refuses a cohort that is too small for the noise
        if evaluation is not None:
            if not isinstance(evaluation, PrivateEvaluation):
                raise TypeError(f"evaluation must be a PrivateEvaluation(…) or None, got {evaluation!r}")
            evaluation.check(plan, self.budget)
        self.noise.check(self.training_sums, self.evaluation_sums, key)
        settings(self.inner)  # refuses what cannot be compared

    @property
    def path(self) -> Path | None:
        """The file of the ledger; None if the record is in memory."""
        return None if self.ledger is None else Path(self.ledger)

    @property
    def evaluation_plan(self) -> Plan | None:
        """That of the private evaluations, if there are any."""
        return None if self.evaluation is None else self.evaluation.plan

    @property
    def indicator_norm(self) -> float:
        """With adaptive clipping, what a user's norm has for the share within the norm; else 0. Raises ValueError as it says."""
        adaptive = self.adaptive_clipping
        return 0.0 if adaptive is None else adaptive.indicator_norm(self.plan.noise_multiplier, self.cohort.size)

    @property
    def wire_plan(self) -> Plan:
        """Of what is summed and noised: with adaptive clipping, of vectors of norm at most 1."""
        return self.plan if self.adaptive_clipping is None else replace(self.plan, clip_norm=1.0)

    @property
    def training_sums(self) -> Sums:
        """What is summed in the rounds."""
        further = self.adaptive_clipping is not None
        return Sums(plan=self.wire_plan, size=lambda parameters: parameters + further, cohort_size=self.cohort.size)

    @property
    def evaluation_sums(self) -> Sums | None:
        """What is summed in the private evaluations, if there are any."""
        return None if self.evaluation is None else self.evaluation.sums(self.cohort.size)

    @property
    def registered_only(self) -> bool:
        """Whether nodes must be registered by name: where rounds are secret, and nodes are not all the operator's own."""
        plans = [self.plan, self.evaluation_plan or self.plan]
        secret = any(plan.participation.is_secret for plan in plans)
        return secret and not self.trusted_nodes and not self.key.simulated

    def configuration(self) -> dict[str, Any]:
        """What the ledger compares when the run goes on, beside the plan."""
        # With another identity, people would get other ids, and turns beyond their k.
        described: dict[str, Any] = {"cohort_size": self.cohort.size, "identity": self.identity}
        described["inner"] = settings(self.inner)
        if self.adaptive_clipping is not None:
            described["adaptive_clipping"] = self.adaptive_clipping.to_description()
        if self.evaluation is not None:  # so that later runs over the same people cannot leave it out
            described[EVALUATION] = self.evaluation.to_description(self.cohort.size)
        return described | self.noise.to_description()
