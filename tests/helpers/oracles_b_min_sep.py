"""Random b-min-separation by enumeration and by plain sums over draws: slow, obvious, sharing nothing with the library."""

import itertools
import math

import numpy as np

ONE_OF_TWO = {(0,): 0.5, (1,): 0.5}
"""The law of one of two columns by a fair coin: two bins, or one round of an epoch of two."""


def patterns(rounds: int, separation: int, rate: float, *, warm: bool) -> dict[tuple[int, ...], float]:
    """Every set of rounds that one user may take part in, with its probability."""
    mean = 1 / (1 / rate + separation - 1)
    starts = {0: 1.0}
    if warm:
        starts = dict.fromkeys(range(1, separation), mean)
        starts[0] = 1 - sum(starts.values())
    found: dict[tuple[int, ...], float] = {}
    for coins in itertools.product((False, True), repeat=rounds):
        for start, chance in starts.items():
            probability, free, taken = chance, start, []
            for t in range(rounds):
                if t < free:
                    if coins[t]:  # no coin is tossed here: count one of the two outcomes only
                        probability = 0.0
                    continue
                probability *= rate if coins[t] else 1 - rate
                if coins[t]:
                    taken.append(t)
                    free = t + separation
            if probability:
                found[tuple(taken)] = found.get(tuple(taken), 0.0) + probability
    return found


def ratio(c: np.ndarray, law: dict[tuple[int, ...], float], y: np.ndarray, sigma: float) -> np.ndarray:
    """dP/dQ at each column of y: the mixture of N(C·1_P, σ²I) over N(0, σ²I)."""
    total = np.zeros(y.shape[1])
    for rounds, probability in law.items():
        mean = c[:, list(rounds)].sum(axis=1)
        total += probability * np.exp((mean @ y - mean @ mean / 2) / sigma**2)
    return total


def deltas(
    c: np.ndarray, law: dict[tuple[int, ...], float], sigma: float, epsilon: float, points: int
) -> tuple[float, float]:
    """δ of removing and of adding a user, by a sum over a grid of `points`^n."""
    n = len(c)
    axis = np.linspace(-8.0, 8.0, points)
    reach = c.sum(axis=1).max() / sigma
    axis = np.linspace(-8.0, 8.0 + reach, points)
    cell = ((axis[1] - axis[0]) / math.sqrt(2 * math.pi)) ** n
    removing = adding = 0.0
    for first in axis:  # a slice at a time
        rest = np.stack(np.meshgrid(*[axis] * (n - 1), indexing="ij")).reshape(n - 1, -1)
        z = np.vstack([np.full(rest.shape[1], first), rest])
        weight = np.exp(-(z**2).sum(axis=0) / 2) * cell
        s = ratio(c, law, sigma * z, sigma)
        removing += float((weight * np.maximum(s - math.exp(epsilon), 0)).sum())
        adding += float((weight * np.maximum(1 - math.exp(epsilon) * s, 0)).sum())
    return removing, adding


def independent_monte_carlo(
    c: np.ndarray, separation: int, rate: float, sigma: float, epsilon: float, *, draws: int, seed: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """δ of removing and of adding with their standard errors: draws from P and from Q, C with at most
    `separation` bands, warm.
    """
    generator, n = np.random.default_rng(seed), len(c)
    mean = 1 / (1 / rate + separation - 1)

    def log_ratio(y: np.ndarray) -> np.ndarray:
        x, e = c.T @ y / sigma**2, (c**2).sum(axis=0) / 2 / sigma**2
        f = np.zeros((n + separation, y.shape[1]))  # logarithms
        for t in range(n - 1, -1, -1):
            f[t] = np.logaddexp(math.log1p(-rate) + f[t + 1], math.log(rate) + x[t] - e[t] + f[t + separation])
        starts = np.array([1 - (separation - 1) * mean] + [mean] * (separation - 1))
        return np.logaddexp.reduce(np.log(starts)[:, None] + f[:separation], axis=0)

    removing, adding = [], []
    for _ in range(0, draws, 1000):
        start = (generator.random(1000) / mean).astype(int) + 1
        taken, free = np.zeros((n, 1000)), np.where(start < separation, start, 0)
        for t in range(n):
            drawn = (free <= t) & (generator.random(1000) < rate)
            taken[t, drawn], free[drawn] = 1, t + separation
        z = sigma * generator.standard_normal((n, 1000))
        removing.append(np.maximum(0, 1 - np.exp(epsilon - log_ratio(c @ taken + z))))
        adding.append(np.maximum(0, 1 - np.exp(epsilon + log_ratio(z))))
    return _mean(np.concatenate(removing)), _mean(np.concatenate(adding))


def _mean(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def indicators(turns: np.ndarray, rounds: int) -> np.ndarray:
    """Who is in which round, shape (rounds, users), of the rounds of each user; one that is no round stands for none."""
    found = np.zeros((rounds, turns.shape[1]), dtype=int)
    for own in turns:
        some = np.flatnonzero(own < rounds)
        found[own[some], some] += 1
    assert found.max(initial=0) <= 1
    return found
