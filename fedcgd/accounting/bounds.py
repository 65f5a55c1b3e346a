"""Runs of independent releases that are at least as telling as a secret sampling of C ≥ 0: bounds that need no draws.

All rest on the theorem on worst inputs and on the growth of δ with the Gram matrix (docs: proofs.md), and so hold in both
directions, for every δ.

- *The norm of C.* With s = ‖C‖₂, C·1_P + σZ is C/s applied to s·1_P + σZ′, and more noise. So C costs no more than C = I with
  s times the noise, whatever the law of P.
- *The same coins.* Let everybody toss the coin of b-min-separation in every round. Its rounds are among the heads, so that
  Poisson sampling of the same coin tells at least as much.
- *Blocks*, for p bands, 1 < p ≤ b + 1. Of p − 1 rounds a user has at most one, which needs a head among p − 1 coins. Rounds of
  different blocks overlap only if these are neighbours, by at most ρκ², with κ² the largest overlap of a round with itself. So
  block j may be √ρ·κ·(e_j + e_{j+1}), ρ ≥ ½. Each coordinate's noise is the sum of two halves, of which one is given to blocks
  of even number and one to those of odd number: then blocks are independent releases, of noise σ/√2 and norm √(2ρ)·κ.
"""

import math
from collections.abc import Sequence

import numpy as np

from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.accounting.sampled import Coin, OneOf, Sampled
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms import Mechanism, Toeplitz
from fedcgd.mechanisms.mechanism import Vector

_ROUNDING = 1 + 1e-9  # sums of positive numbers err by less


def largest_singular_value(mechanism: Mechanism, columns: Columns) -> float:
    """At least ‖C‖₂ of C ≥ 0, by `columns` that are at least those of C.

    For every x > 0 it is at most √max_t (CᵀCx)_t/x_t (Collatz and Wielandt), here of a few x; of a Toeplitz C also Σ_u c_u.
    """
    x, least = np.ones((columns.rounds, 1)), math.inf
    for _ in range(TOLERANCES.answers.norm_iterations):
        image = columns.adjoint(columns.forward(x))
        least = min(least, float((image / x).max()))
        x = image / image.max() + 1e-9  # no entry vanishes
    norm = math.sqrt(least)
    if isinstance(mechanism, Toeplitz):
        norm = min(norm, float(np.abs(mechanism.coefficients(columns.rounds)).sum()))
    return norm * _ROUNDING


def by_coins(columns: Columns, norm: float, rate: float) -> Sampled:
    """b-min-separation of any C ≥ 0 of this norm, with coins of this rate."""
    method = "privacy loss distribution of Poisson sampling by the same coins, and the norm of C, rounded up"
    return Sampled(((Coin(rate, norm), columns.rounds),), method)


def by_blocks(columns: Columns, products: Sequence[Vector], rate: float) -> Sampled:
    """b-min-separation of C with at most b bands, with coins of this rate.

    `products`: ⟨C[:, t], C[:, t − lag]⟩, by lag from 1 to the bands less 1.
    """
    length, square = len(products), float(columns.squares.max())
    part = max(0.5, max(float(product.max()) for product in products) / square)
    coin = Coin(-math.expm1(length * math.log1p(-rate)) if rate < 1 else 1.0, 2 * math.sqrt(part * square) * _ROUNDING)
    method = f"privacy loss distribution of blocks of {length} rounds, each with twice the noise to share, rounded up"
    return Sampled(((coin, math.ceil(columns.rounds / length)),), method)


def by_norm(releases: tuple[tuple[OneOf, int], ...]) -> Sampled:
    """A sampling of any C ≥ 0, by the `releases` that it has for C = I times the norm of C."""
    method = "privacy loss distribution of the same sampling for C = I, and the norm of C, on a grid that errs upwards"
    return Sampled(releases, method)
