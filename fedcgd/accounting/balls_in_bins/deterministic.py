"""Balls-in-Bins without drawing anything: σ, ε and δ from the upper bounds of `markov_chain` and `add`."""

import math
from collections.abc import Callable
from itertools import count

from fedcgd.accounting import gaussian
from fedcgd.accounting.accountant import Bound, Progress
from fedcgd.accounting.balls_in_bins.add import add_bound
from fedcgd.accounting.balls_in_bins.markov_chain import (
    LARGEST_EXPONENT,
    Chain,
    chain_bound,
    chains_of,
)
from fedcgd.accounting.balls_in_bins.remove import remove_bound
from fedcgd.accounting.effort import BINS, Fineness
from fedcgd.accounting.guarantee import LEAST_DELTA
from fedcgd.accounting.random_participation.search import LEAST_EPSILON
from fedcgd.accounting.sampled import LARGEST_MULTIPLIER
from fedcgd.mechanisms.mechanism import Matrix

METHOD = "dominating Markov chain (Kahane's inequality) on a grid that errs upwards, both directions"


def calibrate(gram: Matrix, *, epsilon: float, delta: float, progress: Progress) -> Bound:
    """A noise multiplier σ for which both directions are (ε, δ)-private."""
    highest = gaussian.sigma(epsilon=epsilon, delta=delta) * _reach(gram)
    if highest > LARGEST_MULTIPLIER * _reach(gram):
        return Bound(highest, METHOD)
    return Bound(_least(lambda sigma: (sigma, epsilon), gram, delta, highest, progress), METHOD)


def epsilon(gram: Matrix, *, sigma: float, delta: float, progress: Progress) -> Bound:
    """An ε for which both directions are (ε, δ)-private."""
    highest = gaussian.epsilon(sigma=sigma / _reach(gram), delta=delta)
    if highest < LEAST_EPSILON or _reach(gram) / sigma > LARGEST_EXPONENT:
        return Bound(highest, METHOD)
    return Bound(_least(lambda epsilon: (sigma, epsilon), gram, delta, highest, progress, LEAST_EPSILON), METHOD)


def delta(gram: Matrix, *, sigma: float, epsilon: float, progress: Progress) -> Bound:
    """A δ for which both directions are (ε, δ)-private."""
    highest = gaussian.delta(epsilon=epsilon, sigma=sigma / _reach(gram))
    if highest <= LEAST_DELTA or not 1 / LARGEST_EXPONENT <= sigma / _reach(gram) <= LARGEST_MULTIPLIER:
        return Bound(highest, METHOD)
    chains = chains_of(gram)
    if len(gram) == 1 or not chains:
        return Bound(highest, METHOD)
    rough = [_both(chain, gram, sigma, epsilon, highest, 0.0, BINS.rough) for chain in chains]
    least = min(rough)
    progress(f"δ ≤ {least:.3g}")
    best = chains[rough.index(least)]
    fine = _both(best, gram, sigma, epsilon, min(highest, least), 0.0, BINS.fine)
    return Bound(min(highest, least, fine), METHOD)


def _reach(gram: Matrix) -> float:
    """The sensitivity of the worst bin: without amplification, δ is that of a Gaussian with it."""
    return math.sqrt(float(gram.diagonal().max()))


def _both(
    chain: Chain, gram: Matrix, sigma: float, epsilon: float, scale: float, enough: float, fineness: Fineness
) -> float:
    """An upper bound on the larger δ of the two directions, where one that is proven to be at most `enough` is left there.

    `scale` is about what δ to expect.
    """
    ignore = max(BINS.ignored * scale, LEAST_DELTA)
    adding = add_bound(gram / sigma**2, epsilon)
    if adding > enough:
        bound = chain_bound(chain, sigma=sigma, epsilon=epsilon, ignore=ignore, fineness=fineness, adding=True)
        adding = min(adding, bound)
    removing = chain_bound(chain, sigma=sigma, epsilon=epsilon, ignore=ignore, fineness=fineness, adding=False)
    return max(adding, min(removing, math.exp(min(0.0, remove_bound(gram / sigma**2, epsilon)))))


def _least(
    at: Callable[[float], tuple[float, float]],
    gram: Matrix,
    delta: float,
    highest: float,
    progress: Progress,
    lowest: float = 0.0,
) -> float:
    """About the least x, or `lowest`, with δ at (σ, ε) = at(x) proven to be at most `delta`; `highest` if none is found below."""
    chains = chains_of(gram)
    if len(gram) == 1 or not chains:
        return highest

    (steepness, refinements, about), tries = BINS.search, count(1)

    def excess(x: float, chain: Chain, fineness: Fineness) -> float:
        found = math.log(_both(chain, gram, *at(x), delta, delta, fineness) / delta)
        number = next(tries)
        progress(f"{x:.6g}: {'enough' if found <= 0 else 'not enough'}, {number + 1} of about {max(about, number + 2)}")
        return found

    # Some of `chains` is enough at `high`, by the rough bound; none at `low`.
    low, high = 0.0, highest
    while low < high * 0.98 and high > lowest:
        middle = math.sqrt(low * high) if low else high * 0.7
        enough = [chain for chain in chains if excess(middle, chain, BINS.rough) <= 0]
        if enough:
            high, chains = middle, enough
        else:
            low = middle
    if not low:
        return high
    best = min(chains, key=lambda chain: excess(high, chain, BINS.rough))
    x, found = high, highest
    slope = max((excess(low, best, BINS.rough) - excess(high, best, BINS.rough)) / math.log(high / low), steepness)
    last: tuple[float, float] | None = None
    for _ in range(refinements):
        above = excess(x, best, BINS.fine)
        if above <= 0:
            found = x
        if -BINS.near < above <= 0:
            break
        if last is not None:
            slope = max((last[1] - above) / math.log(x / last[0]), steepness)
        last = (x, above)
        x *= math.exp((above + BINS.near / 3) / slope)
        if x >= found:
            break
    return found
