"""Invariant: of a ledger that is damaged or edited, `verify` says that; it neither proves anything nor falls over."""

import json
from pathlib import Path

import pytest
from command_line import run
from ledgers import recorded, refused
from plans import make_plan
from sql import edit

from fedcgd import LambdaCGD, Ledger, NoiseKey, Participation

PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=4, min_separation=1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recorded(tmp_path / "run.db", ["ann"], PLAN, NoiseKey.simulation(0), over=False)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE attempts SET users = x'00'", "a cohort on record cannot be unpacked"),
        ("UPDATE run SET plan = '{}'", "a plan has no 'mechanism'"),
        ("UPDATE run SET plan = '{'", "the plan on record is no JSON: Expecting property name"),
        ("UPDATE run SET plan = '[]'", "the plan on record is [], and must be a JSON object"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "show", "show --json", "compose"])
def test_edited_records(path: Path, statement: str, words: str, command: str) -> None:
    """Exit code 2, not the 1 of a traceback, which is that of records that contradict each other."""
    edit(path, statement)
    result = run("ledger", *command.split(), path)
    assert result.exit_code == 2, result.output
    assert words in (json.loads(result.stdout)["error"] if "--json" in command else result.stderr)


def test_a_model_that_cannot_be_written(path: Path) -> None:
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
