"""What a run promises, in words for the operator: ε, of what, and under which assumptions."""

import math
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import MetricRecord
from flwr.supercore import log

from fedcgd.accounting.guarantee import NO_NOISE, large_delta
from fedcgd.ledger import Ledger
from fedcgd.plan import Plan
from fedcgd_flower.adaptive_clipping import AdaptiveClipping
from fedcgd_flower.evaluation import Evaluator


def log_promise(
    plan: Plan,
    *,
    released: int,
    cohort_size: int,
    cohort_source: str,
    adaptive_clipping: AdaptiveClipping | None,
    ledger: Path | None,
    evaluator: Evaluator | None,
    forward_client_metrics: bool,
    users: int,
) -> None:
    """Log what is promised of a run of which so many rounds are released, with `users` at least.

    `cohort_source` says who set the cohort's size.
    """
    if plan.noiseless:
        log(
            WARNING,
            "fedcgd: %s. Clipping is as in the real run; give the plan a noise_multiplier for that",
            NO_NOISE,
        )
    if forward_client_metrics:
        log(
            WARNING,
            "fedcgd: metrics of clients are forwarded as they are (forward_client_metrics=True): they have no noise, "
            "and no ε covers them. evaluation=PrivateEvaluation(…) gives private ones",
        )
    if large := large_delta(plan.delta, users, "users"):
        log(WARNING, "fedcgd: %s", large)
    log(INFO, "\t├──> fedcgd: %s, σ = %.4g, clip norm %g", plan.mechanism, plan.noise_multiplier, plan.clip_norm)
    if adaptive_clipping is not None:
        log(
            INFO,
            "\t│\t├── the clip norm adapts to the %g quantile; that makes the noise on updates %.4g times as large",
            adaptive_clipping.quantile,
            1 / math.sqrt(1 - adaptive_clipping.indicator_norm(plan.noise_multiplier, cohort_size) ** 2),
        )
    log(INFO, "\t│\t├── %s", plan.participation)
    log(INFO, "\t│\t├── %d users a round (%s), and the mean is over so many", cohort_size, cohort_source)
    log(INFO, "\t│\t├── each user counts once: numbers of examples per client are not used as weights")
    log(INFO, "\t│\t├── the ledger: %s", ledger.absolute() if ledger else "in memory; not kept")
    log(INFO, "\t│\t├── this run: %s", epsilon_text(plan, released))
    log(
        INFO,
        "\t│\t└── ε so far, in the rounds below, holds if nobody looks at a released model to decide when the run ends",
    )
    if evaluator is not None:
        log(INFO, "\t├──> fedcgd: %s", evaluator.summary())
        noise = evaluator.settings.noise(evaluator.cohort_size)
        told = ", ".join(f"{name} ± {stddev:.2g}" for name, stddev in noise.items())
        log(INFO, "\t│\t└── %d users an evaluation; noise: %s", evaluator.cohort_size, told)


def epsilon_text(plan: Plan, released: int) -> str:
    """ε of the planned run and, of a part of it, also the smaller one and the condition under which that holds."""
    whole = plan.guarantee()
    if released >= plan.participation.rounds or plan.noiseless:
        return str(whole)
    if not released:
        return f"nothing is released; the planned run: {whole}"
    so_far = plan.quick_guarantee(released=released)
    return (
        f"the planned run: {whole}; for the {released} rounds released, ε ≤ {so_far.epsilon:.4g}, provided that nobody looked at "
        "a released model to decide that the run ends here"
    )


def log_other_runs(ledger: Ledger) -> None:
    """Say that people who were in earlier runs of the key pay for this one too."""
    others = ledger.other_runs()
    if others:
        log(
            WARNING,
            "fedcgd: this key has released rounds of %d other runs, the last one's ledger is %s; for everybody in both, ε "
            "composes: fedcgd ledger compose says to what, and budget=JointBudget(…) keeps people within one ε",
            len(others),
            others[-1].ledger,
        )


def promise_metrics(plan: Plan, *, released: int) -> MetricRecord:
    """What is told with a release: ε of the whole plan, and of the rounds `released` until then."""
    guarantee = plan.quick_guarantee(released=released)
    whole = plan.guarantee().epsilon
    return MetricRecord(
        {"epsilon": guarantee.epsilon, "epsilon-planned": whole, "delta": guarantee.delta, "releases": released}
    )
