"""DP-λCGD in a hundred lines of NumPy, without the library: what the idea is, for reading. Do not protect anybody with it.

A server trains softmax regression on handwritten digits. Each user owns one image. In round t the server takes the clipped
gradients of a cohort, adds Z_t − λ·Z_{t−1}, and steps. It keeps no noise: Z_{t−1} is made again from the key. Printed is the test
accuracy of independent noise (λ = 0) and of correlated noise at the same (ε, δ), adjacency zero out one user.

    python examples/lambda_cgd_from_scratch.py

What the library adds: a cryptographic generator, an integer grid against attacks on floating-point bits, users who come and go,
a ledger that survives crashes, other mechanisms and samplings, and proofs by test.
"""

import argparse
import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.datasets import load_digits

COHORT, SEPARATION, PARTICIPATIONS = 60, 21, 10  # every user takes part 10 times, 21 rounds apart
ROUNDS = SEPARATION * PARTICIPATIONS
CLIP_NORM, LEARNING_RATE = 1.0, 2.0
EPSILON, DELTA = 4.0, 1e-5


def gaussian_sigma(epsilon, delta):
    """σ of the Gaussian mechanism with sensitivity 1, exactly (Balle and Wang, 2018, arXiv:1805.06530)."""

    def excess(sigma):
        a, b = 1 / (2 * sigma), epsilon * sigma
        return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) - delta

    return brentq(excess, 0.05, 100)


def sensitivity(lam):
    """How far one user moves C·X, for C[i, j] = λ^(i−j): the norm of the sum of the columns of the user's rounds."""
    column = lam ** np.arange(ROUNDS)
    moved = np.zeros(ROUNDS)
    for first in range(0, ROUNDS, SEPARATION):
        moved[first:] += column[: ROUNDS - first]
    return np.linalg.norm(moved)


def noise(key, round, shape):
    """Z_t: a pure function of the key and the round, so that nobody has to keep it."""
    return np.random.default_rng([key, round]).standard_normal(shape)


def clipped(gradients, clip_norm):
    """Each row scaled to norm at most `clip_norm`."""
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return gradients * np.minimum(1, clip_norm / np.maximum(norms, 1e-12))


def gradients(weights, inputs, labels):
    """The gradient of the cross-entropy of each example, one row each."""
    logits = inputs @ weights
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    probabilities[np.arange(len(labels)), labels] -= 1
    return np.einsum("ni,nj->nij", inputs, probabilities).reshape(len(labels), -1)


def train(lam, inputs, labels, key):
    """The weights after all rounds of x̂_t = Σ clipped gradients + ζσ(Z_t − λ·Z_{t−1})."""
    stddev = CLIP_NORM * gaussian_sigma(EPSILON, DELTA) * sensitivity(lam)
    order = np.random.default_rng(key).permutation(len(labels))
    weights = np.zeros((inputs.shape[1], 10))
    for t in range(ROUNDS):
        cohort = order[t % SEPARATION * COHORT :][:COHORT]  # so that no user comes back before SEPARATION rounds
        total = clipped(gradients(weights, inputs[cohort], labels[cohort]), CLIP_NORM).sum(axis=0)
        total += stddev * noise(key, t, total.shape)
        if t:
            total -= lam * stddev * noise(key, t - 1, total.shape)  # made again, and taken back in part
        weights -= LEARNING_RATE * total.reshape(weights.shape) / COHORT  # the planned cohort, whoever answered
    return weights


def main():
    """Train with independent and with correlated noise, and print both accuracies."""
    inputs, labels = load_digits(return_X_y=True)
    inputs = inputs / np.linalg.norm(inputs, axis=1, keepdims=True)
    order = np.random.default_rng(0).permutation(len(labels))
    users, test = order[: COHORT * SEPARATION], order[COHORT * SEPARATION :]
    print(f"{ROUNDS} rounds, (ε, δ) = ({EPSILON:g}, {DELTA:g}), zero out one user, no amplification by sampling")
    for lam in (0.0, 0.8):
        accuracies = []
        for key in range(5):  # a real key is secret, and is used once
            weights = train(lam, inputs[users], labels[users], key)
            accuracies.append(np.mean((inputs[test] @ weights).argmax(axis=1) == labels[test]))
        print(f"λ = {lam:.1f}: test accuracy {np.mean(accuracies):.3f} ± {np.std(accuracies):.3f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
