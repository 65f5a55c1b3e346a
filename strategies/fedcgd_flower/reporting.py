"""What a run promises, in words for the operator: ε, of what, and under which assumptions."""

import math
from collections import Counter
from dataclasses import dataclass, field
from logging import INFO

from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedcgd.accounting.guarantee import NO_NOISE, large_delta, rounded_up
from fedcgd.ledger import Ledger
from fedcgd.mechanisms.error import error_norms
from fedcgd.plan import Plan
from fedcgd.support.numbers import plural
from fedcgd_flower.flower_private import log, log_info, log_warning
from fedcgd_flower.inner import FLOWERS_DEFAULT, own_aggregation, unsaved
from fedcgd_flower.inner import settings as inner_settings
from fedcgd_flower.problems import RejectionReason
from fedcgd_flower.settings import RunSettings


def log_guarantee(settings: RunSettings, released: int) -> None:
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


def drowned(settings: RunSettings, size: int) -> str:
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


def log_inner(settings: RunSettings) -> None:
    """Log the inner strategy with what of it changes training, and what of it does not apply here."""
    inner, expected_users = settings.inner, settings.cohort.expected_users
    rates = ", ".join(f"{name} = {value}" for name, value in inner_settings(inner)["training"].items())
    log(INFO, f"\t├──> Inner strategy: {type(inner).__name__}({rates})")
    if held := unsaved(inner):
        log_info(
            f"{', '.join(held)} of {type(inner).__name__} cannot be saved with a release: what a round changes in it is lost "
            "where the run is resumed. Give the strategy state() and restore(state) if that matters"
        )
    if not _is_flowers(getattr(inner, "train_metrics_aggr_fn", None)):
        log_warning("train_metrics_aggr_fn is not called: metrics of training stay on the nodes")
    if type(inner).start is not Strategy.start:
        log_warning(f"{type(inner).__name__}.start is not called; on_release is, after each release")
    if (kind := own_aggregation(inner)) is not None:
        log_warning(
            f"{kind}.aggregate_train is its own, and sees a round's noised sum before the round is on record. If the server "
            "stops there, the round is repeated under other noise: what aggregate_train keeps of it (a model that it saves, "
            "sends or logs) is not covered by ε. Keep models in on_release, which is called with releases only"
        )
    available = getattr(inner, "min_available_nodes", 0)
    if available > max(expected_users, FLOWERS_DEFAULT):
        log_warning(
            f"min_available_nodes = {available} is not waited for, because expected_users = {expected_users} was given"
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
        f"the planned run: {whole}; for the {plural(released, 'round', 'rounds')} released{' or spent' * bool(spent)}, ε ≤ "
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


def guarantee_metrics(plan: Plan, *, released: int) -> MetricRecord:
    """The metrics of a release: ε of the whole plan, and of the rounds `released` until then."""
    epsilon, planned = plan.quick_guarantee(released=released).epsilon, plan.guarantee().epsilon
    return MetricRecord({"epsilon": epsilon, "epsilon-planned": planned, "delta": plan.delta, "releases": released})


@dataclass
class RoundReport:
    """What happened to one try of a round."""

    round: int
    rounds: int
    asked: int = 0
    nodes: int = 0
    answered: int = 0
    lost: Counter[RejectionReason] = field(default_factory=Counter)
    """Users who were asked and are not in the sum, by cause."""
    failure: str = ""
    """Why the round was not released; empty if it was."""
    notes: list[str] = field(default_factory=list)
    """What else happened: ε, how the clip norm moved, variances that were raised, what was measured."""

    def add_epsilon(self, epsilon: float, delta: float) -> None:
        """The round is released, at this ε so far: before the other notes."""
        text = NO_NOISE if math.isinf(epsilon) else f"ε ≤ {rounded_up(epsilon, 4)} so far at δ = {delta:g}"
        self.notes[:0] = [text, "nobody answered: what is released is noise alone"] if self.noise_alone else [text]

    @property
    def noise_alone(self) -> bool:
        """Whether a release has spent ε and learned nothing, because everybody who was asked failed."""
        return bool(self.asked) and not self.answered and not self.failure

    def __str__(self) -> str:
        parts = []
        if self.asked or not self.failure:
            causes = ", ".join(f"{cause}: {count}" for cause, count in sorted(self.lost.items()))
            where = f"{plural(self.asked, 'user', 'users')} asked at {plural(self.nodes, 'node', 'nodes')}"
            asked = f"{where}, {self.answered} answered"
            parts.append(f"{asked} ({causes})" if causes else asked)
        if self.failure:
            parts.append(f"not released: {self.failure}")
        return f"[ROUND {self.round + 1}/{self.rounds}] " + " | ".join(parts + self.notes)


def metrics_text(where: str, metrics: MetricRecord) -> str:
    """One part of a line: what was measured, and where."""
    numbers = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
    )
    return f"{where}: {', '.join(numbers)}"


def config_text(config: ConfigRecord) -> str:
    """A configuration as Flower logs it, without bytes."""
    shown = (f"{name}: {'<bytes>' if isinstance(value, bytes) else value}" for name, value in config.items())
    return ", ".join(shown) or "(empty)"
