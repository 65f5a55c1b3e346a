"""Invariant: of a ledger that is damaged or edited, `verify` says that; it neither proves anything nor falls over."""

from pathlib import Path

import pytest
from command_line import run
from ledgers import recorded, refused
from plans import make_plan

from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation

PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=4, min_separation=1))


def test_a_model_that_cannot_be_written(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.db", ["ann"], PLAN, NoiseKey.simulation(0), over=False)
    result = run("ledger", "model", path, path / "no" / "folder.npz")
    assert result.exit_code == 2, result.output


def test_the_file_of_the_keys_runs_is_no_ledger(tmp_path: Path) -> None:
    """Each of the two waited for the other's lock, for a minute."""
    key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
    with refused("ledger-is-the-register"):
        Ledger.open(tmp_path / "noise.key.runs", plan=PLAN, configuration={}, key=key)


def test_a_key_file_of_raw_bytes_is_not_quoted(tmp_path: Path) -> None:
    """The error used to carry the key: `UnicodeDecodeError.object`."""
    (tmp_path / "noise.key").write_bytes(bytes(range(120, 152)))
    (tmp_path / "noise.key").chmod(0o600)
    with pytest.raises(ValueError, match="64 hexadecimal") as refused:
        NoiseKey.from_file(tmp_path / "noise.key")
    assert not isinstance(refused.value, UnicodeError)
