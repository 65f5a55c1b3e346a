"""The Flower server strategy: user updates are clipped and summed, correlated noise is added, the inner strategy steps."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcgd.accounting.guarantee import rounded_up
from fedcgd.ledger import JointBudget, Ledger
from fedcgd.ledger.run import discard_unused
from fedcgd.ledger.store import EVALUATION
from fedcgd.noise.keys import NoiseKey
from fedcgd.plan import Plan
from fedcgd.support.records import MEMORY
from fedcgd_flower.clipping import AdaptiveClipping
from fedcgd_flower.cohort import CohortSettings, cohort_settings
from fedcgd_flower.evaluation import Evaluator, PrivateEvaluation
from fedcgd_flower.flower_private import log_info, log_warning
from fedcgd_flower.inner import check_inner, check_scheduled_rounds, settings
from fedcgd_flower.noise_provider import NoiseParties, Sums, noise_parties
from fedcgd_flower.problems import RejectionReason
from fedcgd_flower.round import TrainingRounds
from fedcgd_flower.run_loop import (
    EvaluateFn,
    OnRelease,
    RunLoop,
    RunResult,
    log_guarantee,
    log_inner,
    log_other_runs,
)
from fedcgd_flower.users import Identity

if TYPE_CHECKING:
    from fedcgd.keepers import Keepers


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
            users = evaluation.cohort_size or cohort.size
            object.__setattr__(self, "evaluation", replace(evaluation, cohort_size=users))
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
        return None if self.evaluation is None else self.evaluation.sums()

    @property
    def registered_only(self) -> bool:
        """Whether nodes must be registered by name: where rounds are secret, and nodes are not all the operator's own."""
        plans = [self.plan, self.evaluation_plan or self.plan]
        secret = any(plan.participation.is_secret for plan in plans)
        return secret and not self.trusted_nodes and not self.key.simulated

    def configuration(self) -> dict[str, Any]:
        """What the ledger compares when the run goes on, next to the plan."""
        # With another identity, people would get other ids, and turns beyond their k.
        described: dict[str, Any] = {"cohort_size": self.cohort.size, "identity": self.identity}
        described["inner"] = settings(self.inner)
        if self.adaptive_clipping is not None:
            described["adaptive_clipping"] = self.adaptive_clipping.to_description()
        if self.evaluation is not None:  # so that later runs over the same people cannot leave it out
            described[EVALUATION] = self.evaluation.to_description()
        return described | self.noise.to_description()


class CorrelatedNoise(RunSettings, Strategy):
    """DP-λCGD, or any mechanism, around an inner strategy: it is given model + (Σ clipped updates + ζσ(C⁻¹Z)_t) / cohort.

    All rounds of `plan` together are (ε, δ)-DP (adjacency: zero out one user), against anyone who sees every released model.

    `start` opens the ledger and closes it when it ends or fails. `with CorrelatedNoise(…) as strategy:` keeps it open for
    several calls of `start`; a run without a ledger file can be started again only there, because its record ends with it.

    FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad and FedProx work unchanged inside, and so does a strategy of yours that makes a
    model of one reply, the noised mean. What it keeps from round to round is saved with each release (see `inner`).

    Args:
        inner: the strategy that makes the next model of the noised mean.
        plan: what runs and what is accounted for: mechanism, participation, clip norm, noise, δ.
        key: all noise and all secret choices come from it. `NoiseKey.simulation(seed)` makes runs repeatable and not private.
        ledger: the file that records the run, and from which the same run goes on after a crash; in memory by default.
        cohort_size: the users asked in a round, and the divisor of the mean however many answer. By default what the inner
            strategy says: `min_train_nodes`, or where that is Flower's 2 or `fraction_train` was set, max(⌊fraction_train ·
            expected_users⌋, min_train_nodes). With a sampling (Balls-in-Bins,
            Poisson) it is only the divisor: the expected number of users a round.
        budget: what this run and earlier ones may cost each user together; users who have too little left are not asked.
        identity: "declared" (a node names its users, and ε is for each id that is named) or "authenticated" (a node is one user,
            its registered name). A user whom a registered node has named belongs to that node for the whole run, and a registered
            node with `clipped_update_mod` stays one user.
        hosts: user → registered name of the only node that may name it; no other user takes part.
        trusted_nodes: every node that can connect is yours. Without it, a sampling (whose rounds must stay secret) asks
            registered nodes only; with a simulation key nothing is secret.
        expected_users: how many users must be reachable before the first round. By default as many as the plan cannot do without,
            or `min_available_nodes` of the inner strategy if that is more; and then also every node must have named its users (in
            deployment, all but one, and more than half).
        min_answers: a round that fewer users answer is not released, and is tried again (default 1; 0 with a sampling).
        patience: seconds to wait for enough users before a round is skipped or, before the first one, the run is refused.
        trainable: the names of the arrays that are trained, where not all are (frozen layers, LoRA, a pretrained model whose
            BatchNorm keeps its statistics); the others, and counters, are sent to the nodes and come back unchanged.
        adaptive_clipping: the clip norm follows a quantile of the users' norms, beginning with the plan's; ε stays what it is.
        evaluation: users also evaluate released models on their data, as noised sums with a budget of their own.
        on_release: called with a `ReleaseEvent` after each release, when it is on record and evaluated: for checkpoints, W&B,
            TensorBoard, MLflow. It sees released models and metrics only. If it raises, the run ends, and goes on after that
            release; after a crash a release may have been left out.
        keepers: the parties that make the noise in place of this server, which then sees noised sums only; `key` then draws the
            cohorts alone.

    Raises:
        TypeError: for a setting of another type.
        ValueError: for settings that are out of range or contradict each other, and an inner strategy that cannot work here.
            Nothing is opened before `start`.

    >>> from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
    >>> from flwr.serverapp.strategy import FedAvg
    >>> participation = Participation(rounds=210, min_separation=21)
    >>> plan = Plan.calibrated(LambdaCGD(0.9), participation, clip_norm=1.0, epsilon=8, delta=1e-5)
    >>> strategy = CorrelatedNoise(FedAvg(min_train_nodes=60), plan, key=NoiseKey.generate(), ledger="run.db")
    >>> strategy.cohort_size
    60
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last: TrainingRounds | None = None  # of the ledger that was opened last
        self._is_open = False
        self._evaluator: Evaluator | None = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        """Open the ledger: from here on no other process can release anything for this run."""
        if self.ledger is None and self.releases:
            raise ValueError(
                f"{self.releases} rounds of this run are released, and their record was in memory; give a ledger file, or call "
                "start inside `with strategy:`"
            )
        path, configuration, admission = self.ledger or MEMORY, self.configuration(), None
        if self.budget is not None:
            try:
                admission = self.budget.admission(self.plan, key=self.key, ledger=path)
            except ValueError:
                discard_unused(self.key)
                raise
            for text in admission.notes:
                log_warning(text)
            if admission.refused:
                log_info(
                    f"at ε = {rounded_up(admission.cost)} for all runs together, some who are refused could take part"
                )
            configuration |= admission.configuration
        ledger = Ledger.open(path, plan=self.plan, configuration=configuration, key=self.key)
        self._last = TrainingRounds(self, ledger, admission)
        self._is_open = True
        try:
            if self.evaluation is not None:
                self._evaluator = Evaluator(self.evaluation, self, self._last)
            if not self.releases and self.budget is None:
                log_other_runs(ledger)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the ledger, if it is open."""
        evaluator, self._evaluator = self._evaluator, None
        was_open, self._is_open = self._is_open, False
        try:
            if was_open and self._last is not None:
                self._last.close()
        finally:
            if evaluator is not None:
                evaluator.close()

    @property
    def _rounds(self) -> TrainingRounds:
        """The rounds of the ledger that is open. Raises ValueError if none is."""
        if self._last is None or not self._is_open:
            raise ValueError("the ledger is not open: call start, or use the strategy inside `with strategy:`")
        return self._last

    @property
    def clip_norm(self) -> float:
        """The norm of the next round: the plan's, unless it adapts."""
        return self.plan.clip_norm if self._last is None else self._last.clip_norm

    @property
    def dropped(self) -> Counter[RejectionReason]:
        """Replies dropped since the ledger was opened, by cause, and users that nodes left out: for the operator's eyes only."""
        return Counter() if self._last is None else self._last.dropped

    @property
    def releases(self) -> int:
        """How many rounds are released so far, as the ledger said when it was open last."""
        return 0 if self._last is None else self._last.releases

    def summary(self) -> None:
        """Log what is promised and under which assumptions."""
        log_guarantee(self, self.releases)
        if self._evaluator is not None:
            self._evaluator.log_guarantee()
        self.noise.log(self.plan, self.evaluation_plan)
        log_inner(self)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """One message for each node that hosts a user of this round's cohort.

        Args:
            server_round: not used: the ledger knows the round.
            arrays: the model that was released last, or the initial one.
            config: what is sent to all nodes in this round.
            grid: the way to the nodes.

        Returns:
            The messages; none if the round is skipped, because too few users are there.

        Raises:
            ValueError: if the plan's rounds are used up.
        """
        return self._rounds.configure(arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's next model after the noised mean of the replies, and how its clip norm adapted, if it does.

        Args:
            server_round: not used: the ledger knows the round.
            replies: those to the messages of `configure_train`.

        Returns:
            The released model and those metrics; (None, None) if nothing is released.
        """
        return self._rounds.aggregate(replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: what clients measure has no noise. `evaluation` gives private metrics.

        Args:
            server_round: the number of the release, from 1.
            arrays: the released model.
            config: what is sent to all nodes.
            grid: the way to the nodes.
        """
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing, as nothing was asked.

        Args:
            server_round: the number of the release, from 1.
            replies: none.
        """
        return None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> RunResult:
        """Run until all planned rounds are released: Flower's `Strategy.start`, with the end that the plan sets.

        Args:
            grid: the way to the nodes.
            initial_arrays: the model at first. A run that goes on takes the one that was released last.
            num_rounds: if fewer than the rounds that are left, so many are tried (one that is not released counts too).
            timeout: seconds to wait for the replies of a round.
            train_config: what is sent to all nodes in every round.
            evaluate_config: what is sent to all nodes in every private evaluation.
            evaluate_fn: `evaluate_fn(release, arrays)` evaluates on the server: the initial model as release 0, and then every
                released one.

        Returns:
            The last model, and metrics by release: those of the training are the ε spent.

        Raises:
            IncompleteRunError: if the run ends before its plan, unless `num_rounds` is smaller than what was left of it.
            TypeError: for `initial_arrays` that are no ArrayRecord.
            ValueError: for a negative `num_rounds`, and a model, plan or ledger that do not belong together.
        """
        if not isinstance(initial_arrays, ArrayRecord):
            raise TypeError(
                "initial_arrays must be an ArrayRecord, for example ArrayRecord(model.state_dict()); got "
                f"{type(initial_arrays).__name__}"
            )
        if num_rounds is not None and (not hasattr(num_rounds, "__index__") or num_rounds < 0):
            raise ValueError(
                f"num_rounds must be a whole number, at least 0, or None for all of the plan; got {num_rounds!r}"
            )
        opened_here = not self._is_open
        if opened_here:
            self._open()
        elif (now := settings(self.inner)) != self._rounds.inner_settings:
            raise ValueError(
                f"the settings of the inner strategy are {now}, and the ledger was opened with "
                f"{self._rounds.inner_settings}: change them before"
            )
        try:
            configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
            loop = RunLoop(self, self._rounds, self._evaluator, grid, timeout, *configs, evaluate_fn)
            result = loop.begin(initial_arrays)
            del initial_arrays  # from the first release on nobody here needs it
            return loop.run(result, num_rounds, self.on_release)
        finally:
            if opened_here:
                self.close()
