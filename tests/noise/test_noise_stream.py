"""The noise: its definition, its distribution, and that it depends on nothing but key, round, nonce, coordinate."""

import hashlib
import itertools
import pickle

import numpy as np
import oracles_noise
import pytest
from scipy import special, stats

from fedcgd.noise import NoiseStream
from fedcgd.noise.box_muller import LARGEST, add_normals, minus_log
from fedcgd.noise.stream import CONSTANTS, blocks

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
STREAM = NoiseStream(KEY)
TILE = 1536
PART = 64 * TILE  # what NumPy makes at once


@pytest.mark.parametrize("start", [0, 1, 127, 128, TILE - 3, TILE, 5 * TILE + 640, 2**32 * 12 - 4, 2**40 - 8])
@pytest.mark.parametrize(("round", "nonce"), [(0, 0), (7, 2), (2**32 - 1, 2**128 - 1)])
def test_each_number_is_the_defined_one(round, nonce, start):
    expected = [oracles_noise.normal(KEY, round, nonce, start + i) for i in range(8)]
    np.testing.assert_allclose(STREAM.normal(round, nonce, start, start + 8), expected, rtol=2e-6, atol=1e-6)
    words = [oracles_noise.word(KEY, round, nonce, start + i) for i in range(8)]
    np.testing.assert_array_equal(STREAM.words(round, nonce, start, start + 8), words)


def test_the_keystream_is_chacha20():
    # "expand 32-byte k", as section 2.3 of RFC 8439 has its words: GPUs begin with them.
    assert CONSTANTS == (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
    # D. Strombergson, "Test Vectors for the Stream Cipher ChaCha", draft-strombergson-chacha-test-vectors-01: TC1, 256 bits.
    first = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert blocks(bytes(32), 0, 1).tobytes()[:32] == first
    for number in (0, 1, 2**32 - 1, 2**32, 2**40 + 3):
        words = blocks(KEY, number, 2).view(np.uint32)
        np.testing.assert_array_equal(words[:, 0], oracles_noise.chacha20_block(KEY, number))
        np.testing.assert_array_equal(words[:, 1], oracles_noise.chacha20_block(KEY, number + 1))
    whole = blocks(KEY, 2**33 - 5, 11)
    np.testing.assert_array_equal(blocks(KEY, 2**33 - 2, 6), whole[:, 3:9])


GOLDEN = [0.26221975684165955, 1.2867820262908936, 1.6342767477035522, -0.4081074297428131]
GOLDEN_HASH = "1db61f63692d883fa725572e8f7efa56f8a907f9460bb5da0b45b839cbceac81"


def test_golden_values():
    # Pinned: another machine, version or thread count must give these bits.
    assert [float(z) for z in STREAM.normal(0, 0, 0, 4)] == GOLDEN
    assert hashlib.sha256(STREAM.normal(5, 1, 0, 500_000).tobytes()).hexdigest() == GOLDEN_HASH


def numbers_of(words) -> np.ndarray:
    """The library's six numbers for each row of eight words, shape (6, rows)."""
    rows = np.array(words, np.int64).astype(np.int32).T
    total = np.zeros((12, rows.shape[1]))
    add_normals(np.concatenate([rows[:, ::-1], rows]), 1.0, total)
    np.testing.assert_array_equal(total[:6, ::-1], total[6:])  # both groups are made in the same way
    return total[6:]


EDGES = [0, 1, 2, -1, -2, 2**30, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1, 2**16 + 1]


def test_every_pattern_of_bits_gives_finite_numbers_and_the_right_ones():
    lengths = itertools.product(EDGES, EDGES, EDGES[::4], [5], [2**30 + 9], EDGES[::5], [7], [-(2**29)])
    shares = itertools.product([-3], [2**20], EDGES[::5], EDGES, EDGES, EDGES, EDGES[::3], [2**31 - 1])
    grid = [*lengths, *shares]
    got = numbers_of(grid)
    assert np.isfinite(got).all()
    assert np.abs(got).max() < LARGEST
    expected = np.array([oracles_noise.box_muller([word % 2**32 for word in row]) for row in grid]).T
    # Next to E = 0 the length is the root of a rounding error.
    np.testing.assert_allclose(got, expected, rtol=0, atol=1.2e-3)
    usual = np.abs(expected).max(axis=0) > 0.5
    np.testing.assert_allclose(got[:, usual], expected[:, usual], rtol=0, atol=3e-6)


def test_no_length_is_negative():
    """All 2²³ products in [1/2, 1), where ln 2 is taken off an almost equal number; below, what remains is at least ln 2."""
    product = (np.arange(2**23, dtype=np.uint32) | np.uint32((92 + 127) << 23)).view(np.float32)
    lengths = minus_log(product)
    assert lengths.min() > 0
    np.testing.assert_allclose(lengths, -np.log(np.float64(product) / 2.0**93), rtol=0, atol=3e-7)
    assert minus_log(np.array([-(2.0**93), 2.0**93], np.float32)).tolist() == [0, 0]


def test_no_radius_is_zero_for_lack_of_a_share():
    """Also where both cuts have the same bits, or the least and the largest ones."""
    cuts = [(v1, v2) for v1 in (0, 1, 2, 3, 4, 2**31 - 1, -1) for v2 in (0, 1, 2, 3, 4, 2**31 - 1, -1)]
    z = numbers_of([(2**20, 2**20, 2**20, v1, v2, 3, 3, 3) for v1, v2 in cuts])
    assert np.abs(z[::2]).min() > 1e-5


def test_tails_are_reached_with_the_right_chance():
    # z₁ > 9 at φ = 0 and V₁ ≈ 1 is −ln(u₁u₂u₃) > 40.5: u₂u₃ = 15/2⁶² leaves u₁ < 2⁶²·exp(−40.5)/15 = 0.792.
    large = [2**31 - 1, 2**31 - 1]
    tail = numbers_of([[int(u * 2**31), 3, 5, *large, 0, 0, 0] for u in (0.78, 0.80)])[0]
    assert tail[0] > 9 > tail[1]
    least = numbers_of([[0, 1, 0, *large, 0, 0, 0]])[0, 0]
    assert least == pytest.approx(np.sqrt(2 * 93 * np.log(2)), rel=1e-6)
    assert 11.35 < least < LARGEST


@pytest.mark.parametrize("start", [0, 3, TILE - 1, TILE, PART - 5])
def test_any_part_equals_the_part_of_the_whole(start):
    whole = STREAM.normal(1, 0, 0, 2 * PART + 100)
    words = STREAM.words(1, 0, 0, 2 * PART + 100)
    for size in (0, 1, 2, 5, 4096, PART):
        np.testing.assert_array_equal(STREAM.normal(1, 0, start, start + size), whole[start : start + size])
        np.testing.assert_array_equal(STREAM.words(1, 0, start, start + size), words[start : start + size])


def moment_scores(z: np.ndarray) -> np.ndarray:
    """(mean of zᵖ − E zᵖ) / its standard error for p = 1..6, N(0, 1) assumed."""
    moments = {p: special.factorial2(p - 1, exact=True) if p % 2 == 0 else 0 for p in range(1, 13)}
    z = z.astype(np.float64)
    return np.array(
        [(np.mean(z**p) - moments[p]) / np.sqrt((moments[2 * p] - moments[p] ** 2) / len(z)) for p in range(1, 7)]
    )


def test_the_numbers_of_a_block_are_normal_and_independent():
    z = STREAM.normal(0, 0, 0, 700 * TILE).astype(np.float64).reshape(700, 12, 128).swapaxes(0, 1).reshape(12, -1)
    n = z.shape[1]
    for one in z:
        assert stats.kstest(one, "norm", method="asymp").pvalue > 1e-3
        assert np.abs(moment_scores(one)).max() < 4
    pairs = list(itertools.combinations(z, 2))
    assert max(abs(np.mean(a * b)) for a, b in pairs) * np.sqrt(n) < 4.5
    together = max(abs(np.mean((a**2 - 1) * (b**2 - 1)) / 2) for a, b in pairs)
    assert together * np.sqrt(n) < 4.5  # a common length would show
    for first, second in itertools.combinations(z[:6], 2):
        assert stats.kstest(np.arctan2(second, first) / (2 * np.pi) + 0.5, "uniform", method="asymp").pvalue > 1e-3
        halves = (first**2 + second**2) / 2
        assert stats.kstest(halves, "expon", method="asymp").pvalue > 1e-3
        assert stats.kstest(halves * 1.03, "expon", method="asymp").pvalue < 1e-6, "does not see a wrong scale"
    for group in (z[:6], z[6:]):
        whole = (group**2).sum(0)
        assert stats.kstest(whole, stats.chi2(6).cdf, method="asymp").pvalue > 1e-3
        for pair in range(3):
            share = (group[2 * pair] ** 2 + group[2 * pair + 1] ** 2) / whole
            assert stats.kstest(share, stats.beta(1, 2).cdf, method="asymp").pvalue > 1e-3
            table = np.histogram2d(stats.chi2(6).cdf(whole), stats.beta(1, 2).cdf(share), bins=8)[0]
            assert stats.chi2_contingency(table).pvalue > 1e-3


def test_no_two_indices_share_a_key():
    # Fields of a fixed width: what is written for one index is never what is written for another.
    ends = [0, 1, 256, 2**32 - 1]
    keys = {STREAM.key_of(round, nonce) for round in ends for nonce in (*ends, 2**64, 2**127, 2**128 - 1)}
    assert len(keys) == 28


def test_the_key_is_hidden():
    assert KEY.hex() not in repr(STREAM)
    assert "hidden" in str(STREAM)
    with pytest.raises(TypeError, match="pickled"):
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


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(size):
    with pytest.raises(ValueError, match=f"got {size}"):
        NoiseStream(bytes(size))


def test_derived_streams_are_independent_and_a_function_of_key_and_purpose():
    derived, *others = (
        stream.normal(3, 1, 0, 10)
        for stream in (
            STREAM.derive("smoothing"),
            STREAM,
            STREAM.derive("other"),
            NoiseStream(OTHER).derive("smoothing"),
        )
    )
    np.testing.assert_array_equal(derived, NoiseStream(KEY).derive("smoothing").normal(3, 1, 0, 10))
    assert not any(np.array_equal(derived, other) for other in others)
