"""Schedules of the learning rate: what it is multiplied with in each round. They work on what is released and cost no privacy."""

import math
from collections.abc import Callable
from typing import Literal, get_args

from fedcgd.mechanisms.workload import Workload

Schedule = Literal["constant", "linear", "cosine"]

SCHEDULES: dict[Schedule, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2.0,
}
"""What the learning rate is multiplied with when so much of the run is done, in [0, 1)."""


def check_schedule(schedule: str, *, rounds: int, warmup: int = 0) -> None:
    """Raise ValueError for an unknown schedule, and for a warm-up that is not shorter than the run."""
    if schedule not in get_args(Schedule):
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not 0 <= warmup < rounds:
        raise ValueError(f"warmup must be between 0 and {rounds - 1}, the rounds less 1, got {warmup}")


def rate_factors(schedule: Schedule, rounds: int, *, warmup: int = 0) -> tuple[float, ...]:
    """The factor of the learning rate in each of the `rounds`, in (0, 1].

    Args:
        schedule: `constant`; `linear`, which falls from 1 to 1/rounds; or `cosine`, which falls along half a cosine.
        rounds: n, the releases of the run.
        warmup: the first so many rounds rise linearly, and `schedule` begins after them.

    Raises:
        ValueError: as `check_schedule` does.

    >>> rate_factors("linear", 4)
    (1.0, 0.75, 0.5, 0.25)
    """
    check_schedule(schedule, rounds=rounds, warmup=warmup)
    rising = [(t + 1) / (warmup + 1) for t in range(warmup)]
    after = rounds - warmup
    return (*rising, *(SCHEDULES[schedule](t / after) for t in range(after)))


def scheduled_workload(schedule: Schedule, rounds: int, *, momentum: float = 0.0, warmup: int = 0) -> Workload:
    """SGD with heavy-ball momentum and this schedule, for a first (or, after a warm-up, largest) learning rate of 1.

    A constant schedule is left open in length, so that mechanisms that are optimised for it are found in the cache.
    """
    factors = rate_factors(schedule, rounds, warmup=warmup)
    return Workload(momentum=momentum, learning_rates=() if set(factors) == {1.0} else factors)
