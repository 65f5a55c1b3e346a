"""A whole recipe: all that decides a private training run besides its data, its model and its learning rate."""

from dataclasses import dataclass
from functools import lru_cache

from fedcgd.mechanisms.schedule import Schedule, scheduled_workload
from fedcgd.mechanisms.workload import Workload
from fedcgd.participation import Participation, scheme_of


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Who takes part when, with which noise, and how the model is moved.

    Args:
        mechanism: as on the command line, with or without its number: "lambda-cgd".
        sampling: how a user's rounds are chosen.
        users: how many there are, examples or people.
        steps: the rounds of an epoch, in which everybody takes part once.
        participations: how often each user takes part; under Poisson or b-min-sep sampling on average.
        schedule: of the learning rate: "constant", "linear" or "cosine".
        momentum: heavy-ball momentum β in [0, 1).

    Raises:
        ValueError: unless there are 1 to `users` steps.

    >>> recipe = Recipe(mechanism="lambda-cgd", sampling="none", users=60_000, steps=10, participations=5)
    >>> recipe.cohort, recipe.rounds
    (6000, 50)
    """

    mechanism: str
    sampling: str
    users: int
    steps: int
    participations: int
    schedule: Schedule = "linear"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= self.users:
            raise ValueError(f"steps must be between 1 and the {self.users} users, got {self.steps}")

    @property
    def cohort(self) -> int:
        """Users in a round, at least."""
        return self.users // self.steps

    @property
    def rounds(self) -> int:
        """The releases of the run."""
        return self.steps * self.participations

    @property
    def who(self) -> str:
        """Who takes part in a round, in words: all users, or who may know."""
        if self.steps == 1:
            return "full participation"
        return self.sampling if self.is_secret else "without amplification"

    @property
    def is_secret(self) -> bool:
        """Whether ε relies on who takes part when being secret."""
        return scheme_of(self.sampling).hidden is not None

    @property
    def workload(self) -> Workload:
        """What the releases are turned into."""
        return _workload(self.schedule, self.rounds, self.momentum)

    @property
    def participation(self) -> Participation:
        """Who takes part when."""
        return Participation.for_cohorts(self.sampling, self.rounds, users=self.steps, cohort_size=1)


@lru_cache(maxsize=256)  # many mechanisms are tried with each, and a rate for each round is checked
def _workload(schedule: Schedule, rounds: int, momentum: float) -> Workload:
    return scheduled_workload(schedule, rounds, momentum=momentum)
