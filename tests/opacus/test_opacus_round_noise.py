"""The noise of central training by itself: each run has its own, and the digest of a sum is made of numbers of both signs."""

import numpy as np
import torch
from numpy_kernels import numpy_kernels
from plans import make_plan

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.noise import tensors
from fedcgd.noise.tensors import sum_digest
from fedcgd.opacus.round_noise import RoundNoise

PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=3))


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
    total = noise.lattice.step * torch.linspace(-1000, 1000, 500, dtype=torch.float64)
    noise.add(total, "", [])
    steps = total / noise.lattice.step
    assert torch.equal(steps, steps.round())


def test_in_main_memory_a_sum_is_known_by_itself() -> None:
    steps = torch.arange(64, dtype=torch.float64)
    assert np.shares_memory(sum_digest(steps, bytes(32)), steps.numpy())


def test_on_a_gpu_a_sum_is_known_by_few_hashes_under_the_key(monkeypatch) -> None:
    """Else whoever knows the code could look for sums that share one, and with it noise."""
    monkeypatch.setattr(tensors, "gpu_kernels", lambda device: numpy_kernels())
    monkeypatch.setattr(tensors, "_FEW_HASHES", 8)
    steps = torch.arange(2048 * 3 + 5, dtype=torch.float64)
    one, other, again = (sum_digest(steps, bytes([key]) * 32) for key in (1, 2, 1))
    assert one.shape == (4,)  # those of the four tiles' sixteen
    assert (one != other).all()
    assert (one == again).all()
    steps[-1] += 1
    assert (sum_digest(steps, bytes([1]) * 32) != one).all()


def test_the_coefficients_of_a_digest_have_all_their_bits() -> None:
    coefficients = tensors._coefficients(bytes(32))
    for sign in (coefficients < -(2**62), coefficients > 2**62):
        assert 0.23 < sign.mean() < 0.27  # a quarter, if they are uniform in −2⁶³ … 2⁶³
    assert len(np.unique(coefficients)) == coefficients.size == 8192
