"""A user's clipped update on the grid, against clipping and rounding one after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedcgd.clipping import clip
from fedcgd.native.vector_kernels import CHUNK, NUMPY, VectorKernels, compiled
from fedcgd.noise.quantisation import Lattice
from fedcgd_flower.clipping import Clipping, clipped_update

VECTORS = arrays(np.float32, 7, elements=st.floats(width=32))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(VECTORS, VECTORS, st.sampled_from([1e-6, 0.5, 1.0, 1e6]))
def test_it_is_the_clipped_and_rounded_difference(trained, model, clip_norm) -> None:
    grid = Lattice.fitting(clip_norm=clip_norm, size=7, stddev=clip_norm)
    with np.errstate(invalid="ignore"):
        difference = trained.astype(np.float64) - model
    result = clipped_update(trained, model, Clipping(clip_norm=clip_norm, grid=grid))
    if not np.isfinite(difference).all():
        assert result is None
        return
    assert result.dtype == np.int64
    assert grid.step * np.linalg.norm(result) <= clip_norm
    expected = grid.to_steps(clip(difference, clip_norm))
    assert np.abs(result - expected).max() <= 1  # where the last bit of the product decides
    assert (np.abs(result) * grid.step <= np.abs(difference)).all()


@pytest.mark.parametrize("size", [5, 2 * CHUNK + 5])
def test_stretches_are_what_the_whole_is(size: int) -> None:
    trained, model = np.random.default_rng(size).normal(size=(2, size)).astype(np.float32)
    grid = Lattice(2.0**-20)
    difference = trained.astype(float) - model
    for clip_norm, tolerance in ((0.5, 1), (1e6, 0)):  # within the norm, no factor is in play
        found = clipped_update(trained, model, Clipping(clip_norm=clip_norm, grid=grid))
        np.testing.assert_allclose(found, grid.to_steps(clip(difference, clip_norm)), atol=tolerance)
        assert grid.step * np.linalg.norm(found.astype(float)) <= clip_norm


@pytest.mark.parametrize("form", [NUMPY, compiled()], ids=["numpy", "machine code"])
def test_how_a_model_lies_in_memory_changes_nothing(
    form: VectorKernels | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form is None:
        pytest.skip("no machine code here")
    monkeypatch.setattr("fedcgd_flower.clipping.kernels", lambda: form)
    trained, model = np.random.default_rng(5).normal(size=(2, 1001)).astype(np.float32)
    expected = clipped_update(trained, model, Clipping(clip_norm=0.5, grid=Lattice(2.0**-20)))
    apart = np.repeat(trained, 2)[::2]
    odd = np.frombuffer(b"x" + trained.tobytes(), np.float32, offset=1)
    for piece in (apart, odd):
        found = clipped_update(piece, model, Clipping(clip_norm=0.5, grid=Lattice(2.0**-20)))
        np.testing.assert_array_equal(found, expected)


def test_a_number_that_is_not_finite_is_none_wherever_it_is() -> None:
    model = np.zeros(CHUNK + 9, np.float32)
    for place in (0, 6, CHUNK + 8):
        trained = np.ones(CHUNK + 9, np.float32)
        trained[place] = np.nan
        assert clipped_update(trained, model, Clipping(clip_norm=1.0, grid=Lattice(2.0**-20))) is None


@pytest.mark.parametrize("users", [1, 3])
def test_a_sum_is_within_or_made_so(users: int) -> None:
    """The bound is users times the norm, in steps of the grid; what is longer is scaled to it."""
    clipping = Clipping(clip_norm=0.5, grid=Lattice(2.0**-20))
    longest = np.array([users * 2**19, 0], np.int64)
    assert clipping.within(longest * 15 // 16, 2, users)
    assert not clipping.within(longest + 2, 2, users)
    found = clipping.bounded(4 * longest, 2, users)
    assert 0.99 * longest[0] < found[0] <= longest[0]
