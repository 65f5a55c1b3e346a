"""The noise: its definition, its distribution, and that it depends on nothing but key, round, nonce, coordinate."""

import hashlib
import itertools
import pickle

import numpy as np
import oracles_noise
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from fedcgd.noise import NoiseStream
from fedcgd.noise.box_muller import LARGEST, Workspace, _log
from fedcgd.noise.stream import chunks

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
STREAM = NoiseStream(KEY)
N = 1_000_000
TILE = 2 * 262144


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    return STREAM.normal(3, 1, 0, N)


@pytest.mark.parametrize("start", [0, 1, 4095, 131068, 262144, TILE - 3, TILE, 5 * TILE + 262143, 2**40 - 8])
@pytest.mark.parametrize(("round", "nonce"), [(0, 0), (7, 2), (2**32 - 1, 2**128 - 1)])
def test_each_number_is_the_defined_one(round, nonce, start):
    expected = [oracles_noise.normal(KEY, round, nonce, start + i) for i in range(8)]
    np.testing.assert_allclose(STREAM.normal(round, nonce, start, start + 8), expected, rtol=1e-6, atol=1e-6)


GOLDEN = [-0.02125590108335018, 1.163655400276184, -0.2595294117927551, 0.4812910556793213]
GOLDEN_HASH = "32ee8fe9227dbe3e5965a277c910390e8caaa82b22644a2ef834e48ae217730d"


def test_golden_values():
    # Pinned at the first release: another machine, version or thread count must give these bits.
    assert [float(z) for z in STREAM.normal(0, 0, 0, 4)] == GOLDEN
    assert hashlib.sha256(STREAM.normal(5, 1, 0, TILE + 1000).tobytes()).hexdigest() == GOLDEN_HASH


def columns_of(k1, k2, v, a1, a2) -> np.ndarray:
    """The library's four numbers for each column of bits, shape (4, columns)."""
    n = len(k1)
    work = Workspace(n)
    words = [np.array(k, "<i8").tobytes() for k in (k1, k2)] + [np.array(w, "<i4").tobytes() for w in (v, a1, a2)]
    work.keystream[: 28 * n] = b"".join(words)
    radius, cosine, sine = (np.float64(a) for a in work.polar(n))
    return np.concatenate([radius * cosine, radius * sine]).reshape(4, n)


LONG = [0, 1, 2, 3, 2**31, 2**32, 2**62, 2**63 - 1, -1, -2, -(2**40), -(2**62), -(2**63)]
SHORT = [0, 1, 2, -1, -2, 2**30, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1, 2**16 + 1]


def test_every_pattern_of_bits_gives_finite_numbers_and_the_right_ones():
    grid = list(itertools.product(LONG, LONG, SHORT, SHORT[::3], SHORT[::4]))
    got = columns_of(*zip(*grid, strict=True))
    assert np.isfinite(got).all()
    assert np.abs(got).max() < LARGEST
    plain = [i for i, (k1, k2, *_) in enumerate(grid) if k1 and k2 and abs(k1 * k2) < 2**124]
    expected = np.array([oracles_noise.box_muller(*grid[i]) for i in plain]).T
    np.testing.assert_allclose(got[:, plain], expected, rtol=0, atol=2e-6)


def test_the_length_is_right_next_to_zero_too():
    near = [2**63 - 2**i for i in range(36, 62)]
    got = columns_of(near, [-(2**63)] * 26, [2**30] * 26, [2**15] * 26, [2**15] * 26)
    exact = np.array([oracles_noise.box_muller(k, -(2**63), 2**30, 2**15, 2**15) for k in near]).T
    np.testing.assert_allclose(got**2, exact**2, rtol=0, atol=6e-7)


def test_no_length_is_negative():
    """All 2²³ products in [1/2, 1), where ln 2 is taken off an almost equal number; below, what remains is at least ln 2."""
    a = (np.arange(2**23, dtype=np.uint32) | np.uint32((62 + 127) << 23)).view(np.float32)
    memory = np.empty((4, 2**23), np.float32)
    _log(a, np.full(2**23, 2.0**63, np.float32), *memory)
    assert memory[3].min() > 0
    np.testing.assert_allclose(memory[3], -np.log(np.float64(a) / 2.0**63), rtol=0, atol=3e-7)


def test_tails_beyond_nine_are_reached_with_the_right_chance():
    # z₁ > 9 at φ = 0 and V ≈ 1 is −ln(u₁u₂) > 40.5: u₂ = 1 leaves |k₁| ≤ 2⁶³·exp(−40.5) = 23.8.
    tail = columns_of([1, 23, 24], [-(2**63)] * 3, [2**31 - 1] * 3, [0] * 3, [0] * 3)[0]
    assert tail[0] == pytest.approx(np.sqrt(2 * 63 * np.log(2)), rel=1e-6)  # 9.35, with one factor alone
    assert tail[1] > 9 > tail[2]
    assert columns_of([1], [1], [2**31 - 1], [0], [0])[0, 0] == pytest.approx(np.sqrt(2 * 126 * np.log(2)), rel=1e-6)


words = st.integers(-(2**63), 2**63 - 1).filter(bool)
angles = st.integers(-(2**31), 2**31 - 1)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.tuples(words, words, angles, angles, angles))
def test_random_bits_give_the_defined_numbers(bits):
    got, exact = columns_of(*([b] for b in bits))[:, 0], np.array(oracles_noise.box_muller(*bits))
    length = np.linalg.norm(exact)
    assert np.abs(got - exact).max() <= 1e-6 * length + min(1e-3, 1e-6 / max(length, 1e-30))


def test_numbers_are_accurate_to_float32_across_their_range():
    generator = np.random.default_rng(1)
    k = (np.exp2(generator.uniform(0, 62.9, (2, 20000))) * generator.choice([-1, 1], (2, 20000))).astype(np.int64)
    rest = generator.integers(-(2**31), 2**31, (3, 20000))
    exact = np.array([oracles_noise.box_muller(*map(int, bits)) for bits in zip(*k, *rest, strict=True)]).T
    radius = np.hypot(exact[:2], exact[2:])
    z = columns_of(*k, *rest)
    assert np.max(np.abs(z[:2] - exact[:2]) / radius) < 1e-6
    assert np.max(np.abs(z[2:] - exact[2:]) / radius) < 1e-6


@pytest.mark.parametrize("start", [0, 3, 131071, 262143, TILE - 5])
def test_any_part_equals_the_part_of_the_whole(start):
    whole = STREAM.normal(1, 0, 0, TILE + 262144 + 100)
    for size in (1, 2, 5, 4096, 262144):
        np.testing.assert_array_equal(STREAM.normal(1, 0, start, start + size), whole[start : start + size])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(0, 3 * TILE), st.integers(0, 3000), st.integers(0, 3000))
def test_two_parts_are_the_whole(start, first, second):
    parts = [STREAM.normal(9, 0, start, start + first), STREAM.normal(9, 0, start + first, start + first + second)]
    np.testing.assert_array_equal(np.concatenate(parts), STREAM.normal(9, 0, start, start + first + second))


@pytest.mark.parametrize("start", [0, 5, 131071, TILE - 1, TILE, 7 * TILE + 131072])
def test_few_numbers_are_made_of_few_columns(start):
    assert [(chunk.begin, chunk.size) for chunk in chunks(start, start + 1)] == [(start, 1)]


def moment_scores(z: np.ndarray) -> np.ndarray:
    """(mean of zᵖ − E zᵖ) / its standard error for p = 1..6, N(0, 1) assumed."""
    moments = {p: special.factorial2(p - 1, exact=True) if p % 2 == 0 else 0 for p in range(1, 13)}
    z = z.astype(np.float64)
    return np.array(
        [(np.mean(z**p) - moments[p]) / np.sqrt((moments[2 * p] - moments[p] ** 2) / len(z)) for p in range(1, 7)]
    )


def tail_scores(z: np.ndarray) -> np.ndarray:
    """(count beyond ±c − expected) / its standard deviation for c = 1, 2, 3, 4."""
    chances = 2 * stats.norm.sf([1, 2, 3, 4])
    counts = np.array([(np.abs(z) > c).sum() for c in (1, 2, 3, 4)])
    return (counts - len(z) * chances) / np.sqrt(len(z) * chances * (1 - chances))


def test_moments(sample):
    assert np.abs(moment_scores(sample)).max() < 4
    assert np.abs(moment_scores(sample * np.float32(1.005))).max() > 4, "does not see a wrong scale"


def test_tails(sample):
    assert np.abs(tail_scores(sample)).max() < 4
    assert np.abs(tail_scores(sample * np.float32(1.01))).max() > 4, "does not see a wrong scale"


def test_kolmogorov_smirnov(sample):
    assert stats.kstest(sample, "norm", method="asymp").pvalue > 1e-3
    assert stats.kstest(sample * np.float32(1.02), "norm", method="asymp").pvalue < 1e-6, "does not see a wrong scale"


def test_the_four_numbers_of_a_column_are_normal_and_independent():
    z = STREAM.normal(0, 0, 0, TILE).astype(np.float64).reshape(4, -1)
    n = z.shape[1]
    for quarter in z:
        assert stats.kstest(quarter, "norm", method="asymp").pvalue > 1e-3
        assert np.abs(moment_scores(quarter)).max() < 4
    for first, second in itertools.combinations(z, 2):
        assert abs(np.mean(first * second)) * np.sqrt(n) < 4
        assert abs(np.mean((first**2 - 1) * (second**2 - 1)) / 2) * np.sqrt(n) < 4  # a common length would show
        assert stats.kstest(np.arctan2(second, first) / (2 * np.pi) + 0.5, "uniform", method="asymp").pvalue > 1e-3
        assert stats.kstest((first**2 + second**2) / 2, "expon", method="asymp").pvalue > 1e-3
        assert stats.kstest((first**2 + second**2) / 2 * 1.03, "expon", method="asymp").pvalue < 1e-6, (
            "does not see a wrong scale"
        )
    assert stats.kstest((z**2).sum(0), stats.chi2(4).cdf, method="asymp").pvalue > 1e-3
    share = (z[0] ** 2 + z[2] ** 2) / (z**2).sum(0)
    assert stats.kstest(share, "uniform", method="asymp").pvalue > 1e-3
    assert stats.chi2_contingency(np.histogram2d(stats.chi2(4).cdf((z**2).sum(0)), share, bins=8)[0]).pvalue > 1e-3


@pytest.mark.parametrize(
    "other",
    [
        lambda: STREAM.normal(4, 1, 0, N),
        lambda: STREAM.normal(3, 2, 0, N),
        lambda: STREAM.normal(3, 1 + 2**127, 0, N),
        lambda: STREAM.normal(1, 3, 0, N),
        lambda: STREAM.normal(3, 1, 1, N + 1),
        lambda: STREAM.normal(3, 1, TILE, TILE + N),
        lambda: NoiseStream(OTHER).normal(3, 1, 0, N),
    ],
    ids=["round", "nonce", "high bit of the nonce", "swapped", "coordinate", "tile", "key"],
)
def test_other_indices_and_keys_give_independent_noise(sample, other):
    z = other()
    assert abs(np.mean(sample * z)) * np.sqrt(N) < 4
    assert abs(np.mean((sample**2 - 1) * (z**2 - 1)) / 2) * np.sqrt(N) < 4
    assert np.mean(sample == z) < 1e-5
    mixed = sample + np.float32(0.01) * sample
    assert abs(np.mean(sample * mixed)) * np.sqrt(N) > 4, "does not see dependence"


def test_no_two_indices_share_a_key():
    # Fields of a fixed width: what is written for one index is never what is written for another.
    ends = [0, 1, 256, 2**32 - 1]
    keys = {STREAM._algorithm(round, nonce).key for round in ends for nonce in (*ends, 2**64, 2**127, 2**128 - 1)}
    assert len(keys) == 28


def test_the_key_is_hidden():
    assert KEY.hex() not in repr(STREAM)
    assert "hidden" in str(STREAM)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(STREAM)
    assert not hasattr(STREAM, "__dict__")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 0, 1), "round must be between 0 and 4294967295, got -1"),
        ((2**32, 0, 0, 1), "round must be between"),
        ((0, -1, 0, 1), "nonce must be between"),
        ((0, 2**128, 0, 1), "nonce must be between"),
        ((0, 0, -1, 1), "coordinates"),
        ((0, 0, 2, 1), "coordinates"),
        ((0, 0, 0, 2**40 + 1), "coordinates"),
    ],
)
def test_indices_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        STREAM.normal(*arguments)


def test_a_stream_keeps_the_key_that_it_was_given():
    key = bytearray(KEY)
    stream = NoiseStream(key)
    key[:] = OTHER
    np.testing.assert_array_equal(stream.normal(0, 0, 0, 4), STREAM.normal(0, 0, 0, 4))


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(size):
    with pytest.raises(ValueError, match=f"32 bytes .* got {size}"):
        NoiseStream(bytes(size))


def test_derived_streams_are_independent_and_a_function_of_key_and_purpose(sample):
    derived = STREAM.derive("smoothing").normal(3, 1, 0, N)
    assert abs(np.mean(sample * derived)) * np.sqrt(N) < 4
    np.testing.assert_array_equal(derived[:10], NoiseStream(KEY).derive("smoothing").normal(3, 1, 0, 10))
    assert not np.array_equal(derived[:10], STREAM.derive("other").normal(3, 1, 0, 10))
    assert not np.array_equal(derived[:10], NoiseStream(OTHER).derive("smoothing").normal(3, 1, 0, 10))


def test_words_are_the_keystream_in_any_split() -> None:
    from cryptography.hazmat.primitives.ciphers import Cipher, modes

    whole = STREAM.words(3, 1, 0, 1000)
    stream = Cipher(STREAM._algorithm(3, 1), modes.CTR(bytes(16))).encryptor().update(bytes(4000))
    np.testing.assert_array_equal(whole, np.frombuffer(stream, "<i4"))
    for start, stop in ((0, 0), (1, 2), (3, 998), (4, 1000), (999, 1000)):
        np.testing.assert_array_equal(STREAM.words(3, 1, start, stop), whole[start:stop])
    far = 2**40 - 7
    np.testing.assert_array_equal(STREAM.words(3, 1, far, far + 7), STREAM.words(3, 1, far - 3, far + 7)[3:])
    many = STREAM.words(3, 1, 0, 10**6) / 2.0**31
    assert stats.kstest(many, "uniform", args=(-1, 2), method="asymp").pvalue > 1e-3
