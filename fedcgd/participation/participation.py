"""Who takes part when: the promise (n, k, b, sampling) that the accounting relies on."""

import math
from dataclasses import dataclass, fields
from fractions import Fraction

from fedcgd.participation.promise import Promise
from fedcgd.participation.samplings import Sampling, scheme_of
from fedcgd.support.numbers import as_float, as_whole

MOST_ROUNDS = 10**8
"""More than any run has: an array with a number for each round takes 0.8 GB."""


@dataclass(frozen=True, kw_only=True)
class Participation(Promise):
    """A user takes part in at most k of n rounds, any two at least b apart; `sampling` says how its rounds are chosen.

    Each sampling has a class in `fedcgd.participation.samplings`, which says what it does, which of these numbers it takes,
    and what a deployment has to do for ε to hold. `reports/accounting.md` compares them in tables.

    Args:
        rounds: n, the number of releases, 1 to 10⁸.
        min_separation: b, in rounds: any two participations of a user are at least so far apart. The number of bins under
            `balls-in-bins`, and of groups under `cyclic-poisson`.
        max_participations: k; None for ⌈n/b⌉, the most that fit. The number of epochs where there is one round of each.
        sampling: how a user's rounds are chosen, by its name in `SAMPLINGS`. Under "none" the adversary may know and choose them.
        sampling_rate: the probability of a coin, in (0, 1] and at least 2⁻⁶⁴, for samplings with coins only.
        warm_start: whether the first cohorts are as large as the later ones, for `b-min-sep` only.

    Raises:
        ValueError: for values that contradict each other, or are no whole numbers where they count.
        TypeError: for a `sampling_rate` that is no number.

    >>> Participation(rounds=210, min_separation=21).participations
    10
    """

    def __post_init__(self) -> None:
        scheme = self.scheme
        n, b = as_whole("rounds", self.rounds), as_whole("min_separation", self.min_separation)
        k = None if self.max_participations is None else as_whole("max_participations", self.max_participations)
        q = None if self.sampling_rate is None else as_float("sampling_rate", self.sampling_rate)
        for name, value in (("rounds", n), ("min_separation", b), ("max_participations", k), ("sampling_rate", q)):
            object.__setattr__(self, name, value)
        if n < 1:
            raise ValueError(f"rounds must be at least 1, got {n}")
        if n > MOST_ROUNDS:
            raise ValueError(
                f"rounds must be at most {MOST_ROUNDS:,}, got {n:,}: what is found for a run takes memory for each round"
            )
        if not 1 <= b <= n:
            raise ValueError(f"min_separation must be between 1 and rounds = {n}, got {b}")
        scheme.check(self)

    def __str__(self) -> str:
        return self.scheme.describe(self)

    @staticmethod
    def for_cohorts(
        sampling: str,
        rounds: int,
        *,
        users: int,
        cohort_size: int,
        min_separation: int | None = None,
        warm_start: bool = True,
    ) -> "Participation":
        """The participation in which `cohort_size` of `users` are asked, or expected, in a round.

        Args:
            sampling: how a user's rounds are chosen.
            rounds: n.
            users: how many there are.
            cohort_size: how many of them a round has.
            min_separation: b; the number of groups under `cyclic-poisson`. By default as many rounds as pass until everybody
                has had a turn where a user's rounds are so far apart, two thirds of them under `b-min-sep`, and elsewhere 1.
            warm_start: whether cohorts are as large at the start as later, for `b-min-sep` only.

        Raises:
            ValueError: if cohort_size is not in 1 … users, b is above users/cohort_size, or one of them is no whole number.

        >>> Participation.for_cohorts("poisson", 100, users=1000, cohort_size=50).sampling_rate
        0.05
        """
        rounds, users = as_whole("rounds", rounds), as_whole("users", users)
        cohort_size = as_whole("cohort_size", cohort_size)
        if not 1 <= cohort_size <= users:
            raise ValueError(f"cohort_size must be in 1 … {users}, the number of users, got {cohort_size}")
        scheme, turns = scheme_of(sampling), Fraction(users, cohort_size)
        b = scheme.default_separation(rounds, turns)
        if min_separation is not None:
            b = as_whole("min_separation", min_separation)
        if b > turns:
            raise ValueError(
                f"min_separation must be at most users/cohort_size = {float(turns):g}, the rounds until a user's next "
                f"participation, got {b}: beyond, there are not enough users for a cohort"
            )
        return Participation(
            rounds=rounds,
            min_separation=b,
            sampling=sampling,
            warm_start=warm_start,
            **scheme.numbers(rounds, turns, b),
        )

    def as_python(self) -> str:
        """The expression that makes this value, without what it leaves at its default.

        >>> Participation(rounds=210, min_separation=21).as_python()
        'Participation(rounds=210, min_separation=21)'
        """
        said = (
            (each.name, getattr(self, each.name)) for each in fields(self) if getattr(self, each.name) != each.default
        )
        return f"Participation({', '.join(f'{name}={value!r}' for name, value in said)})".replace("'", '"')

    @property
    def scheme(self) -> Sampling:
        """What the `sampling` is and does. Raises ValueError for an unknown one."""
        return scheme_of(self.sampling)

    def rounds_released(self, released: int | None) -> int:
        """`released`, or all rounds for None.

        Args:
            released: how many rounds have been published.

        Raises:
            ValueError: if it is not in 0 … n.
        """
        if released is None:
            return self.rounds
        released = as_whole("released", released)
        if not 0 <= released <= self.rounds:
            raise ValueError(f"released must be in 0 … {self.rounds}, got {released}; the run has {self.rounds} rounds")
        return released

    @property
    def is_secret(self) -> bool:
        """Whether ε relies on a user's rounds being secret."""
        return self.scheme.hidden is not None

    @property
    def spacing(self) -> int:
        """Rounds from one turn of a user to the next, about: n/k where there is one in each of k epochs, else b."""
        return self.scheme.spacing(self)

    @property
    def expected_rate(self) -> float | None:
        """The part of all users that a round is expected to have, once the start is over; None without a sampling."""
        return self.scheme.expected_rate(self)

    def users_for(self, cohort_size: int) -> int:
        """The fewest users that all rounds can be done with, `cohort_size` in each; with a sampling, how many give such cohorts.

        Args:
            cohort_size: the users of a round; with a sampling, as many as are expected.
        """
        if self.expected_rate is not None:
            return round(cohort_size / self.expected_rate)
        n, k, b = self.rounds, self.participations, self.min_separation
        return max(cohort_size * min(b, n), math.ceil(cohort_size * n / k))
