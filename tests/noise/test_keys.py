"""Keys: made at random, kept from others' eyes, independent in their parts, and never shown."""

import copy
import os
import pickle
import stat
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedcgd.noise.keys import NoiseKey, delete_key_file

ROOT = bytes(range(32))
NOISE = "5abeed49b411580e79bd2b2a6739d6dfdacc2bd20cec5f5fc02ac3cc457888bc"
NOISE_A = "5a12c4b747acece3dca5a9c8ab69f9da1140bab3b2addcfc2de60b5c0397e3e5"
CHOICES = "deb8af92af08fbb732b94ed001a41473211397bae7c6f2e4b27b940659873483"
FINGERPRINT = "f0fd754b7803a33c"


def test_parts_are_independent_of_each_other_and_pinned():
    key = NoiseKey(ROOT)
    parts = [key.noise, key.choices, key.noise_of("a"), key.noise_of("b"), key.choices_of("a"), ROOT]
    assert len(set(parts)) == 6
    assert all(len(part) == 32 for part in parts)
    assert not any(key.fingerprint in part.hex() for part in parts)
    # Pinned at the first release: a changed derivation would lose the noise of every run in progress.
    assert key.noise.hex() == NOISE
    assert key.noise_of("a").hex() == NOISE_A
    assert key.choices.hex() == CHOICES
    assert key.fingerprint == FINGERPRINT


def test_nonces_are_made_under_a_part_of_their_own(monkeypatch):
    """Else what is told of a sum by its nonce, and its noise, would come from one key."""
    used = []
    monkeypatch.setattr("fedcgd.noise.keys.synthetic_nonce", lambda key, nonces, total: used.append(key) or 0)
    key = NoiseKey(ROOT)
    for stream in ("", "a"):
        key.nonce_of(stream, np.zeros(3), earlier=[], attempt=0)
    assert len({*used, key.noise, key.choices, key.noise_of("a"), key.choices_of("a"), ROOT}) == 7


def test_a_created_file_is_there_after_a_power_failure(tmp_path, monkeypatch):
    """Before any noise is made from it: the folder it is in is synchronised, after it has its name."""
    synchronised = []
    for module in ("support.records", "noise.keys"):
        monkeypatch.setattr(
            f"fedcgd.{module}.sync_folder", lambda folder: synchronised.append(sorted(p.name for p in folder.iterdir()))
        )
    NoiseKey.from_file(tmp_path / "key", create=True)
    assert synchronised == [["key.runs"], ["key", "key.runs"]]
    (tmp_path / "other").mkdir()
    NoiseKey.from_file(tmp_path / "second", create=True, runs=tmp_path / "other" / "runs")
    assert synchronised[2:] == [["runs"], ["key", "key.runs", "other", "second"]]


def test_a_simulation_key_repeats_and_says_what_it_is():
    key = NoiseKey.simulation(7)
    assert key.simulated
    assert "simulation" in repr(key)
    assert key.noise == NoiseKey.simulation(7).noise != NoiseKey.simulation(8).noise
    with pytest.raises(AttributeError):
        key.simulated = False


def test_a_created_file_is_for_the_owner_only_and_is_not_made_twice(tmp_path):
    path = tmp_path / "folder" / "key"
    key = NoiseKey.from_file(path, create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == ["key", "key.runs"]
    assert stat.S_IMODE(path.with_name("key.runs").stat().st_mode) == 0o600
    assert NoiseKey.from_file(path, create=True).noise == NoiseKey.from_file(path).noise == key.noise


def test_processes_that_create_the_file_at_once_get_the_same_key(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: NoiseKey.from_file(tmp_path / "key", create=True).noise, range(40)))
    assert len(set(keys)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622, 0o777])
def test_a_file_that_others_may_touch_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    NoiseKey.from_file(path, create=True)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o}.*chmod 600"):
        NoiseKey.from_file(path)


@pytest.mark.parametrize("text", ["", "00", "zz" * 32, ROOT.hex() + "00", "secret-words"])
def test_a_file_or_variable_without_a_key_is_refused_and_not_repeated(tmp_path, monkeypatch, text):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    monkeypatch.setenv("FEDCGD_TEST_KEY", text)
    for load in (lambda: NoiseKey.from_file(path), lambda: NoiseKey.from_environment("FEDCGD_TEST_KEY")):
        with pytest.raises(ValueError, match="64 hexadecimal") as caught:
            load()
        assert not text or text not in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="create=True"):
        NoiseKey.from_file(tmp_path / "key")


def test_the_environment_variable_is_taken_out(monkeypatch):
    monkeypatch.setenv("FEDCGD_TEST_KEY", ROOT.hex())
    assert NoiseKey.from_environment("FEDCGD_TEST_KEY").noise == NoiseKey(ROOT).noise
    assert "FEDCGD_TEST_KEY" not in os.environ
    with pytest.raises(ValueError, match="FEDCGD_TEST_KEY"):
        NoiseKey.from_environment("FEDCGD_TEST_KEY")


def test_a_callback_gives_the_bytes():
    assert NoiseKey.from_callback(lambda: ROOT).noise == NoiseKey(ROOT).noise
    with pytest.raises(ValueError, match="32 bytes"):
        NoiseKey.from_callback(lambda: b"short")


def test_the_key_does_not_show():
    key = NoiseKey(ROOT)
    for text in (repr(key), str(key), f"{key}", f"{[key]}"):
        assert ROOT.hex() not in text
        assert str(ROOT) not in text
        assert key.noise.hex() not in text
    for give_away in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            give_away(key)
    with pytest.raises(TypeError):
        vars(key)
    with pytest.raises(ValueError, match="32 bytes") as caught:
        NoiseKey(ROOT[:31])
    assert ROOT[:31].hex() not in "".join(traceback.format_exception(caught.value))


def test_deleting_removes_the_file_and_may_be_repeated(tmp_path):
    path = tmp_path / "key"
    NoiseKey.from_file(path, create=True)
    second_name = tmp_path / "link"
    second_name.hardlink_to(path)
    delete_key_file(path)
    delete_key_file(path)
    assert not path.exists()
    assert set(second_name.read_text()) == {"0"}, "the blocks still hold the key"
