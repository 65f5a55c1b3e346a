"""Random allocation by enumeration and by plain sums over draws: slow, obvious, sharing nothing with the library."""

import itertools
import math

import numpy as np
from oracles_b_min_sep import ratio

Law = dict[tuple[int, ...], float]


def patterns(rounds: int, length: int, released: int) -> Law:
    """Every set of one round in each epoch, as far as it is released, with its probability."""
    found: Law = {}
    for places in itertools.product(range(length), repeat=rounds // length):
        taken = tuple(epoch * length + place for epoch, place in enumerate(places) if epoch * length + place < released)
        found[taken] = found.get(taken, 0.0) + length ** -len(places)
    return found


def by_draws(
    c: np.ndarray, law: Law, sigma: float, epsilon: float, *, draws: int, seed: int
) -> list[tuple[float, float]]:
    """δ of removing and of adding, each with its standard error: means over draws from P and from Q."""
    generator = np.random.default_rng(seed)
    means = np.array([c[:, list(taken)].sum(axis=1) for taken in law])
    which = generator.choice(len(law), size=draws, p=list(law.values()))
    z = sigma * generator.standard_normal((len(c), draws))
    values = (
        np.maximum(0, 1 - math.exp(epsilon) / ratio(c, law, means[which].T + z, sigma)),
        np.maximum(0, 1 - math.exp(epsilon) * ratio(c, law, z, sigma)),
    )
    return [(float(each.mean()), float(each.std() / math.sqrt(draws))) for each in values]
