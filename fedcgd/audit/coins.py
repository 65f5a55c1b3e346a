"""The audit of b-min-sep sampling: users whose coins are those of a run, and what tells best that one took part."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedcgd.accounting.b_min_sep.accountant import BMinSepAccountant
from fedcgd.mechanisms import matrix
from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.noise.keys import NoiseKey
from fedcgd.participation import Participation
from fedcgd.participation.cohorts import rounds_of
from fedcgd.participation.samplings import Law
from fedcgd.plan import Plan

_BLOCK = 2**22  # numbers of a score's computation at a time


def has_coins(participation: Participation) -> bool:
    """Whether the coins of its sampling can be tossed, and judged, by an audit."""
    return participation.scheme.law is Law.RESTING_COINS


def coin_sums(plan: Plan, users: Iterator[int], present: NDArray[np.bool_], seed: int) -> Matrix:
    """What users add to the sums, shape (n, trials): ζ in the rounds on which its coins fall for one that is `present`, else 0.

    Each trial has the next of `users`, whose coins are tossed by the code of a run, under a key of the audit.
    """
    key = NoiseKey.simulation(seed).choices_of("")
    sums = np.zeros((plan.participation.rounds, len(present)))
    for trial, user in zip(np.flatnonzero(present), users, strict=False):
        sums[list(rounds_of(str(user), plan.participation, key)), trial] = plan.clip_norm
    return sums


def coin_scores(plan: Plan, released: NDArray[np.floating]) -> Vector:
    """The log likelihood ratio of each trial of `released`, shape (n, trials), if the noise is as it should be."""
    accountant = BMinSepAccountant(plan.mechanism, plan.participation)
    rounds, trials = released.shape
    c, step = matrix(plan.mechanism, rounds), max(1, _BLOCK // rounds)
    seen = (c @ released[:, at : at + step] / plan.clip_norm for at in range(0, trials, step))
    return np.concatenate([accountant.log_ratio(plan.noise_multiplier, part) for part in seen])
