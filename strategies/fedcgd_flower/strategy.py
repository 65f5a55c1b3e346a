"""The Flower server strategy: user updates are clipped and summed, correlated noise is added, the inner strategy steps."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import INFO, WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The round in flight: what it releases, and what each message asked for."""

    round: int
    attempt: int
    model: Flat
    layout: Layout
    tasks: tuple[tuple[Message, TrainTask], ...]


class CorrelatedNoise(Strategy):
    """DP-λCGD, or any mechanism, around an inner strategy: the model steps by (Σ clipped updates + ζσ(C⁻¹Z)_t) / cohort.

    >>> CorrelatedNoise(FedAvg(min_train_nodes=60), mechanism=LambdaCGD(0.9), clip_norm=1.0, epsilon=8, delta=1e-5,
    ...                 participation=Participation(rounds=230, min_separation=23))

    The noise is calibrated so that all rounds together are (ε, δ)-DP under adding or removing one user, whoever sees every
    released model; give `noise_multiplier` in place of `epsilon` to fix σ instead.

    - `cohort_size`: users asked in a round, and the divisor of the mean however many answer. It defaults to the inner strategy's
      `min_train_nodes`. Under Balls-in-Bins and Poisson sampling it is only the divisor: the expected number of users of a round.
    - `key`: made with `NoiseKey.generate()` and kept in a file, or `NoiseKey.simulation(seed)` for runs that need no privacy.
    - `ledger`: where the run is recorded, and resumed from; in memory by default, where a crash ends it.
    - `identity`: "declared" (nodes list their users) or "authenticated" (a node is one user, named by its registration).
    - `min_answers`: a round with fewer answers is not released, and is tried again.
    - `patience`: seconds to wait for enough users before a round is skipped.
    - `forward_client_metrics`: evaluate on clients with the inner strategy and return their averaged metrics. These are not
      differentially private: ε no longer covers what the run tells.

    The inner strategy gets one reply a round: FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad and FedProx work unchanged; those that
    compare clients (Krum, FedMedian, QFedAvg) have nothing to compare.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        mechanism: Mechanism,
        participation: Participation,
        clip_norm: float,
        delta: float,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        cohort_size: int | None = None,
        key: NoiseKey,
        ledger: Ledger | None = None,
        identity: Identity = "declared",
        min_answers: int | None = None,
        patience: float = 600.0,
        forward_client_metrics: bool = False,
    ) -> None:
        if (epsilon is None) == (noise_multiplier is None):
            raise ValueError(f"give either epsilon or noise_multiplier, got {epsilon=} and {noise_multiplier=}")
        if cohort_size is None:
            cohort_size = getattr(strategy, "min_train_nodes", None)
        if cohort_size is None or cohort_size < 1:
            raise ValueError(f"cohort_size must be at least 1, got {cohort_size}: the planned number of users of a round")
        if noise_multiplier is not None:
            self.plan = Plan(
                mechanism=mechanism,
                participation=participation,
                clip_norm=clip_norm,
                noise_multiplier=noise_multiplier,
                delta=delta,
            )
        else:
            assert epsilon is not None
            self.plan = Plan.calibrated(
                mechanism=mechanism, participation=participation, clip_norm=clip_norm, epsilon=epsilon, delta=delta
            )
