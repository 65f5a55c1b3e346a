"""Test a claimed ε from outside: canaries of the worst kind, and how well they can be told from absent ones.

An audit refutes or fails to refute. What it finds is a lower bound on ε; that it lies below the claim proves nothing more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcgd.accounting import calibrate
from fedcgd.audit.bounds import gaussian_bound, one_run_bound, threshold_bound
from fedcgd.audit.coins import coin_scores, coin_sums, has_coins
from fedcgd.mechanisms import DPSGD, Mechanism
from fedcgd.mechanisms.mechanism import Matrix, Vector
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd.support.numbers import as_float, as_positive

Release = Callable[[Matrix, int], NDArray[Any]]
"""(sums with shape (rounds, size), repetition) → all that is released, shape (at least rounds, size), with fresh noise."""

_BATCH = 2**24  # numbers released in one repetition, about
_LEARNED_ROWS = 256  # of the releases that the learned statistic looks at
_CLEAR = 10.0  # standard deviations that a group should stand out by, if the claim holds


@dataclass(frozen=True)
class AuditResult:
    """What an audit found: the claim is refuted, or it is not.

    Attributes:
        passed: whether no lower bound on ε exceeds the claim.
        epsilon_lower: the largest lower bound on ε at `delta`.
        claimed_epsilon: the claim.
        delta: δ of the claim and of the bounds.
        confidence: the probability with which all bounds hold together.
        method: the name of the largest bound.
        trials: the canaries, included and held out.
        bounds: every lower bound on ε, by its name.
    """

    passed: bool
    epsilon_lower: float
    claimed_epsilon: float
    delta: float
    confidence: float
    method: str
    trials: int
    bounds: dict[str, float]


def audit_canaries(
    included: ArrayLike, held_out: ArrayLike, *, epsilon: float, delta: float, confidence: float = 0.99
) -> AuditResult:
    """Is (ε, δ) plausible, given one score for each canary that took part and for each that was held out?

    A fair coin of the auditor's must have decided for each canary. `fedcgd.audit.bounds` says what else the three bounds
    assume; the strongest assumption, independent noise for each canary, holds where each has a coordinate of its own.

    Args:
        included: one score for each canary that took part, larger if it looks as if it had; `canary_scores` gives some.
        held_out: the same for those that did not.
        epsilon: the claimed ε.
        delta: the claimed δ.
        confidence: how sure a refutation is, in (0, 1).

    Raises:
        ValueError: for fewer than two scores of a kind, scores that are not finite, and a claim or confidence out of range.

    >>> rng = np.random.default_rng(1)
    >>> audit_canaries(rng.normal(1, 1, 500), rng.normal(0, 1, 500), epsilon=8, delta=1e-5).passed
    True
    """
    epsilon, delta, confidence = _check_claim(epsilon, delta, confidence)
    taking_part, absent = _scores("included", included), _scores("held_out", held_out)
    each = 1 - (1 - confidence) / 3
    bounds = _bounds(taking_part, absent, taking_part, 1, delta, each)
    return _result(bounds, epsilon, delta, confidence, len(taking_part) + len(absent))


def audit_plan(
    plan: Plan, release: Release, *, epsilon: float, seed: int, trials: int = 40_000, confidence: float = 0.99
) -> AuditResult:
    """Does what `release` does for a run of `plan` keep its ε, at the plan's δ, when users do their worst?

    Each coordinate is one trial: no user, one user or a group of users adds ζ to it, in the rounds of a pattern. The
    group is large enough that its signal is clear, and its ε is brought back to one user's. First the pattern is the one
    that maximises the sensitivity. Two statistics tell its trials apart: the likelihood ratio of the mechanism as it
    should be, and the best linear one that half of the trials show, for the first 256 rows: it finds noise that is wrong
    in ways nobody thought of, for example repeated. The other half is judged. Then as many trials have the pattern that
    the noise of the first ones hides worst, and the best linear statistic within its 256 rounds: it finds a round
    without noise, wherever it is.

    Under b-min-sep sampling a fair coin decides for each of the `trials` whether there is a user. If so, it adds ζ
    in its rounds, which are drawn as a run draws them; and an adversary who knows all but these rounds judges by the
    likelihood ratio that ε is accounted by. Without groups of users and normal scores this sees less: a tenth of σ at δ = 0.1
    with 300,000 trials, and at δ = 1e-5 not that. So audit the noise too, without the sampling.

    Args:
        plan: without a sampling, or with b-min-sep. For others, audit the ε that σ gives without it: the
            noise does not depend on how users are chosen.
        release: `(sums, repetition)` → what is released for sums of shape (rounds, trials), with at least as many rows;
            `server_release` is what a server does.
        epsilon: the claimed ε.
        seed: of the simulated canaries; the result is repeatable.
        trials: simulated canaries, at least 1000; 40,000 tell σ from 0.9σ.
        confidence: how sure a refutation is, in (0, 1).

    Returns:
        Whether the claim stands, the largest lower bound on ε, and every bound by its name.

    Raises:
        ValueError: for another sampling, too few trials, or a release of a wrong shape.

    >>> from fedcgd.audit import server_release
    >>> plan = Plan.calibrated(DPSGD(), Participation(rounds=2), clip_norm=1.0, epsilon=4, delta=1e-5)
    >>> audit_plan(plan, server_release(plan, seed=1), epsilon=4, seed=1, trials=2000).passed
    True
    """
    epsilon, delta, confidence = _check_claim(epsilon, plan.delta, confidence)
    if trials < 1000:
        raise ValueError(f"trials must be at least 1000, got {trials}; 40000 tell σ from 0.9σ")
    coins = has_coins(plan.participation)
    if plan.participation.is_secret and not coins:
        raise ValueError(
            f"the noise is audited for known participation, got sampling {plan.participation.sampling}; give the same rounds "
            "with sampling none, and the ε that σ gives there (the rounds of b-min-sep are drawn)"
        )
    bounds = (_bounds_with_coins if coins else _bounds_of_known_rounds)(
        plan, release, epsilon, seed, trials, confidence
    )
    done = trials + -trials % _size(trials, plan.participation.rounds)
    return _result(bounds, epsilon, delta, confidence, done if coins else 2 * done)


def _bounds_of_known_rounds(
    plan: Plan, release: Release, epsilon: float, seed: int, trials: int, confidence: float
) -> dict[str, float]:
    rng, rounds = np.random.default_rng(seed), plan.participation.rounds
    unit = calibrate(DPSGD(), Participation(rounds=1), epsilon=epsilon, delta=plan.delta).noise_multiplier
    group = ceil(_CLEAR * unit)
    size = _size(trials, rounds)
    repetitions = -(-trials // size)

    def released(pattern: tuple[int, ...], first: int) -> Iterator[tuple[NDArray[np.int_], NDArray[Any]]]:
        for repetition in range(first, first + repetitions):
            present = np.array([0, 1, group])[rng.integers(0, 3, size)]
            sums = np.zeros((rounds, size))
            sums[list(pattern)] = plan.clip_norm * present
            yield present, _checked(release(sums, repetition), sums)

    pattern = sensitivity(plan.mechanism, plan.participation).pattern
    moments = _Moments(
        rounds, min(_LEARNED_ROWS, trials // 12)
    )  # rounds whose covariance the trials without users show
    users, likelihood, seen = [], [], []
    for present, rows in released(pattern, 0):
        own_rounds = rows[:rounds]
        users.append(present)
        likelihood.append(canary_scores(plan.mechanism, own_rounds, [pattern] * size, clip_norm=plan.clip_norm))
        moments.add(own_rounds[:, present == 0])
        seen.append(_looked_at(rows, rounds))
    judged, learned = _learned(users, seen, group)
    scores = {
        "likelihood ratio": (np.concatenate(likelihood)[-len(judged) :], judged),
        "learned statistic": (learned, judged),
    }
    weakest, window = moments.weakest(plan.participation)
    users, seen = [], []
    for present, rows in released(weakest, repetitions):
        users.append(present)
        seen.append(rows[window].astype(np.float64))
    judged, learned = _learned(users, seen, group)
    scores["learned statistic, least hidden rounds"] = (learned, judged)
    each = 1 - (1 - confidence) / (3 * len(scores))
    bounds: dict[str, float] = {}
    for name, (values, users_of) in scores.items():
        found = _bounds(
            values[users_of == 1], values[users_of == 0], values[users_of == group], group, plan.delta, each
        )
        bounds |= {f"{name}, {bound}": value for bound, value in found.items()}
    return bounds


def _bounds_with_coins(
    plan: Plan, release: Release, _: float, seed: int, trials: int, confidence: float
) -> dict[str, float]:
    rng, rounds, users = np.random.default_rng(seed), plan.participation.rounds, count()
    size = _size(trials, rounds)
    scores, present = [], []
    for repetition in range(-(-trials // size)):
        present.append(rng.random(size) < 0.5)
        sums = coin_sums(plan, users, present[-1], seed)
        scores.append(coin_scores(plan, _checked(release(sums, repetition), sums)[:rounds]))
    values, there = np.concatenate(scores), np.concatenate(present)
    each = 1 - (1 - confidence) / 2
    return {
        f"likelihood ratio with coins, {name}": bound(values[there], values[~there], plan.delta, each)
        for name, bound in (("one-run guesses", one_run_bound), ("threshold with Clopper–Pearson", threshold_bound))
    }


def _size(trials: int, rounds: int) -> int:
    """Trials of one repetition; the last may bring more than were asked for."""
    return max(1, min(trials, _BATCH // rounds))


def canary_scores(
    mechanism: Mechanism, released: NDArray[Any], patterns: Sequence[tuple[int, ...]], *, clip_norm: float
) -> Vector:
    """⟨m, C·x̂⟩/(‖m‖ζ) for each canary: N(‖m‖, σ²) if it took part, N(0, σ²) if not.

    m is the sum of the columns of C of the canary's rounds, and this the likelihood ratio for an update of ζ along the
    canary's own direction.

    Args:
        mechanism: the matrix C.
        released: x̂_t along each canary's direction, for all n rounds, shape (n, canaries).
        patterns: the rounds in which each canary took part; for one that was held out any pattern that is chosen without
            looking at the releases, such as another canary's.
        clip_norm: ζ, the norm of a canary's update.

    Returns:
        Shape (canaries,).

    Raises:
        ValueError: for shapes that differ, or a canary without rounds.
    """
    rounds, count = released.shape
    if len(patterns) != count or not all(patterns):
        raise ValueError(
            f"each of the {count} canaries needs a pattern of at least one round, got {len(patterns)} patterns"
        )
    scores = np.empty(count)
    for pattern in set(patterns):
        total = mechanism.columns(rounds, np.array(pattern)).sum(axis=1)
        step = max(1, 2**22 // rounds)
        weights = np.concatenate(
            [
                mechanism.columns(rounds, np.arange(at, min(at + step, rounds))).T @ total
                for at in range(0, rounds, step)
            ]
        )
        mine = [j for j, other in enumerate(patterns) if other == pattern]
        scores[mine] = weights @ released[:, mine] / (np.linalg.norm(total) * clip_norm)
    return scores


class _Moments:
    """Covariances of releases without users, of `width` consecutive rounds at a time."""

    def __init__(self, rounds: int, width: int) -> None:
        self._windows = [slice(at, min(at + width, rounds)) for at in range(0, rounds, width)]
        self._sums = [np.zeros((w.stop - w.start, w.stop - w.start)) for w in self._windows]
        self._count = 0

    def add(self, released: NDArray[Any]) -> None:
        for window, total in zip(self._windows, self._sums, strict=True):
            rows = released[window].astype(np.float64)
            total += rows @ rows.T
        self._count += released.shape[1]

    def weakest(self, participation: Participation) -> tuple[tuple[int, ...], slice]:
        """The rounds t, t + b, … of a user that stand out most from the noise of some window, and that window."""
        n, b, k = participation.rounds, participation.min_separation, participation.participations
        best, first, found = -1.0, 0, self._windows[0]
        for window, total in zip(self._windows, self._sums, strict=True):
            later = np.arange(n)[window, None] - np.arange(n)  # rounds after the first of each pattern
            signal = ((later >= 0) & (later % b == 0) & (later // b < k)).astype(np.float64)
            power = (signal * np.linalg.solve(_with_floor(total / self._count), signal)).sum(axis=0)
            if power.max() > best:
                best, first, found = float(power.max()), int(power.argmax()), window
        return tuple(range(first, n, b))[:k], found


def _learned(users: list[NDArray[np.int_]], rows: list[Matrix], group: int) -> tuple[NDArray[np.int_], Vector]:
    """(users, scores) of the second half of the trials, by the best linear statistic of the first."""
    present, seen = np.concatenate(users), np.concatenate(rows, axis=1)
    half = len(present) // 2
    return present[half:], _discriminant(seen[:, :half], present[:half], group) @ seen[:, half:]


def _bounds(one: Vector, none: Vector, many: Vector, group: int, delta: float, confidence: float) -> dict[str, float]:
    return {
        "one-run guesses": one_run_bound(one, none, delta, confidence),
        "threshold with Clopper–Pearson": threshold_bound(one, none, delta, confidence),
        "Gaussian mean and variance": gaussian_bound(many, none, delta, confidence, users=group),
    }


def _result(bounds: dict[str, float], epsilon: float, delta: float, confidence: float, trials: int) -> AuditResult:
    method = max(bounds, key=lambda name: bounds[name])
    lower = bounds[method]
    return AuditResult(lower <= epsilon, lower, epsilon, delta, confidence, method, trials, bounds)


def _check_claim(epsilon: float, delta: float, confidence: float) -> tuple[float, float, float]:
    """The three as floats."""
    epsilon = as_positive("epsilon", epsilon)
    delta, confidence = as_float("delta", delta), as_float("confidence", confidence)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}; 0.99 is usual")
    return epsilon, delta, confidence


def _checked(released: NDArray[Any], sums: Matrix) -> NDArray[Any]:
    released = np.asarray(released)
    n, size = sums.shape
    if released.ndim != 2 or len(released) < n or released.shape[1] != size or not np.isfinite(released).all():
        raise ValueError(
            f"a release must be finite with shape (at least {n}, {size}), got {released.shape}; round t is row t"
        )
    return released


def _scores(name: str, values: ArrayLike) -> Vector:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or len(scores) < 2 or not np.isfinite(scores).all():
        raise ValueError(f"{name} must be at least two finite scores in one dimension, got shape {scores.shape}")
    return scores


def _looked_at(released: NDArray[Any], rounds: int) -> NDArray[Any]:
    """The first rounds and, before them, what was released beyond one row a round: it should not be there."""
    return np.concatenate([released[rounds:], released[:rounds]])[:_LEARNED_ROWS].astype(np.float64)


def _discriminant(rows: Matrix, present: NDArray[np.int_], group: int) -> Vector:
    """Fisher's weights: covariance⁻¹·(mean with the group − mean without), of trials that are columns."""
    with_group, without = rows[:, present == group], rows[:, present == 0]
    means = with_group.mean(axis=1), without.mean(axis=1)
    centred = np.concatenate([with_group - means[0][:, None], without - means[1][:, None]], axis=1)
    covariance = centred @ centred.T / centred.shape[1]
    weights: Vector = np.linalg.solve(_with_floor(covariance), means[0] - means[1])
    return weights


def _with_floor(covariance: Matrix) -> Matrix:
    """Noise that cancels in some combination leaves nothing to divide by; this floor is far below any noise that is meant."""
    floor = 1e-12 * float(np.trace(covariance)) + 1e-300
    return covariance + floor * np.eye(len(covariance))
