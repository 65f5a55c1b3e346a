"""How the server moves the model with a released mean: Flower's optimisers, with momentum and a schedule as settings."""

from typing import Any, Literal

from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

from fedcgd.mechanisms.schedule import SCHEDULES, Schedule
from fedcgd_flower.inner import scheduled

ServerOptimizer = Literal["sgd", "adam", "yogi", "adagrad"]

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


def check_average(average: float, augmentations: int) -> None:
    """Raise ValueError for a decay of the average of models that is not in [0, 1), and fewer than no copies of an example."""
    if not 0 <= average < 1:
        raise ValueError(f"average must be in [0, 1), got {average}: the decay, for example 0.99; 0 is the last model")
    if augmentations < 0:
        raise ValueError(f"augmentations must be at least 0, got {augmentations}")


def server_strategy(
    optimizer: ServerOptimizer,
    *,
    learning_rate: float,
    momentum: float,
    schedule: Schedule,
    rounds: int,
    warmup: int = 0,
) -> FedAvg:
    """The Flower strategy to put `CorrelatedNoise` around; it sees released means only, so nothing of it costs privacy.

    Raises ValueError as `check_descent` does, and for a warm-up that is not shorter than the run.
    """
    check_descent(optimizer, momentum, schedule)
    base, rate = _CLASSES[optimizer]
    options: dict[str, Any] = {rate: learning_rate} | ({"server_momentum": momentum} if optimizer == "sgd" else {})
    kind = scheduled(base, schedule, rounds=rounds, warmup=warmup)
    made: FedAvg = kind(min_train_nodes=1, min_available_nodes=1, **options)
    return made
