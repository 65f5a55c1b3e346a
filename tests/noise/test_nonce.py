"""The nonce: another for another sum, history or round, whatever the random numbers do; and it tells nothing."""

import os

import numpy as np
import pytest

from fedcgd.noise.keys import NoiseKey, _universal_hashes, synthetic_nonce

KEY = bytes(range(32))
SUM = np.arange(100_000)


@pytest.fixture
def repeating(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))


def test_what_goes_in_decides_when_the_random_numbers_repeat(repeating):
    changed = SUM.copy()
    changed[77_777] ^= 1
    moved = np.roll(SUM, 2)
    questions = [
        (KEY, [], SUM),
        (KEY, [], changed),
        (KEY, [], moved),
        (KEY, [], SUM[:-1]),
        (KEY, [], np.append(SUM, 0)),
        (KEY, [1], SUM),
        (KEY, [2**128 - 1], SUM),
        (KEY, [1, 2], SUM),
        (KEY, [2, 2], SUM),
        (bytes(32), [], SUM),
    ]
    nonces = [synthetic_nonce(*question) for question in questions]
    assert len(set(nonces)) == len(questions)
    assert nonces == [synthetic_nonce(*question) for question in questions]


def test_random_numbers_decide_too():
    nonces = {synthetic_nonce(KEY, [], SUM) for _ in range(50)}
    assert len(nonces) == 50
    assert all(2**100 < nonce < 2**128 for nonce in nonces)  # of a fair 128 bits, none is so small


def test_each_of_the_stretches_that_are_hashed_at_a_time_counts():
    stretches = SUM.reshape(10, -1)
    sums = [SUM, *(SUM ^ (at == SUM) for at in (0, 55_555, 99_999)), np.roll(stretches, 1, axis=0)]
    assert len({_universal_hashes(KEY, one.reshape(-1), at_once=8 * stretches.shape[1]) for one in sums}) == len(sums)


def test_keys_and_runs_have_nonces_of_their_own_and_a_simulation_repeats(repeating):
    key = NoiseKey(KEY)
    asked = [
        made.nonce_of(run, SUM, earlier=[], attempt=0) for made in (key, NoiseKey(bytes(32))) for run in ("one", "two")
    ]
    assert len(set(asked)) == 4
    assert NoiseKey.simulation(1).nonce_of("", SUM, earlier=[], attempt=3) == 3


@pytest.mark.parametrize("size", [0, 16, 33])
def test_a_key_of_another_length_is_refused(size):
    with pytest.raises(ValueError, match=f"got {size}"):
        synthetic_nonce(bytes(size), [], SUM)
