"""Flat models, and clipping that holds after rounding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from fedcgd.clipping import ROUNDING, clip, clip_factor
from fedcgd.clipping.flat_models import flatten, layout, unflatten

everything = st.floats(width=32, allow_nan=True, allow_infinity=True)


def exact_norm(vector):
    """The norm by correctly rounded summation of the squares, scaled so that they cannot overflow."""
    largest = max((abs(float(x)) for x in vector), default=0.0) or 1.0
    return math.sqrt(math.fsum((float(x) / largest) ** 2 for x in vector)) * largest


@settings(derandomize=True, max_examples=300, deadline=None)
@given(arrays(np.float32, st.integers(0, 12), elements=everything), st.floats(1e-6, 1e6))
def test_a_clipped_update_is_within_the_norm_whatever_comes_in(update, clip_norm):
    clipped = clip(update, clip_norm)
    assert clipped.shape == update.shape
    assert clipped.dtype == update.dtype
    assert exact_norm(clipped) <= clip_norm


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_to_the_dtype_does_not_lift_the_norm(dtype):
    generator = np.random.default_rng(3)
    for size in (2, 3, 1000):
        for clip_norm in (0.1, 1.0, 3.0):
            update = (100 * generator.normal(size=size)).astype(dtype)
            clipped = clip(update, clip_norm)
            assert clip_norm * (1 - 1e-6) < exact_norm(clipped) <= clip_norm


def test_the_margin_covers_what_rounds_after_clipping():
    # In float32 the divisor, the quotient and a change of unit: 2⁻²⁴ each.
    assert (1 - ROUNDING) * (1 + 2.0**-24) ** 3 < 1 - 2.0**-25


def test_the_factor_leads_just_below_the_norm_and_is_one_within_it():
    assert [clip_factor(norm, 2.0) for norm in (0.0, 1e-300, 1.9)] == [1.0, 1.0, 1.0]
    for norm in (2.0, 2.1, 1e30):
        assert 2.0 * (1 - 3e-7) < norm * clip_factor(norm, 2.0) < 2.0 * (1 - 2e-7)


def test_a_short_update_is_left_as_it_is():
    update = np.array([0.3, -0.4], dtype=np.float32)
    assert np.array_equal(clip(update, 0.6), update)
    assert np.array_equal(clip(np.zeros(5), 1.0), np.zeros(5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_becomes_zero(bad):
    assert np.array_equal(clip(np.array([1.0, bad]), 1.0), np.zeros(2))


def test_squares_that_overflow_are_no_excuse():
    assert clip(np.array([3e200, 4e200]), 1.0) == pytest.approx([0.6, 0.8], rel=1e-6)


def test_clipping_leaves_the_argument_alone():
    update = np.array([3.0, 4.0])
    clip(update, 1.0)[:] = 7
    clip(update, 10.0)[:] = 7
    assert update.tolist() == [3.0, 4.0]
    zeros = np.zeros(2)
    clip(zeros, 1.0)[:] = 7
    assert zeros.tolist() == [0.0, 0.0]


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1, bias=False))


def test_unflatten_gives_each_parameter_its_entries():
    model = small_model()
    assert layout(model).names == ("0.weight", "0.bias", "2.weight")
    own = unflatten(flatten(model), layout(model))
    assert all(torch.equal(own[name], value) for name, value in model.named_parameters())
    parts = unflatten(torch.arange(10.0), layout(model))
    assert parts["0.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert parts["0.bias"].tolist() == [6, 7]
    assert parts["2.weight"].tolist() == [[8, 9]]
    with pytest.raises(ValueError, match=r"\(10,\).*\(9,\)"):
        unflatten(torch.zeros(9), layout(small_model()))


def test_frozen_parameters_are_left_out():
    model = small_model()
    model[0].weight.requires_grad_(False)
    assert layout(model).names == ("0.bias", "2.weight")
    assert flatten(model).shape == (4,)
