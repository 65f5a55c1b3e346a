"""How many bands: more of them cancel more noise, fewer of them leave more privacy to amplification by sampling.

After McKenna, "Scaling up the Banded Matrix Factorization Mechanism for Differentially Private ML", 2024, arXiv:2405.15913.
"""

import math

from fedcgd.support.numbers import as_positive


def power_bandwidths(rounds: int, epochs: int) -> tuple[int, ...]:
    """1, 2, 4, … and n/k, which has no amplification left: the error changes slowly between them."""
    longest = max(1, rounds // epochs)
    return tuple(sorted({2**i for i in range(longest.bit_length())} | {longest}))


def rule_of_thumb(epsilon: float, *, rounds: int, epochs: int) -> int:
    """p ≈ ε·√n/k bands, at least 1 and at most n/k (Section 4.3 of arXiv:2405.15913).

    About ε·√n epochs are enough for DP-SGD to be best.
    Where it misses the best p by a factor of 2 to 4, the error is within a few percent of the least: a start, not a search.
    """
    epsilon = as_positive("epsilon", epsilon)
    return int(min(max(round(epsilon * math.sqrt(rounds) / epochs), 1), max(rounds // epochs, 1)))
