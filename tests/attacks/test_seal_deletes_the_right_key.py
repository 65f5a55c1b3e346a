"""`seal` says that a key is deleted only when it is, and never deletes one that another run needs."""

import shutil
from pathlib import Path

import command_line
from ledgers import recorded, refused
from plans import make_plan

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.ledger import export, seal

PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=6, min_separation=1))


def run(path: Path, key_file: Path, task: str = "one") -> None:
    key = NoiseKey.from_file(key_file, create=True)
    recorded(path, ["ann"], PLAN, key, configuration={"task": task}, over=False)


def sealed(*words: object):
    return command_line.run("ledger", "seal", *map(str, words))


def test_a_mistyped_key_file_is_an_error(tmp_path: Path) -> None:
    run(tmp_path / "run.db", tmp_path / "noise.key")
    result = sealed(tmp_path / "run.db", "--key-file", tmp_path / "nosie.key")
    assert result.exit_code != 0
    assert "no key" in result.stderr
    assert "deleted" not in result.stdout
    assert (tmp_path / "noise.key").exists()
    assert export(tmp_path / "run.db")["run"]["sealed"] is None


def test_a_key_that_another_run_needs_is_kept(tmp_path: Path) -> None:
    """Also where that run's ledger is away."""
    key_file = tmp_path / "noise.key"
    run(tmp_path / "one.db", key_file, "one")
    run(tmp_path / "two.db", key_file, "two")
    for here, away in (("two.db", "elsewhere.db"), ("elsewhere.db", "two.db")):
        with refused("key-of-another-run"):
            seal(tmp_path / "one.db", key_file)
        assert key_file.exists()
        shutil.move(tmp_path / here, tmp_path / away)
    assert export(tmp_path / "one.db")["run"]["sealed"] is None
    seal(tmp_path / "two.db", None)
    seal(tmp_path / "one.db", key_file)
    assert not key_file.exists()
