"""The last released model comes out of the ledger, before and after the run is sealed."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from ledgers import refused
from safetensors.numpy import load_file, save_file

from fedcgd import DPSGD, NoiseKey, Participation, Plan
from fedcgd.ledger import Ledger, released_model, seal

PLAN = Plan(mechanism=DPSGD(), participation=Participation(rounds=3), clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
LAYOUT = json.dumps(
    [
        ["weight", "bias", "half", "norm.running_var"],
        [[2, 3], [], [2], [2]],
        ["float32", "float64", "bfloat16", "float32"],
    ]
)
FLAT = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, -9, 1], np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Ledger.open(tmp_path / "run.db", plan=PLAN, configuration={}, key=NoiseKey.generate()) as ledger:
        for round, layout in ((0, ""), (1, LAYOUT)):
            if round:
                with refused("model-without-layout"):
                    released_model(tmp_path / "run.db")
            else:
                with refused("no-model"):
                    released_model(tmp_path / "run.db")
            attempt = ledger.plan_round(round, [])
            ledger.record_aggregated(round, attempt, round)
            ledger.record_released(round, attempt, (FLAT + round).tobytes(), b"", layout)
    return tmp_path / "run.db"


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_the_arrays_come_back_by_name(path: Path, suffix: str) -> None:
    target = path.with_name(f"model.{suffix}")
    for sealed in (False, True):
        if sealed:
            seal(path, None)
        result = run("ledger", "model", path, target)
        assert result.exit_code == 0, result.stderr
        found = load_file(target) if suffix == "safetensors" else dict(np.load(target))
        np.testing.assert_array_equal(found["weight"], FLAT[:6].reshape(2, 3) + 1)
        assert (found["bias"].shape, found["bias"].dtype, float(found["bias"])) == ((), np.float64, 7)
        np.testing.assert_array_equal(found["half"], FLAT[7:9] + 1)
        np.testing.assert_array_equal(found["norm.running_var"], [0, 2])  # noise had made it negative
        assert "4 trained" in result.stdout
        assert "--carried" in result.stdout
        target.unlink()


WHOLE = {
    "norm.num_batches_tracked": np.array(17),
    "weight": np.zeros((2, 3), np.float32),
    "frozen": np.full(3, 0.5, np.float32),
    "bias": np.zeros((), np.float64),
    "half": np.zeros(2, np.float32),
    "norm.running_var": np.ones(2, np.float32),
}


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_the_whole_model_with_what_was_not_trained(path: Path, suffix: str) -> None:
    initial, target = path.with_name(f"initial.{suffix}"), path.with_name("model.npz")
    if suffix == "npz":
        np.savez(initial, **WHOLE)
    else:
        save_file(WHOLE, initial)
    result = run("ledger", "model", path, target, "--carried", initial)
    assert result.exit_code == 0, result.stderr
    assert all(part in result.stdout for part in ("6 arrays", str(target), str(initial)))
    found = dict(np.load(target))
    assert list(found) == (list(WHOLE) if suffix == "npz" else list(load_file(initial)))
    np.testing.assert_array_equal(found["frozen"], WHOLE["frozen"])
    assert int(found["norm.num_batches_tracked"]) == 17
    np.testing.assert_array_equal(found["weight"], FLAT[:6].reshape(2, 3) + 1)
    assert found["bias"] == 7


def test_a_whole_model_that_is_not_this_runs_is_refused(path: Path) -> None:
    other, pickled, text = (path.with_name(f"{name}.npz") for name in ("other", "pickled", "text"))
    text.write_text("no model")
    np.savez(pickled, weight=np.array([{}], object))
    for arrays, words in (
        ({name: array for name, array in WHOLE.items() if name != "bias"}, "has no array 'bias'"),
        (WHOLE | {"weight": np.zeros((3, 2), np.float32)}, "has shape (3, 2) in"),
    ):
        np.savez(other, **arrays)
        not_taken(path, other, words)
    not_taken(path, text, "cannot be read as a model")
    not_taken(path, pickled, "cannot be read as a model")
    not_taken(path, path.with_name("none.npz"), "cannot be read as a model")
    not_taken(path, path.with_name("initial.pt"), ".npz or .safetensors")


def not_taken(path: Path, initial: Path, words: str) -> None:
    target = path.with_name("model.npz")
    result = run("ledger", "model", path, target, "--carried", initial)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert not target.exists()


def test_another_kind_of_file_is_refused(path: Path) -> None:
    result = run("ledger", "model", path, "model.pt")
    assert result.exit_code == 2
    assert ".safetensors" in result.stderr
