"""What a recipe is expected to end with: the loss of its last model, from descent that is cut short and from noise that stays.

On a quadratic everything is linear: in a direction of curvature μ the last model is ρ·e₀ + Σ_t a_t·(noise of round t), where ρ
and a follow from the learning rates and the momentum alone. The noise is C⁻¹Z, so that its part has variance ‖C⁻ᵀa‖²σ², exactly,
for every schedule and mechanism. The stationary case is in Choquette-Choo, Dvijotham, Pillutla, Ganesh, Steinke and Thakurta,
"Correlated Noise Provably Beats Independent Noise for Differentially Private Learning", 2024, arXiv:2310.06771.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedcgd.mechanisms.adjoint import transposed_inverse
from fedcgd.mechanisms.mechanism import Matrix, Mechanism, Vector
from fedcgd.planning.landscape import Landscape
from fedcgd.planning.recipe import Recipe
from fedcgd.planning.rules import RULES

_RATES = RULES.rates


@dataclass(frozen=True)
class Outcome:
    """What a recipe is expected to end with, at the learning rate that is best for it.

    Attributes:
        learning_rate: the best one for updates clipped to norm 1: divide it by the clip norm.
        progress: how far a gradient that stays the same moves the model in all, at that rate.
        noise: the standard deviation of one coordinate of the last model in a flat direction, at that rate.
        unlearned: what descent without noise would leave of the loss that can be won, as a part of it.
        loss: what is left of it with the noise.
    """

    learning_rate: float
    progress: float
    noise: float
    unlearned: float
    loss: float

    @property
    def signal_to_noise(self) -> float:
        """How far a gradient of norm 1 moves the model, over how far noise moves a weight: the same at any rate, for any model.

        With the whole batch in each round it is users/σ, σ the noise of one release at the budget.
        """
        return self.progress / self.noise if self.noise else math.inf


def expected_outcome(recipe: Recipe, mechanism: Mechanism, noise_multiplier: float, landscape: Landscape) -> Outcome:
    """The best of the learning rates, by the expected loss of the last model.

    Rates are tried in steps of √2, and further ones until the best lies between others: it grows with users/σ, whatever they are.

    Args:
        recipe: who takes part when, and how the model is moved.
        mechanism: C, for `recipe.rounds` rounds.
        noise_multiplier: σ.
        landscape: what is descended on.
    """

    def tried(first: int, last: int) -> list[Outcome]:
        rates = tuple(2.0 ** (step / 2) / unit for step in range(first, last + 1))
        return _outcomes(recipe, mechanism, noise_multiplier, landscape, rates)

    unit, (first, last), (further, farthest) = unit_progress(recipe), _RATES.first, _RATES.further
    found = tried(first, last)
    while (best := min(found, key=lambda one: one.loss)) is found[-1] and last < farthest:
        found += tried(last + 1, last + further)
        last += further
    while (best := min(found, key=lambda one: one.loss)) is found[0] and first > -farthest:
        found = tried(first - further, first - 1) + found
        first -= further
    return best


def outcome_at(
    recipe: Recipe, mechanism: Mechanism, noise_multiplier: float, landscape: Landscape, learning_rate: float
) -> Outcome:
    """What a recipe is expected to end with at a learning rate that was chosen otherwise.

    Args:
        recipe: who takes part when, and how the model is moved.
        mechanism: C, for `recipe.rounds` rounds.
        noise_multiplier: σ.
        landscape: what is descended on.
        learning_rate: the first one, for updates clipped to norm 1.
    """
    return _outcomes(recipe, mechanism, noise_multiplier, landscape, (learning_rate,))[0]


def _outcomes(
    recipe: Recipe, mechanism: Mechanism, sigma: float, landscape: Landscape, rates: tuple[float, ...]
) -> list[Outcome]:
    """That at each first learning rate."""
    losses, unlearned, noises = _losses(recipe, mechanism, sigma, landscape, rates)
    unit = unit_progress(recipe)
    return [
        Outcome(rate, rate * unit, math.sqrt(float(noise)), float(bias), float(loss))
        for rate, loss, bias, noise in zip(rates, losses, unlearned, noises, strict=True)
    ]


def unit_progress(recipe: Recipe) -> float:
    """How far a gradient of 1 that stays the same moves the model, for a first learning rate of 1."""
    velocities = np.cumsum(recipe.momentum ** np.arange(recipe.rounds))
    return float(np.cumsum(recipe.workload.rates(recipe.rounds) * velocities)[-1])  # in the order of the rounds


def _losses(
    recipe: Recipe, mechanism: Mechanism, sigma: float, landscape: Landscape, rates: tuple[float, ...]
) -> tuple[Vector, Vector, Vector]:
    """(expected loss, that without noise, variance of the last model in a flat direction) at each first learning rate."""
    curvatures = np.concatenate([[0.0], landscape.eigenvalues])
    left, weights = _last_model(
        recipe.rounds, recipe.workload.rates(recipe.rounds).tobytes(), recipe.momentum, rates, curvatures.tobytes()
    )  # fmt: skip
    shape = (len(rates), len(curvatures))
    with np.errstate(over="ignore", invalid="ignore"):
        kept = transposed_inverse(mechanism, recipe.rounds, weights)
        variance = np.einsum("ij,ij->j", kept, kept).reshape(shape) * (sigma / recipe.cohort) ** 2
        # Gradients of unit norm in as many directions as there are, drawn in each round: much less than the noise, mostly.
        drawn = np.einsum("ij,ij->j", weights, weights).reshape(shape)
        spread = 0.0 if recipe.steps == 1 else 1 / (recipe.cohort * landscape.counts.sum())
        start = landscape.counts * landscape.energies
        unlearned = left.reshape(shape)[:, 1:] ** 2 @ start
        loss = unlearned + (variance + spread * drawn)[:, 1:] @ (landscape.counts * landscape.eigenvalues)
    finite = np.where(np.isfinite(loss), loss, np.inf)
    return finite / start.sum(), unlearned / start.sum(), variance[:, 0]


@lru_cache(maxsize=64)
def _last_model(
    rounds: int, shape: bytes, momentum: float, rates: tuple[float, ...], curvatures: bytes
) -> tuple[Vector, Matrix]:
    """(ρ, a) for each pair of a rate and a curvature, shapes (pairs,) and (rounds, pairs).

    Backwards through v ← βv − μe + noise, e ← e + ηv: what one unit of e and of v, and so of noise, before a round makes of e at
    the end.
    """
    etas = np.frombuffer(shape)[:, None] * np.repeat(np.array(rates), len(curvatures) // 8)[None, :]
    mu = np.tile(np.frombuffer(curvatures), len(rates))
    of_position, of_velocity, change = np.ones(len(mu)), np.zeros(len(mu)), np.empty(len(mu))
    weights = np.empty((rounds, len(mu)))
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(rounds - 1, -1, -1):  # without new arrays: much of a plan's time is spent here
            entering = np.multiply(etas[t], of_position, out=weights[t])
            entering += of_velocity
            _keep_finite(entering)
            np.multiply(mu, entering, out=change)
            of_position -= change
            _keep_finite(of_position)
            np.multiply(momentum, entering, out=of_velocity)
    return of_position, weights


def _keep_finite(values: Vector) -> None:
    np.minimum(values, _RATES.unstable, out=values)
    np.maximum(values, -_RATES.unstable, out=values)
