"""The last released model comes out of the ledger, before and after the run is sealed."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from ledgers import refused

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


def test_the_arrays_come_back_by_name(path: Path) -> None:
    target = path.with_name("model.npz")
    for sealed in (False, True):
        if sealed:
            seal(path, None)
        result = run("ledger", "model", path, target)
        assert result.exit_code == 0, result.stderr
        found = dict(np.load(target))
        np.testing.assert_array_equal(found["weight"], FLAT[:6].reshape(2, 3) + 1)
        assert (found["bias"].shape, found["bias"].dtype, float(found["bias"])) == ((), np.float64, 7)
        np.testing.assert_array_equal(found["half"], FLAT[7:9] + 1)
        np.testing.assert_array_equal(found["norm.running_var"], [0, 2])  # noise had made it negative
        assert "4 trained" in result.stdout
        target.unlink()


def test_another_kind_of_file_is_refused(path: Path) -> None:
    result = run("ledger", "model", path, "model.pt")
    assert result.exit_code == 2
    assert ".npz" in result.stderr
