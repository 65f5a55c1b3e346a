"""Key, ledger and register are copied in part: what would release rounds twice stops, and who goes on says so on record."""

import shutil
import stat
from pathlib import Path

import pytest
from command_line import figures, run
from ledgers import reasons, refused, release
from plans import make_plan

from fedcgd import DPSGD, NoiseKey, Participation
from fedcgd.ledger import Ledger, adopt, joint, seal, verify
from fedcgd.ledger.run_composition import EVALUATION_OF

PLAN = make_plan(DPSGD(), Participation(rounds=6))


def opened(folder: Path, name: str = "run.db", **configuration) -> Ledger:
    key = NoiseKey.from_file(folder / "noise.key", create=True)
    return Ledger.open(folder / name, plan=PLAN, configuration=configuration, key=key)


def releases(folder: Path, rounds: int, name: str = "run.db", **configuration) -> Path:
    with opened(folder, name, **configuration) as ledger:
        for _ in range(rounds):
            release(ledger, ledger.resume().round, [f"user-{ledger.resume().round}"], b"")
    return folder / name


def copied(folder: Path, *names: str) -> Path:
    target = folder.with_name("copy")
    target.mkdir()
    for name in names:
        shutil.copy2(folder / name, target)
    return target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    releases(path, 2)
    return path


def test_key_and_ledger_without_the_register(folder: Path) -> None:
    copy = copied(folder, "noise.key", "run.db")
    with refused("register-lost"):
        opened(copy)
    assert sorted(path.name for path in copy.iterdir()) == ["noise.key", "run.db"]
    # Also where somebody has made an empty one, and for keys that were made without a register.
    (copy / "noise.key.runs").touch(0o600)
    with refused("register-lost"):
        opened(copy)
    (copy / "noise.key").write_text((copy / "noise.key").read_text().split()[0])
    (copy / "noise.key.runs").unlink()
    for _ in range(2):
        with refused("unknown-to-the-register"):
            opened(copy)


def test_the_key_alone(folder: Path) -> None:
    """It says itself that it was made with a register. A key that says nothing begins: nothing here can know of other runs."""
    copy = copied(folder, "noise.key")
    with refused("register-lost"):
        opened(copy)
    assert [path.name for path in copy.iterdir()] == ["noise.key"]
    (copy / "noise.key").write_text((copy / "noise.key").read_text().split()[0])
    opened(copy).close()


def test_adopting_goes_on_and_is_on_record(folder: Path) -> None:
    copy = copied(folder, "noise.key", "run.db")
    done = run("ledger", "adopt", copy / "run.db", "--key-file", copy / "noise.key")
    assert done.exit_code == 0, done.output
    assert "adopted after" in " ".join(done.output.split())
    path = releases(copy, 1)
    checked = verify(path)
    assert checked.problems == ()
    assert checked.released == 3
    [said] = (note for note in checked.notes if note.reason == "adopted")
    assert said in figures("ledger", "verify", path)["notes"]
    report = copy / "report.html"
    assert run("report", path, "-o", report).exit_code == 0
    assert "latest ledger" in report.read_text()
    # The register is whole again: an older copy stops, and there is nothing more to adopt.
    with refused("nothing-to-adopt"):
        adopt(path, NoiseKey.from_file(copy / "noise.key"))
    shutil.copy2(folder / "run.db", path)
    with refused("old-copy"):
        opened(copy)
    assert "adopted" not in reasons(verify(folder / "run.db").notes)


def test_both_copies_go_on_after_a_false_declaration_and_compose_finds_it(folder: Path) -> None:
    copy = copied(folder, "noise.key", "run.db")
    adopt(copy / "run.db", NoiseKey.from_file(copy / "noise.key"))
    found = joint([releases(folder, 4), releases(copy, 4)])
    assert "went-apart" in reasons(found.notes)


def test_the_evaluations_are_adopted_too(folder: Path) -> None:
    with opened(folder) as ledger:
        stream = ledger.stream_id
    releases(folder, 1, "run.db.evaluation", **{EVALUATION_OF: stream})
    (folder / "noise.key.runs").unlink()
    adopt(folder / "run.db", NoiseKey.from_file(folder / "noise.key"))
    releases(folder, 1, "run.db.evaluation", **{EVALUATION_OF: stream})
    assert "adopted" in reasons(verify(folder / "run.db.evaluation").notes)


def test_what_cannot_be_adopted(folder: Path, tmp_path: Path) -> None:
    path, key = folder / "run.db", NoiseKey.from_file(folder / "noise.key")
    with refused("key-without-register"):
        adopt(path, NoiseKey.generate())
    other = NoiseKey.from_file(tmp_path / "other.key", create=True)
    with refused("another-key"):
        adopt(path, other)
    with refused("no-ledger"):
        adopt(tmp_path / "none.db", key)
    # The key began the same run again, in another ledger, while this one was away.
    path.rename(folder / "away.db")
    (folder / "noise.key.runs").unlink()
    (folder / "noise.key").write_text((folder / "noise.key").read_text().split()[0])  # it names no register any more
    releases(folder, 1)
    with refused("register-lost"):
        adopt(folder / "away.db", key)
    key = NoiseKey.from_file(folder / "noise.key")
    with refused("begun-again"):
        adopt(folder / "away.db", key)
    assert "adopted" not in reasons(verify(folder / "away.db").notes)
    seal(folder / "away.db", None)
    with refused("sealed"):
        adopt(folder / "away.db", key)


def test_a_run_that_released_nothing_needs_no_adoption(tmp_path: Path) -> None:
    (tmp_path / "noise.key").write_text("ab" * 32)
    (tmp_path / "noise.key").chmod(0o600)
    opened(tmp_path).close()
    (tmp_path / "noise.key.runs").unlink()
    assert verify(releases(tmp_path, 1)).released == 1


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_a_ledger_or_register_that_others_can_read(folder: Path, mode: int) -> None:
    """The ledger says who took part when, which a secret sampling must hide, and the register is what old copies are found by."""
    for name in ("run.db", "noise.key.runs"):
        file = folder / name
        file.chmod(mode)
        with pytest.raises(ValueError, match=rf"{name} .*{mode:04o}"):
            opened(folder)
        assert stat.S_IMODE(file.stat().st_mode) == mode
        file.chmod(0o600)
    opened(folder).close()
