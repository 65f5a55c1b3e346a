"""The noise of central training by itself: each run has its own, and a sum's fingerprint is made of numbers of both signs."""

import numpy as np
import torch

from fedcgd.keys import NoiseKey
from fedcgd.mechanisms import LambdaCGD
from fedcgd.opacus.optimizer import RoundNoise, _fingerprint
from fedcgd.participation import Participation
from fedcgd.plan import Plan

PLAN = Plan(
    mechanism=LambdaCGD(0.5), participation=Participation(rounds=3), clip_norm=1.0, noise_multiplier=2.0, delta=1e-5
)


def noise_of(noise: RoundNoise, run: str) -> np.ndarray:
    total = torch.zeros(500, dtype=torch.float64)
    noise.add(total, run, [])
    return total.numpy()


def test_whatever_run_comes_next_has_noise_of_its_own() -> None:
    key = NoiseKey.simulation(1)
    shared = RoundNoise(PLAN, key, 500, None)
    for run in ("b", "a", "c", ""):  # in no order
        alone = RoundNoise(PLAN, key, 500, None)
        np.testing.assert_array_equal(noise_of(shared, run), noise_of(alone, run))
    assert abs(np.corrcoef(noise_of(shared, "a"), noise_of(shared, "b"))[0, 1]) < 0.2


def test_what_is_released_is_whole_steps_of_the_grid() -> None:
    """Whatever the sum was: the lowest bits of a floating-point number would tell what the noise was added to."""
    noise = RoundNoise(PLAN, NoiseKey.simulation(1), 500, None)
    total = noise.grid.step * torch.linspace(-1000, 1000, 500, dtype=torch.float64)
    noise.add(total, "", [])
    steps = total / noise.grid.step
    assert torch.equal(steps, steps.round())


def test_the_coefficients_of_a_fingerprint_have_all_their_bits() -> None:
    key = bytes(range(32))
    coefficients = np.array([_fingerprint(torch.eye(64, dtype=torch.float64)[i], key) for i in range(64)])
    for sign in (coefficients < -(2**30), coefficients > 2**30):
        assert 0.1 < sign.mean() < 0.4  # a quarter, if they are uniform in −2³¹ … 2³¹
    assert len(np.unique(coefficients)) == 256


def test_a_fingerprint_depends_on_the_key() -> None:
    """Else whoever knows the code could look for sums that share one, and with it noise."""
    steps = torch.arange(64, dtype=torch.float64)
    one, other, again = (_fingerprint(steps, bytes([key]) * 32) for key in (1, 2, 1))
    assert (one != other).any()
    assert (one == again).all()
