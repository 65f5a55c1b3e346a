"""One grid for sum and noise: norms do not grow, sums are exact, and what comes out says nothing by its low bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import DITHER, Lattice, add_noise, add_values

STREAM = NoiseStream(bytes(range(32)))
TERMS = [(1, 7, 1.0), (0, 3, -0.5)]


def vectors(limit: float):
    return arrays.arrays(np.float64, st.integers(1, 30), elements=st.floats(-limit, limit))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(vectors(1.0), st.integers(-30, 3))
def test_rounding_never_lengthens_and_moves_less_than_a_step(update, power):
    step = 2.0**power
    rounded = step * Lattice(step).to_steps(update)
    assert (np.abs(rounded) <= np.abs(update)).all()
    assert (np.abs(rounded - update) < step).all()
    assert (rounded * update >= 0).all()
    assert np.linalg.norm(rounded) <= np.linalg.norm(update)


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 1.5, 100.0])
@pytest.mark.parametrize("size", [1, 650, 10**6, 25 * 10**6])
def test_the_step_loses_at_most_a_thousandth_of_the_clip_norm(clip_norm, size):
    step = Lattice.fitting(clip_norm=clip_norm, size=size, stddev=3.0 * clip_norm).step
    assert np.log2(step) == int(np.log2(step))
    assert step * np.sqrt(size) <= clip_norm / 1024 < 2 * step * np.sqrt(size)


def test_the_noise_is_the_correlated_noise_plus_the_smoothing_rounded():
    size, step, stddev = 5000, 2.0**-22, 3.0
    total = np.arange(size)
    add_noise(total, STREAM, TERMS, stddev, Lattice(step), start=100)
    z = [np.float64(STREAM.normal(t, a, 100, 100 + size)) for t, a, _ in TERMS]
    smoothing = DITHER * STREAM.derive("smoothing").words(1, 7, 100, 100 + size) / 2**31
    expected = stddev * (z[0] - 0.5 * z[1] + smoothing)
    np.testing.assert_allclose((total - np.arange(size)) * step, expected, rtol=0, atol=3e-6)


def test_threads_and_splits_do_not_change_a_number():
    whole = np.zeros(700_000, np.int64)
    add_noise(whole, STREAM, TERMS, 1.0, Lattice(2.0**-20), threads=1)
    again = np.zeros((7, 100_000), np.int64)
    add_noise(again, STREAM, TERMS, 1.0, Lattice(2.0**-20), threads=3)
    np.testing.assert_array_equal(again.ravel(), whole)
    parts = np.zeros(700_000, np.int64)
    for start in range(0, 700_000, 123_457):
        add_noise(parts[start : start + 123_457], STREAM, TERMS, 1.0, Lattice(2.0**-20), start=start)
    np.testing.assert_array_equal(parts, whole)


def released(updates: list[np.ndarray], grid: Lattice, round: int) -> np.ndarray:
    total = np.zeros_like(grid.to_steps(updates[0]))
    for update in updates:
        total += grid.to_steps(update)
    add_noise(total, STREAM, [(round, 0, 1.0)], 1.0, grid)
    return total


def test_neighbouring_inputs_give_outputs_on_the_same_lattice_with_the_same_low_bits():
    """With a user and without: multiples of one step, and the last eight bits are uniform both times.

    The updates are odd multiples of a small power of two, which in floating point the low bits of x + Z would tell.
    """
    size = 200_000
    grid = Lattice.fitting(clip_norm=1.0, size=size, stddev=1.0)
    generator = np.random.default_rng(3)
    user = np.full(size, 3 * grid.step)
    others = [generator.uniform(-1, 1, size) / np.sqrt(size) for _ in range(5)]
    for round, updates in enumerate(([*others, user], others, [np.zeros(size)], [user])):
        total = released(updates, grid, round)
        in_steps = grid.from_steps(total) / grid.step
        np.testing.assert_array_equal(in_steps, np.round(in_steps))
        for modulus in (2, 256):
            counts = np.bincount(total % modulus, minlength=modulus)
            assert stats.chisquare(counts).pvalue > 1e-3, (round, modulus)


def test_noise_far_finer_than_its_own_resolution_still_covers_every_cell():
    # Where |Z| ≥ 2, float32 noise would sit on every 64th cell of this grid.
    total = np.zeros(200_000, np.int64)
    step = 2.0**-28
    add_noise(total, STREAM, [(2, 0, 1.0)], 1.0, Lattice(step))
    big = total[np.abs(total) * step > 2]
    assert len(big) > 5000
    assert stats.chisquare(np.bincount(big % 64, minlength=64)).pvalue > 1e-3


@pytest.mark.parametrize("update", [[np.nan], [np.inf], [-np.inf], [1e300], [2.0**40], [-(2.0**33)]])
def test_what_does_not_fit_is_refused(update):
    with pytest.raises(ValueError, match="too large"):
        Lattice(2.0**-20).to_steps(np.array(update))


@pytest.mark.parametrize("step", [0.0, -1.0, 0.3, float("inf"), float("nan"), 2.0**-600])
def test_a_step_that_is_no_power_of_two_is_refused(step):
    with pytest.raises(ValueError, match="2⁵⁰⁰"):
        Lattice(step)


def test_bad_noise_arguments_are_refused_before_the_total_changes():
    total = np.zeros(3, np.int64)
    for words, terms, stddev, step, start in (
        ("one term", [], 1.0, 1.0, 0),
        ("larger steps", TERMS, 1.0, 2.0**-47, 0),
        ("stddev", TERMS, -1.0, 1.0, 0),
        ("round", [(-1, 0, 1.0)], 1.0, 1.0, 0),
        ("coordinates must", TERMS, 1.0, 1.0, 2**40),
    ):
        with pytest.raises(ValueError, match=words):
            add_noise(total, STREAM, terms, stddev, Lattice(step), start=start)
    for wrong in (np.zeros(3), np.zeros(3, np.int32), np.zeros(6, np.int64)[::2]):
        with pytest.raises(ValueError, match="int64"):
            add_noise(wrong, STREAM, TERMS, 1.0, Lattice(1.0))
    assert not total.any()


@pytest.mark.parametrize(
    ("option", "wrong", "words"),
    [
        *(("clip_norm", wrong, "clip_norm") for wrong in (0.0, float("inf"))),
        ("size", 0, "size"),
        *(("stddev", wrong, r"1.05e\+06") for wrong in (1e9, float("inf"), float("nan"), -1.0)),
    ],
)
def test_what_has_no_lattice_is_refused_before_anything_starts(option: str, wrong: float, words: str):
    """A clip norm, a size, and noise that the integers would not hold."""
    options = {"clip_norm": 1.0, "size": 10**6, "stddev": 1e5}
    assert Lattice.fitting(**options).step == 2.0**-20
    with pytest.raises(ValueError, match=words):
        Lattice.fitting(**options | {option: wrong})


def test_noise_made_elsewhere_is_scaled_smoothed_and_rounded_to_the_nearest_step():
    smoothing, newest = STREAM.derive("smoothing"), (3, 9, 1.0)
    for noise in (np.array([[0.24, 0.26, -0.76], [1.5, -1e6, 0.0]]), np.arange(2_500_000, dtype=np.float32)):
        total = np.full(noise.shape, 7)
        add_values(total, noise, STREAM, newest, 3.0, Lattice(2.0**-12))
        s = DITHER * smoothing.words(3, 9, 0, noise.size).reshape(noise.shape) / 2**31
        np.testing.assert_array_equal(total, 7 + np.rint(2.0**12 * 3.0 * np.float64(noise) + 2.0**12 * 3.0 * s))
    for wrong in (np.full(3, np.nan), np.full(3, np.inf), np.full(3, 2.0**49), np.zeros(2)):
        total = np.zeros(3, np.int64)
        with pytest.raises(ValueError, match=r"shape \(3,\)"):
            add_values(total, wrong, STREAM, newest, 2.0, Lattice(1.0))
        assert not total.any()
