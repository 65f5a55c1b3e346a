"""How a private gradient moves the model: the optimiser, its momentum, and what becomes of the learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn, optim

from fedcgd.mechanisms.schedule import SCHEDULES, Schedule
from fedcgd_simulations.server_optimizer import check_descent

Optimizer = Literal["sgd", "adam", "adagrad"]


@dataclass(frozen=True, kw_only=True)
class Descent:
    """An optimiser with its first learning rate; `schedule` lowers that rate to zero over the rounds, or not at all.

    All of it works on what was released, so it costs no privacy. Raises ValueError for an unknown name, and for momentum
    that is not in [0, 1) or not SGD's.
    """

    learning_rate: float
    optimizer: Optimizer = "sgd"
    momentum: float = 0.0
    schedule: Schedule = "constant"

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(Optimizer):
            raise ValueError(f"optimizer must be one of {', '.join(get_args(Optimizer))}, got {self.optimizer!r}")
        check_descent(self.optimizer, self.momentum, self.schedule)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")

    def rate(self, round: int, rounds: int) -> float:
        """The learning rate of `round`, of 0 … `rounds` − 1."""
        return self.learning_rate * SCHEDULES[self.schedule](round / rounds)


def descent(
    how: Descent, parameters: Sequence[nn.Parameter], rounds: int
) -> tuple[optim.Optimizer, optim.lr_scheduler.LambdaLR]:
    """An optimiser of `parameters` and its schedule, to be stepped once a round.

    It goes up: the gradients are to be those of minus the loss, as a user's update is in federated training, so that noise
    that is added to them has the same sign in the model.
    """
    optimizer: optim.Optimizer
    if how.optimizer == "sgd":
        optimizer = optim.SGD(parameters, lr=how.learning_rate, momentum=how.momentum, maximize=True)
    elif how.optimizer == "adam":
        optimizer = optim.Adam(parameters, lr=how.learning_rate, maximize=True)
    else:
        optimizer = optim.Adagrad(parameters, lr=how.learning_rate, maximize=True)
    factor = SCHEDULES[how.schedule]
    return optimizer, optim.lr_scheduler.LambdaLR(optimizer, lambda round: factor(round / rounds))
