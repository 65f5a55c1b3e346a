"""Key, ledger and register are copied in part: what would release rounds twice stops."""

import shutil
import stat
from pathlib import Path

import pytest
from command_line import run
from ledgers import refused, release
from plans import make_plan

from fedcgd import DPSGD, NoiseKey, Participation
from fedcgd.ledger import Ledger, verify

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


def test_a_run_that_released_nothing_needs_no_register(tmp_path: Path) -> None:
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


def test_a_reviewer_is_told_of_a_ledger_that_others_can_read(folder: Path) -> None:
    """It may be a copy that was given out on purpose: it is checked nevertheless."""
    path = folder / "run.db"
    quiet = run("ledger", "verify", path)
    path.chmod(0o644)
    told = run("ledger", "verify", path)
    assert quiet.exit_code == told.exit_code == 0
    assert "others may" not in quiet.output
    assert "others may" in " ".join(told.output.split())
