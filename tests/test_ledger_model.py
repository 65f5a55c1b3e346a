"""The last released model comes out of the ledger, before and after the run is sealed."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fedcgd.cli import app
from fedcgd.keys import NoiseKey
from fedcgd.ledger import Ledger, released_model, seal
from fedcgd.mechanisms import DPSGD
from fedcgd.participation import Participation
from fedcgd.plan import Plan

PLAN = Plan(mechanism=DPSGD(), participation=Participation(rounds=3), clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
LAYOUT = json.dumps([["weight", "bias", "half"], [[2, 3], [], [2]], ["float32", "float64", "bfloat16"]])
FLAT = np.arange(9, dtype=np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Ledger.open(tmp_path / "run.db", plan=PLAN, configuration={}, key=NoiseKey.generate()) as ledger:
        for round, layout in ((0, ""), (1, LAYOUT)):
            if round:
                with pytest.raises(ValueError, match="without the names and shapes"):
                    released_model(tmp_path / "run.db")
            else:
                with pytest.raises(ValueError, match="has released no model"):
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
        result = CliRunner().invoke(app, ["ledger", "model", str(path), str(target)])
        assert result.exit_code == 0, result.stderr
        found = load_file(target) if suffix == "safetensors" else dict(np.load(target))
        np.testing.assert_array_equal(found["weight"], FLAT[:6].reshape(2, 3) + 1)
        assert (found["bias"].shape, found["bias"].dtype, float(found["bias"])) == ((), np.float64, 7)
        np.testing.assert_array_equal(found["half"], FLAT[7:] + 1)
        target.unlink()


def test_another_kind_of_file_is_refused(path: Path) -> None:
    result = CliRunner().invoke(app, ["ledger", "model", str(path), "model.pt"])
    assert result.exit_code == 2
    assert ".npz or .safetensors" in result.stderr
