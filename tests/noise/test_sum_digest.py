"""What a sum is known by when its noise is bound to it: made of numbers of both signs, under the key."""

import numpy as np
import torch
from numpy_kernels import numpy_kernels

from fedcgd.noise import tensors
from fedcgd.noise.tensors import sum_digest


def test_in_main_memory_a_sum_is_known_by_itself() -> None:
    steps = torch.arange(64)
    assert np.shares_memory(sum_digest(steps, bytes(32)), steps.numpy())


def test_on_a_gpu_a_sum_is_known_by_few_hashes_under_the_key(monkeypatch) -> None:
    """Else whoever knows the code could look for sums that share one, and with it noise."""
    monkeypatch.setattr(tensors, "gpu_kernels", lambda device: numpy_kernels())
    monkeypatch.setattr(tensors, "_FEW_HASHES", 8)
    steps = torch.arange(2048 * 3 + 5)
    one, other, again = (sum_digest(steps, bytes([key]) * 32) for key in (1, 2, 1))
    assert one.shape == (4,)  # those of the four tiles' sixteen
    assert (one != other).all()
    assert (one == again).all()
    steps[-1] += 1
    assert (sum_digest(steps, bytes([1]) * 32) != one).all()


def test_the_coefficients_of_a_digest_have_all_their_bits() -> None:
    coefficients = tensors._coefficients(bytes(32), torch.device("cpu")).numpy()
    for sign in (coefficients < -(2**62), coefficients > 2**62):
        assert 0.23 < sign.mean() < 0.27  # a quarter, if they are uniform in −2⁶³ … 2⁶³
    assert len(np.unique(coefficients)) == coefficients.size == 8192
