"""What is written is whole, or as it was before; and a command that could not write does not end like one that did."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from ledgers import MODEL, recorded
from plans import make_plan

from fedcgd import DPSGD, Participation
from fedcgd.optimisation.mechanism_json import write_mechanism
from fedcgd.quadratic import Spectrum
from fedcgd.support.files import atomic_write, sync_folder

PLAN = make_plan(DPSGD(), Participation(rounds=2))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return recorded(tmp_path / "run.db", ["ann"], PLAN, over=False, **MODEL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


def half_write(path: Path, end: BaseException) -> None:
    with atomic_write(path) as part:
        assert part.suffix == path.suffix
        part.write_text("half")
        raise end


@pytest.mark.parametrize("end", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_what_fails_halfway_leaves_what_was_there(end: BaseException, folder: Path) -> None:
    path = folder / "report.md"
    with pytest.raises(type(end)):
        half_write(path, end)
    assert list(folder.iterdir()) == []
    with atomic_write(path) as part:
        part.write_text("first")
    with pytest.raises(type(end)):
        half_write(path, end)
    assert [p.name for p in folder.iterdir()] == ["report.md"]
    assert path.read_text() == "first"


def test_a_link_stays_one_and_a_device_is_written_to(folder: Path) -> None:
    (folder / "link.md").symlink_to(folder / "there.md")
    with atomic_write(folder / "link.md") as part:
        part.write_text("text")
    assert (folder / "link.md").is_symlink()
    assert (folder / "there.md").read_text() == "text"
    os.mkfifo(folder / "pipe")
    with atomic_write(folder / "pipe") as part:
        assert part == folder / "pipe"
    assert (folder / "pipe").is_fifo()


SAVED = {
    "report.html": lambda ledger, path: run("report", ledger, "-o", path),
    "statement.json": lambda ledger, path: run("report", ledger, "-o", path),
    "model.npz": lambda ledger, path: run("ledger", "model", ledger, path),
    "spectrum.json": lambda _, path: Spectrum.from_eigenvalues([2.0, 1.0]).save(path),
    "mechanism.json": lambda _, path: write_mechanism(DPSGD(), path),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_full_disk_leaves_neither_half_a_file_nor_the_exit_code_of_a_refuted_claim(
    name: str, ledger: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(part: Path, *_: object, **__: object) -> None:
        part.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = folder / name
    target.write_text("of an earlier run")
    monkeypatch.setattr(np, "savez", full)
    monkeypatch.setattr(Path, "write_text", full)
    try:
        result = SAVED[name](ledger, target)
    except OSError:
        assert name in ("spectrum.json", "mechanism.json")
    else:
        assert (result.exit_code, "written" in result.stdout, "No space" in result.stderr) == (2, False, True)
    assert [p.name for p in folder.iterdir()] == [name]
    assert target.read_bytes() == b"of an earlier run"


def test_a_folder_that_is_synchronised_is_not_kept_open(tmp_path: Path) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    sync_folder(tmp_path)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
