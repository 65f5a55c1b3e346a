"""Slow and obvious: errors on a quadratic from dense matrices and from sums over a circle. Shares no code with the library."""

import numpy as np


def left_after(inverse, a, rounds):
    """How much of each Z is left in the direction with contraction `a` after `rounds` steps, by descending on unit vectors."""
    position = np.zeros(inverse.shape[1])
    for t in range(rounds):
        position = a * position + inverse[t]
    return position


def loss(c, eigenvalues, rate, rounds=None):
    """E of the loss that s = 1 adds after `rounds` steps."""
    inverse = np.linalg.inv(c)
    rounds = len(c) if rounds is None else rounds
    return sum(rate**2 / 2 * mu * (left_after(inverse, 1 - rate * mu, rounds) ** 2).sum() for mu in eigenvalues)


def mean_gradient_norm(c, eigenvalues, rate):
    """Mean over t = 1 … n of E‖∇L‖², noise alone."""
    inverse = np.linalg.inv(c)
    every = range(1, len(c) + 1)
    return sum(
        rate**2 * mu**2 * (left_after(inverse, 1 - rate * mu, t) ** 2).sum() for mu in eigenvalues for t in every
    ) / len(c)


def circle_mean(f, points=4000):
    """∫ f dω/2π by the trapezoidal rule, which is exact to all digits for smooth periodic f."""
    return float(np.mean(f(2 * np.pi * np.arange(points) / points)))


def stationary(inverse, eigenvalues, rate, points=4000):
    """(loss of s = 1, squared sensitivity) of noise with these coefficients of C⁻¹."""

    def gain(w):
        return np.abs(sum(x * np.exp(1j * w * t) for t, x in enumerate(inverse))) ** 2

    def response(w):
        return sum(mu * rate**2 / 2 / np.abs(1 - (1 - rate * mu) * np.exp(1j * w)) ** 2 for mu in eigenvalues)

    return circle_mean(lambda w: gain(w) * response(w), points), circle_mean(lambda w: 1 / gain(w), points)
