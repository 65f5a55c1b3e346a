"""Who takes part when: the promise (n, k, b, sampling) that the accounting relies on."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from fedcgd.support.numbers import as_float, as_whole

MOST_ROUNDS = 10**8
"""More than any run has: an array with a number for each round takes 0.8 GB."""
_LEAST_RATE = 2.0**-64
"""Cohorts are drawn by 64 bits; and rates near the least double have no digits left to account by."""

Sampling = Literal["none", "balls-in-bins", "poisson", "cyclic-poisson", "b-min-sep", "random-allocation"]


@dataclass(frozen=True, kw_only=True)
class Participation:
    """A user takes part in at most k of n rounds, any two at least b apart; `sampling` says how its rounds are chosen.

    - `none`: the adversary may know and choose the rounds. k defaults to ⌈n/b⌉, the most that fit.
    - `balls-in-bins`: each user falls in one secret, uniform bin j of b and takes part in rounds j, j + b, …; n = k·b.
    - `random-allocation`: the run is k epochs of n/k rounds, in each of which a user takes part in one round, secret, uniform
      and drawn anew; b = 1, since the last round of an epoch and the first of the next are neighbours. k must be given.
    - `poisson`: in each round a user takes part with probability `sampling_rate`, independently; b = 1.
    - `cyclic-poisson`: users are split in b groups beforehand; in round t each user of group t mod b takes part with
      probability `sampling_rate`.
    - `b-min-sep`: in each round in which at least b rounds have passed since its last, a user takes part with probability
      `sampling_rate` = p. With a `warm_start` the round from which it may is drawn at first, so that the expected cohort is the
      same in every round, r = 1/(1/p + b − 1) of the users; without, everybody may from round 0, and the first cohorts
      are larger.

    Args:
        rounds: n, the number of releases, 1 to 10⁸.
        min_separation: b, in rounds: any two participations of a user are at least so far apart. The number of bins under
            `balls-in-bins`, and of groups under `cyclic-poisson`.
        max_participations: k; None for ⌈n/b⌉, the most that fit. The number of epochs under `random-allocation`.
        sampling: how a user's rounds are chosen.
        sampling_rate: q, or p, in (0, 1] and at least 2⁻⁶⁴: for `poisson`, `cyclic-poisson` and `b-min-sep` only.
        warm_start: whether the first cohorts are as large as the later ones, for `b-min-sep` only.

    Raises:
        ValueError: for values that contradict each other, or are no whole numbers where they count.
        TypeError: for a `sampling_rate` that is no number.

    >>> Participation(rounds=210, min_separation=21).participations
    10
    """

    rounds: int
    min_separation: int = 1
    max_participations: int | None = None
    sampling: Sampling = "none"
    sampling_rate: float | None = None
    warm_start: bool = True

    def __post_init__(self) -> None:
        if self.sampling not in get_args(Sampling):
            raise ValueError(
                f"sampling must be {', '.join(get_args(Sampling)[:-1])} or {get_args(Sampling)[-1]}, got {self.sampling!r}; "
                "no other sampling is accounted for"
            )
        if not self.warm_start and self.sampling != "b-min-sep":
            raise ValueError(f"warm_start=False is for b-min-sep, and sampling is {self.sampling}: leave it out")
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
        if self.sampling in ("poisson", "cyclic-poisson", "b-min-sep") and (q is None or not _LEAST_RATE <= q <= 1):
            raise ValueError(
                f"sampling_rate must be in (0, 1] for {self.sampling} sampling, and at least 2⁻⁶⁴, as a draw has 64 bits, "
                f"got {q}: the part of users in a round"
            )
        if self.sampling in ("poisson", "cyclic-poisson"):
            if k is not None:
                raise ValueError(f"max_participations does not apply to {self.sampling} sampling; give sampling_rate")
            if self.sampling == "poisson" and b != 1:
                raise ValueError(f"poisson sampling has min_separation 1, got {b}; use cyclic-poisson")
            return
        if q is not None and self.sampling != "b-min-sep":
            raise ValueError(
                f"sampling_rate applies to poisson, cyclic-poisson and b-min-sep only, not to {self.sampling}; leave it out"
            )
        if self.sampling == "balls-in-bins" and n % b:
            raise ValueError(
                f"balls-in-bins needs rounds to be a multiple of the {b} bins (min_separation), got {n}; "
                f"use {n - n % b or b} or {n + b - n % b} rounds"
            )
        if self.sampling == "random-allocation":
            if b != 1:
                raise ValueError(
                    f"random-allocation has min_separation 1, since the last round of an epoch and the first of the next are "
                    f"neighbours, got {b}; leave it out"
                )
            if k is None or not 1 <= k <= n or n % k:
                raise ValueError(
                    f"random-allocation needs max_participations, the number of epochs, that divides the {n} rounds; got {k}"
                )
        most = math.ceil(n / b)
        if k is not None and not 1 <= k <= most:
            raise ValueError(
                f"max_participations must be between 1 and ⌈rounds / min_separation⌉ = {most} "
                f"for {n} rounds {b} apart, got {k}; leave it out for the most"
            )
        if self.sampling == "balls-in-bins" and k is not None and k * b != n:
            raise ValueError(
                f"balls-in-bins has max_participations · min_separation = rounds, got {k} · {b} ≠ {n}; "
                f"a user takes part in every one of the {n // b} epochs: leave "
                "max_participations out"
            )

    def __str__(self) -> str:
        n, b, q = self.rounds, self.min_separation, self.sampling_rate
        if self.sampling == "random-allocation":
            return f"n = {n} rounds, a user in one of each {n // self.participations}, drawn anew"
        if q is None:
            return f"n = {n} rounds, a user in at most k = {self.participations} of them, at least b = {b} apart"
        if self.sampling == "b-min-sep":
            start = "a warm start" if self.warm_start else "all free at the start"
            return (
                f"n = {n} rounds, a user in each, at least b = {b} after its last, with probability p = {q:.6g} "
                f"(in {self.expected_rate:.6g} of all rounds; {start})"
            )
        groups = f", users in {b} groups that take turns" if self.sampling == "cyclic-poisson" else ""
        return f"n = {n} rounds{groups}, a user in each with probability q = {q:.6g}"

    @staticmethod
    def b_min_sep(
        rounds: int, *, users: int, cohort_size: int, min_separation: int | None = None, warm_start: bool = True
    ) -> "Participation":
        """Random b-min-separation in which `cohort_size` of `users` are expected in a round.

        Args:
            rounds: n.
            users: how many there are.
            cohort_size: how many of them a round has, in expectation. The p that gives it is 1/(users/cohort_size − b + 1).
            min_separation: b. By default two thirds of the rounds that pass until everybody has had a turn: a larger b
                spaces a user's rounds more evenly, which correlated noise profits from, and a smaller one leaves more to
                chance, which is what amplifies. Where it was measured (docs/accounting.md) two thirds had the least
                error; a third had 1 % more, and nine tenths 2 to 9 % more.
            warm_start: whether cohorts are as large at the start as later.

        Raises:
            ValueError: if cohort_size is not in 1 … users, or b above users/cohort_size.
        """
        if not 1 <= cohort_size <= users:
            raise ValueError(f"cohort_size must be in 1 … {users}, the number of users, got {cohort_size}")
        turns = users / cohort_size
        b = max(1, min(rounds, int(turns * 2 / 3))) if min_separation is None else min_separation
        if b > turns:
            raise ValueError(
                f"min_separation must be at most users/cohort_size = {turns:g}, got {b}: with more rest there are not enough "
                "users for a cohort"
            )
        return Participation(
            rounds=rounds,
            min_separation=b,
            sampling="b-min-sep",
            sampling_rate=1 / (turns - b + 1),
            warm_start=warm_start,
        )

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
        """Whether a user's rounds are drawn in secret, which every sampling but `none` relies on."""
        return self.sampling != "none"

    @property
    def spacing(self) -> int:
        """Rounds from one turn of a user to the next, about: n/k under `random-allocation`, where they may be nearer; else b."""
        return self.rounds // self.participations if self.sampling == "random-allocation" else self.min_separation

    @property
    def has_bins(self) -> bool:
        """Whether every user has one bin, or group, and takes part only in rounds of its number modulo b."""
        match self.sampling:
            case "balls-in-bins" | "cyclic-poisson":
                return True
            case "none" | "poisson" | "b-min-sep" | "random-allocation":
                return False

    @property
    def expected_rate(self) -> float | None:
        """The part of all users that a round is expected to have, once the start is over; None where it is not random."""
        q, b = self.sampling_rate, self.min_separation
        match self.sampling:
            case "none":
                return None
            case "balls-in-bins":
                return 1 / b
            case "random-allocation":
                return self.participations / self.rounds
            case "poisson" | "cyclic-poisson":
                assert q is not None
                return q / b
            case "b-min-sep":
                assert q is not None
                return 1 / (1 / q + b - 1)

    def users_for(self, cohort_size: int) -> int:
        """The fewest users that all rounds can be done with, `cohort_size` in each; with a sampling, how many give such cohorts.

        Args:
            cohort_size: the users of a round; with a sampling, as many as are expected.
        """
        if self.expected_rate is not None:
            return round(cohort_size / self.expected_rate)
        n, k, b = self.rounds, self.participations, self.min_separation
        return max(cohort_size * min(b, n), math.ceil(cohort_size * n / k))

    @property
    def participations(self) -> int:
        """k: the most rounds that one user takes part in (n for Poisson sampling, where nothing bounds it)."""
        if self.max_participations is not None:
            return self.max_participations
        return math.ceil(self.rounds / self.min_separation)
