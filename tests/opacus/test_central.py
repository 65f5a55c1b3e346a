"""Central training against a plain loop, and against the federated side's gradients."""

import numpy as np
import pytest
import torch
from central_training import train_central
from plans import make_plan
from torch.nn import functional

from fedcgd.clipping.flat_models import flatten
from fedcgd.clipping.per_sample_gradients import clipped_gradient_sum, example_loss
from fedcgd.mechanisms import BSR, DPSGD, BinaryTree, LambdaCGD, Normalized, inverse_matrix
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice
from fedcgd.participation import Participation
from fedcgd_simulations.tasks import get_task

KEY = bytes(range(32))
ROUNDS, COHORT, CLIP, LEARNING_RATE, SIGMA = 20, 60, 0.5, 2.0, 1.3
STEP = 2.0**-16  # the largest power of two with STEP · √650 ≤ CLIP / 1024


def plan(mechanism):
    return make_plan(mechanism, Participation(rounds=ROUNDS, min_separation=5), clip_norm=CLIP, noise_multiplier=SIGMA)


def batches():
    order = np.random.default_rng(0).permutation(1260)
    return [order[(t % 5) * COHORT :][:COHORT] for t in range(ROUNDS)]


def run(mechanism, **changes):
    task = get_task("digits")
    arguments = {"key": KEY, "learning_rate": LEARNING_RATE, "planned_cohort": COHORT, "seed": 0} | changes
    return flatten(train_central(task, task.load().train, plan(mechanism), batches(), **arguments))


def noise_of(mechanism) -> np.ndarray:
    """Rows of C⁻¹Z, with the smoothing of the grid."""
    stream = NoiseStream(KEY)
    z = np.stack([stream.normal(t, 0, 0, 650).astype(float) for t in range(ROUNDS)])
    smoothing = np.stack([stream.derive("smoothing").words(t, 0, 0, 650) for t in range(ROUNDS)])
    return inverse_matrix(mechanism, ROUNDS) @ z + smoothing / 2**31 / 256


@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.8), Normalized(LambdaCGD(0.6)), BSR(4), BinaryTree()])
def test_training_is_the_papers_algorithm(mechanism):
    """Algorithm 1 of arXiv:2601.22334 with its noise written as a matrix product, and softmax gradients by hand."""
    data = get_task("digits").load().train
    noise = noise_of(mechanism)
    weights = np.zeros(650)
    for t, batch in enumerate(batches()):
        x = functional.normalize(data.inputs[batch], dim=1).double().numpy()
        scores = x @ weights[:640].reshape(10, 64).T + weights[640:]
        error = np.exp(scores) / np.exp(scores).sum(1, keepdims=True) - np.eye(10)[data.targets[batch].numpy()]
        gradients = np.concatenate([np.einsum("bi,bj->bij", error, x).reshape(-1, 640), error], axis=1)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        total = (STEP * np.trunc(gradients * np.minimum(1, CLIP / norms) / STEP)).sum(0)
        # Noise is symmetric; it is added to the sum of the updates, which are minus the gradients.
        weights -= LEARNING_RATE / COHORT * (total - CLIP * SIGMA * noise[t])
    assert np.abs(run(mechanism).numpy() - weights).max() < 1e-5
    assert np.abs(weights).max() > 0.1


def test_per_example_gradients_agree_with_the_federated_side():
    task = get_task("digits")
    train, model = task.load().train, task.model(0)
    flat, chosen = flatten(model), LambdaCGD(0.7)
    noise = noise_of(chosen)
    for t, batch in enumerate(batches()):
        total, _ = clipped_gradient_sum(
            example_loss(model, task.loss),
            flat,
            (train.inputs[batch], train.targets[batch]),
            clip_norm=CLIP,
            grid=Lattice(STEP),
        )
        update = -STEP * total.numpy() + CLIP * SIGMA * noise[t]
        flat = flat + LEARNING_RATE / COHORT * torch.from_numpy(update).float()
    assert float((run(chosen) - flat).abs().max()) < 1e-5


def test_physical_batches_do_not_matter_and_keys_do():
    whole = run(LambdaCGD(0.8))
    assert torch.allclose(run(LambdaCGD(0.8), physical_batch=7), whole, atol=1e-6)
    assert float((run(LambdaCGD(0.8), key=bytes(32)) - whole).abs().max()) > 0.01


def test_an_empty_batch_still_gets_noise():
    task = get_task("digits")
    none = [np.zeros(0, dtype=int)]
    model = train_central(
        task, task.load().train, plan(DPSGD()), none, key=KEY, learning_rate=1.0, planned_cohort=1, seed=0
    )
    expected = CLIP * SIGMA * noise_of(DPSGD())[0]
    assert np.allclose(flatten(model).numpy(), expected, atol=1.01 * STEP)


def test_a_round_after_the_last_is_refused():
    task = get_task("digits")
    batch = [np.arange(3)] * (ROUNDS + 1)
    with pytest.raises(ValueError, match="got 20"):
        train_central(
            task, task.load().train, plan(DPSGD()), batch, key=KEY, learning_rate=1.0, planned_cohort=3, seed=0
        )
