"""Algorithm 1 of arXiv:2601.22334 for softmax regression on the digits: gradients by hand, and the noise as a matrix product."""

import math
from collections.abc import Sequence

import numpy as np
from sklearn.preprocessing import normalize

from fedcgd.mechanisms import inverse_matrix
from fedcgd.noise import NoiseStream
from fedcgd.plan import Plan
from fedcgd_simulations.task import Examples

SIZE = 650  # 64 pixels and a bias for each of ten digits


def train_softmax(
    plan: Plan,
    train: Examples,
    batches: Sequence[np.ndarray],
    *,
    key: bytes,
    learning_rate: float,
    planned_cohort: float,
) -> list[np.ndarray]:
    """The weights after each round, shape (650,), for users with an example each under a simulation key's first nonces."""
    step = 2.0 ** math.floor(math.log2(plan.clip_norm / 1024 / math.sqrt(SIZE)))
    stream, rounds = NoiseStream(key), plan.participation.rounds
    z = np.stack([stream.normal(t, 0, 0, SIZE).astype(float) for t in range(rounds)])
    dither = np.stack([stream.derive("smoothing").words(t, 0, 0, SIZE) for t in range(rounds)]) / 2.0**39
    noise = step * np.rint(plan.stddev * (inverse_matrix(plan.mechanism, rounds) @ z + dither) / step)
    models = [np.zeros(SIZE)]
    for t, batch in enumerate(batches):
        x = normalize(train.inputs[batch].double().numpy()) if len(batch) else np.zeros((0, 64))
        scores = x @ models[-1][:640].reshape(10, 64).T + models[-1][640:]
        error = np.exp(scores) / np.exp(scores).sum(1, keepdims=True) - np.eye(10)[train.targets[batch].numpy()]
        gradients = np.concatenate([np.einsum("bi,bj->bij", error, x).reshape(-1, 640), error], axis=1)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        total = (step * np.trunc(gradients * np.minimum(1, plan.clip_norm / norms) / step)).sum(0)
        # Noise is added to the sum of the updates, which are minus the gradients.
        models.append(models[-1] - learning_rate / planned_cohort * (total - noise[t]))
    return models[1:]
