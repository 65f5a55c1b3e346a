"""A user's clipped update on the grid, against clipping and rounding one after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedcgd.clipping import clip
from fedcgd.noise.quantisation import Grid
from fedcgd_flower import update as module
from fedcgd_flower.update import clipped_update

VECTORS = arrays(np.float32, 7, elements=st.floats(width=32))


@settings(derandomize=True, max_examples=300)
@given(VECTORS, VECTORS, st.sampled_from([1e-6, 0.5, 1.0, 1e6]))
def test_it_is_the_clipped_and_rounded_difference(trained, model, clip_norm) -> None:
    grid = Grid.fitting(clip_norm=clip_norm, size=7, stddev=clip_norm)
    with np.errstate(invalid="ignore"):
        difference = trained.astype(np.float64) - model
    result = clipped_update(trained, model, clip_norm=clip_norm, grid=grid)
    if not np.isfinite(difference).all():
        assert result is None
        return
    assert result.dtype == np.int64
    assert grid.step * np.linalg.norm(result) <= clip_norm
    expected = grid.to_steps(clip(difference, clip_norm))
    assert np.abs(result - expected).max() <= 1  # where the last bit of the product decides
    assert (np.abs(result) * grid.step <= np.abs(difference)).all()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 8, 9])
def test_any_number_of_chunks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(size)
    trained, model = generator.normal(size=(2, size)).astype(np.float32)
    grid = Grid(2.0**-20)
    whole = clipped_update(trained, model, clip_norm=0.5, grid=grid)
    monkeypatch.setattr(module, "_CHUNK", 4)
    np.testing.assert_allclose(clipped_update(trained, model, clip_norm=0.5, grid=grid), whole, atol=1)
    np.testing.assert_allclose(whole, grid.to_steps(clip(trained.astype(float) - model, 0.5)), atol=1)


@pytest.mark.parametrize("unit", [0.25, 3.0, 1e6])
@pytest.mark.parametrize("length", [0.3, 0.7])
def test_units_and_what_is_counted(unit: float, length: float) -> None:
    """An update of `length` units, at norm 0.5: within it at first, scaled then."""
    generator = np.random.default_rng(4)
    direction = generator.normal(size=9)
    difference = (length * unit * direction / np.linalg.norm(direction)).astype(np.float32)
    grid = Grid(2.0**-20)
    result = clipped_update(difference, np.zeros(9, np.float32), clip_norm=0.5, grid=grid, unit=unit, indicator=77)
    np.testing.assert_allclose(result[:-1], grid.to_steps(clip(difference / np.float64(unit), 0.5)), atol=1)
    assert result[-1] == (77 if length < 0.5 else -77)
