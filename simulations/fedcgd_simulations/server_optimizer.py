"""How the server moves the model with a released mean: Flower's optimisers, with momentum and a schedule as settings."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

ServerOptimizer = Literal["sgd", "adam", "yogi", "adagrad"]
Schedule = Literal["constant", "linear", "cosine"]

SCHEDULES: dict[Schedule, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2.0,
}
"""What the learning rate is multiplied with when so much of the run is done, in [0, 1)."""

_CLASSES: dict[ServerOptimizer, tuple[type[FedAvg], str]] = {
    "sgd": (FedAvgM, "server_learning_rate"),
    "adam": (FedAdam, "eta"),
    "yogi": (FedYogi, "eta"),
    "adagrad": (FedAdagrad, "eta"),
}


def check_descent(optimizer: str, momentum: float, schedule: str) -> None:
    """Raise ValueError for an unknown name, and for momentum that is not in [0, 1) or not that of "sgd"."""
    for what, value, known in (("optimizer", optimizer, _CLASSES), ("schedule", schedule, SCHEDULES)):
        if value not in known:
            raise ValueError(f"{what} must be one of {', '.join(known)}, got {value!r}")
    if not 0 <= momentum < 1 or (momentum and optimizer != "sgd"):
        raise ValueError(
            f"momentum must be in [0, 1), and 0 with an optimizer other than sgd, got {momentum} with {optimizer}"
        )


def server_strategy(
    optimizer: ServerOptimizer, *, learning_rate: float, momentum: float, schedule: Schedule, rounds: int
) -> FedAvg:
    """The Flower strategy to put `CorrelatedNoise` around; it sees released means only, so nothing of it costs privacy.

    Raises ValueError as `check_descent` does.
    """
    check_descent(optimizer, momentum, schedule)
    base, rate = _CLASSES[optimizer]
    options: dict[str, Any] = {rate: learning_rate} | ({"server_momentum": momentum} if optimizer == "sgd" else {})
    kind = base if schedule == "constant" else _scheduled(base, rate, lambda t: SCHEDULES[schedule](t / rounds))
    made: FedAvg = kind(min_train_nodes=1, min_available_nodes=1, **options)
    return made


def _scheduled(base: type[FedAvg], rate: str, factor: Callable[[int], float]) -> type[FedAvg]:
    """`base` with its attribute `rate` multiplied by factor(0) in the first round, factor(1) in the second, …"""

    class Scheduled(base):  # type: ignore[misc, valid-type]
        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            first = getattr(self, rate)
            setattr(self, rate, first * factor(server_round - 1))
            try:
                result: tuple[ArrayRecord | None, MetricRecord | None] = super().aggregate_train(server_round, replies)
            finally:
                setattr(self, rate, first)  # it is a setting of the run, which a ledger compares
            return result

    Scheduled.__name__ = f"Scheduled{base.__name__}"
    return Scheduled
