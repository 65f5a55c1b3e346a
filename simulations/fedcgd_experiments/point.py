"""A central training run over examples: its setup, its data and model, and how it learns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn, optim

from fedcgd.mechanisms.schedule import SCHEDULES, Schedule
from fedcgd.optimisation.catalogue import MechanismSpec
from fedcgd.participation import Participation, scheme_of
from fedcgd.support.numbers import as_positive
from fedcgd_simulations.server_optimizer import check_average, check_descent


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the noise depends on: points that share it share a calibration. `steps` is rounds per epoch.

    `mechanism` is spelled as on the command line: "dp-sgd", "lambda-cgd:0.9", "bisr:16:normalized", "file:curve.json". ε is of
    training and of what normalises the inputs, which has the part `normalise` of the budget. Raises ValueError if a mechanism is
    misspelled, if a file that is read (to calibrate, or to count the groups of a sampling) is not there, and for a normalisation
    next to a secret sampling, under which budgets add up otherwise.
    """

    mechanism: str
    sampling: str = "none"
    epsilon: float
    delta: float
    steps: int
    epochs: int
    normalise: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.normalise < 1 or (self.normalise and scheme_of(self.sampling).hidden):
            raise ValueError(
                f"normalise must be at least 0 and below 1, and 0 with a secret sampling; got {self.normalise} with sampling "
                f"{self.sampling}"
            )
        if not self.in_file:  # records are read where the file may be gone
            MechanismSpec.parse(self.mechanism)

    def participation(self) -> Participation:
        """An epoch is `steps` rounds; cyclic Poisson sampling has as many groups as the mechanism has bands.

        Under b-min-sep an example is expected once an epoch, with the default b.
        """
        rounds = self.steps * self.epochs
        groups = MechanismSpec.parse(self.mechanism).bands if self._has_groups else None
        return Participation.for_cohorts(self.sampling, rounds, users=self.steps, cohort_size=1, min_separation=groups)

    @property
    def _has_groups(self) -> bool:
        return scheme_of(self.sampling).takes_groups

    @property
    def in_file(self) -> bool:
        """Whether the mechanism is what a file says."""
        return self.mechanism.startswith("file:")


@dataclass(frozen=True, kw_only=True)
class Descent:
    """SGD with its first learning rate; `schedule` lowers that rate to zero over the rounds, or not at all.

    All of it works on what was released, so it costs no privacy. Raises ValueError for an unknown schedule, and for momentum that
    is not in [0, 1).
    """

    learning_rate: float
    momentum: float = 0.0
    schedule: Schedule = "constant"

    def __post_init__(self) -> None:
        check_descent("sgd", self.momentum, self.schedule)
        as_positive("learning_rate", self.learning_rate)

    def rate(self, round: int, rounds: int) -> float:
        """The learning rate of `round`, of 0 … `rounds` − 1."""
        return self.learning_rate * SCHEDULES[self.schedule](round / rounds)


TEST_SEEDS = 1000
"""Seeds below tune, seeds from here on test: no run that chose anything is among those that judge the choice."""


@dataclass(frozen=True, kw_only=True)
class CentralPoint(Setup, Descent):
    """A training run over examples. Its work is `epochs`: the gradients that it takes of each example, on average.

    What is judged is the exponential moving average of the models with the decay `average`; 0 is the last model. An example's
    gradient is the mean of those of so many `augmentations` of it, if there are any.

    Raises ValueError for a seed that is not one of its split's (`TEST_SEEDS`), and as `Setup` and `Descent` do.
    """

    task: str
    model: str = ""
    delta: float = 1e-5
    clip_norm: float = 1.0
    average: float = 0.0
    augmentations: int = 0
    seed: int
    split: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        if self.split not in ("validation", "test"):
            raise ValueError(f"split must be validation or test, got {self.split!r}")
        if self.split == "validation" and not 0 <= self.seed < TEST_SEEDS:
            raise ValueError(f"seeds for tuning are 0 … {TEST_SEEDS - 1}, got {self.seed}; those above are for tests")
        if self.split == "test" and self.seed < TEST_SEEDS:
            raise ValueError(f"seeds for tests are {TEST_SEEDS} and more, got {self.seed}; those below are for tuning")
        Setup.__post_init__(self)
        Descent.__post_init__(self)
        check_average(self.average, self.augmentations)

    @property
    def setup(self) -> Setup:
        """What its noise depends on."""
        return Setup(**{name: getattr(self, name) for name in Setup.__dataclass_fields__})

    @property
    def descent(self) -> Descent:
        """How the model moves."""
        return Descent(**{name: getattr(self, name) for name in Descent.__dataclass_fields__})

    @property
    def batches(self) -> "CentralPoint":
        """Equal for points whose model, batches and Z are the same, whatever their mechanisms, budgets and ways to learn.

        Those whose inputs are normalised share their budgets too.
        """
        return replace(
            self,
            mechanism=self.mechanism if self._has_groups else "dp-sgd",
            epsilon=self.epsilon if self.normalise else 1.0,  # the noise of what normalises
            clip_norm=1.0,
            learning_rate=1.0,
            momentum=0.0,
            schedule="constant",
        )


def descent(
    how: Descent, parameters: Sequence[nn.Parameter], rounds: int
) -> tuple[optim.SGD, optim.lr_scheduler.LambdaLR]:
    """SGD of `parameters` and its schedule, to be stepped once a round.

    It goes up: the gradients are to be those of minus the loss, as a user's update is in federated training, so that noise
    that is added to them has the same sign in the model.
    """
    optimizer = optim.SGD(parameters, lr=how.learning_rate, momentum=how.momentum, maximize=True)
    factor = SCHEDULES[how.schedule]
    return optimizer, optim.lr_scheduler.LambdaLR(optimizer, lambda round: factor(round / rounds))
