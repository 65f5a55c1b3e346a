"""`fedcgd keeper`: keys and cards, what was opened, whether all were told the same, and the end."""

import json
import stat
from pathlib import Path

import command_line
import numpy as np
import pytest
from click.testing import Result
from keeper_runs import RealKeepers
from shared import record
from sql import edit

from fedcgd.keepers import Keeper, KeeperKey, Keepers


def run(*words: str) -> Result:
    return command_line.run("keeper", *words)


def test_cards_that_were_printed_make_the_file_of_all_parties(tmp_path: Path) -> None:
    parts = ["colluding = 1\n"]
    for name in ("court", "union", "clinic"):
        made = run("new", str(tmp_path / f"{name}.key"), "--name", name)
        assert made.exit_code == 0
        assert stat.S_IMODE((tmp_path / f"{name}.key").stat().st_mode) == 0o600
        parts.append(made.stdout)
    file = tmp_path / "keepers.toml"
    file.write_text("".join(parts))
    keepers = Keepers.from_file(file)
    assert keepers.names == ("clinic", "court", "union")
    assert keepers.card_of(KeeperKey.from_file(tmp_path / "union.key")).name == "union"
    shown = json.loads(run("show", str(file), "--json").stdout)
    assert shown["keepers"]["court"] == keepers.card("court").fingerprint
    assert shown["noise_factor"] == pytest.approx(np.sqrt(1.5))
    assert "1.22474" in run("show", str(file)).stdout
    again = run("new", str(tmp_path / "court.key"), "--name", "court")
    assert (again.exit_code, "one key" in again.stderr) == (2, True)
    bad = run("new", str(tmp_path / "x.key"), "--name", "a b")
    assert (bad.exit_code, "64 letters" in " ".join(bad.stderr.split())) == (2, True)
    assert not (tmp_path / "x.key").exists()


def test_no_command_prints_a_key(tmp_path: Path) -> None:
    key = tmp_path / "court.key"
    printed = run("new", str(key), "--name", "court", "--json").output + run("show", str(key)).output
    assert key.read_text().strip() not in printed
    assert json.loads(run("show", str(key), "--json").stdout)["rounds_opened"] == []


@pytest.fixture
def finished(tmp_path: Path) -> RealKeepers:
    real = RealKeepers(tmp_path)
    real.make().start(real.grid(), record(np.zeros(6)))
    return real


def verify(real: RealKeepers, *more: str) -> Result:
    return run("verify", *(f"k{i}={path}.record" for i, path in enumerate(real.files)), *more)


def test_records_that_agree_are_said_to(finished: RealKeepers) -> None:
    found = verify(finished, "--ledger", str(finished.ledger))
    assert (found.exit_code, found.stdout.count(" 6")) == (0, 3)
    shown = json.loads(run("show", str(finished.files[0]), "--json").stdout)
    assert shown["rounds_opened"] == list(range(6))
    assert "lambda-cgd" in run("show", str(finished.files[0])).stdout


def test_keepers_that_have_opened_nothing_contradict_nobody(tmp_path: Path) -> None:
    real = RealKeepers(tmp_path)
    for path in real.files:
        Keeper.open(path, real.keepers).close()
    assert verify(real).exit_code == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE openings SET list_hash = zeroblob(32) WHERE round = 2", "round 2: different lists were opened by"),
        ("UPDATE run SET context = zeroblob(32)", "have not served the same run"),
        ("DELETE FROM openings WHERE round = 3", "round 3 is released in"),
        ("UPDATE openings SET round = 9 WHERE round = 5", "round 9 was opened by k1, and"),
        ("UPDATE run SET key_fingerprint = 'x'", "k1 (x) is none of the keepers in"),
        ("UPDATE run SET key_fingerprint = '!'", "k1 (!) is none of the keepers in"),
        ('UPDATE run SET agreement = replace(agreement, \'"run": "\', \'"run": "x\')', "has served another run than"),
        ("UPDATE run SET agreement = replace(agreement, '2.0', '0.2')", "has made noise for another plan"),
    ],
)
def test_what_contradicts_is_named_and_the_exit_code_says_so(finished: RealKeepers, change: str, problem: str) -> None:
    edit(f"{finished.files[1]}.record", change)
    found = verify(finished, "--ledger", str(finished.ledger))
    assert found.exit_code == 1
    assert problem in " ".join(found.stdout.split())
    assert json.loads(verify(finished, "--ledger", str(finished.ledger), "--json").stdout)["problems"]


def test_records_of_another_version_are_refused(finished: RealKeepers) -> None:
    edit(f"{finished.files[0]}.record", "UPDATE run SET format = 4")
    with pytest.raises(ValueError, match="keeper's record"):
        Keeper.open(finished.files[0], finished.keepers)
    newer = run("show", str(finished.files[0]))
    assert (newer.exit_code, "format 4" in " ".join(newer.stderr.split())) == (2, True)


def test_sealing_deletes_the_key_and_keeps_the_record(finished: RealKeepers) -> None:
    key = finished.files[0]
    assert run("seal", str(key)).exit_code == 0
    assert not key.exists()
    assert "deleted" in run("show", str(key)).stdout
    assert verify(finished).exit_code == 0
    again = run("seal", str(key))
    assert (again.exit_code, "nothing is" in " ".join(again.stderr.split())) == (2, True)


@pytest.mark.parametrize(
    "words", [["verify", "k0"], ["verify", "k0=/nowhere"], ["show", "/nowhere"], ["seal", "/nowhere"]]
)
def test_wrong_input_is_exit_code_2(words) -> None:
    assert run(*words).exit_code == 2
