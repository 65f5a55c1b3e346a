"""Balls-in-Bins without drawing anything: σ, ε and δ from the upper bounds of `markov_chain` and `add`."""

import math
from collections.abc import Callable
from itertools import count

from fedcgd.accounting import gaussian
from fedcgd.accounting.accountant import Bound, Progress
from fedcgd.accounting.balls_in_bins.add import add_bound
from fedcgd.accounting.balls_in_bins.markov_chain import (
    FINE,
    LARGEST_EXPONENT,
    ROUGH,
    Chain,
    Fineness,
    chain_bound,
    chains_of,
)
from fedcgd.accounting.balls_in_bins.remove import remove_bound
from fedcgd.accounting.guarantee import LEAST_DELTA
from fedcgd.accounting.random_participation.search import LEAST_EPSILON
from fedcgd.accounting.sampled import LARGEST_MULTIPLIER
from fedcgd.mechanisms.mechanism import Matrix

METHOD = "dominating Markov chain (Kahane's inequality) on a grid that errs upwards, both directions"

_IGNORED = 1e-3  # of δ, for the ends of the grids
_NEAR = 0.05  # how far log δ may stay below the target; 0.3 % of σ or so
_SLOPE = 4.0  # of −log δ over log x, at least
_REFINEMENTS = 6
_STEPS = 50  # of a search, about


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
    rough = [_both(chain, gram, sigma, epsilon, highest, 0.0, ROUGH) for chain in chains]
    least = min(rough)
    progress(f"δ ≤ {least:.3g}")
    best = chains[rough.index(least)]
    fine = _both(best, gram, sigma, epsilon, min(highest, least), 0.0, FINE)
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
    ignore = max(_IGNORED * scale, LEAST_DELTA)
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

    tries = count(1)

    def excess(x: float, chain: Chain, fineness: Fineness) -> float:
        found = math.log(_both(chain, gram, *at(x), delta, delta, fineness) / delta)
        number = next(tries)
        progress(
            f"{x:.6g}: {'enough' if found <= 0 else 'not enough'}, {number + 1} of about {max(_STEPS, number + 2)}"
        )
        return found

    # Some of `chains` is enough at `high`, by the rough bound; none at `low`.
    low, high = 0.0, highest
    while low < high * 0.98 and high > lowest:
        middle = math.sqrt(low * high) if low else high * 0.7
        enough = [chain for chain in chains if excess(middle, chain, ROUGH) <= 0]
        if enough:
            high, chains = middle, enough
        else:
            low = middle
    if not low:
        return high
    best = min(chains, key=lambda chain: excess(high, chain, ROUGH))
    x, found = high, highest
    slope = max((excess(low, best, ROUGH) - excess(high, best, ROUGH)) / math.log(high / low), _SLOPE)
    last: tuple[float, float] | None = None
    for _ in range(_REFINEMENTS):
        above = excess(x, best, FINE)
        if above <= 0:
            found = x
        if -_NEAR < above <= 0:
            break
        if last is not None:
            slope = max((last[1] - above) / math.log(x / last[0]), _SLOPE)
        last = (x, above)
        x *= math.exp((above + _NEAR / 3) / slope)
        if x >= found:
            break
    return found
