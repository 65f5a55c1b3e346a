"""A round of a run is released once, whatever is lost, copied or broken: ledger, log, key, register, the disk under a COMMIT."""

import errno
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from command_line import run
from ledgers import refused
from plans import make_plan

from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.ledger import Ledger, verify
from fedcgd.ledger.registry import Registry
from fedcgd.support.records import MAKE_ROOM

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)  # from Python 3.12

PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=6, min_separation=1))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    NoiseKey.from_file(tmp_path / "keys" / "noise.key", create=True)
    return tmp_path / "keys" / "noise.key"


def opened(path: Path, key_file: Path, plan: Plan = PLAN) -> Ledger:
    return Ledger.open(path, plan=plan, configuration={}, key=NoiseKey.from_file(key_file))


def release(ledger: Ledger, round: int) -> None:
    attempt = ledger.plan_round(round, ["ann"])
    ledger.record_aggregated(round, attempt, int.from_bytes(os.urandom(16), "big"))
    ledger.record_released(round, attempt, os.urandom(40))


def killed_after(
    releases: int, path: Path, key_file: Path, then: Callable[[Ledger], object] = lambda ledger: None
) -> None:
    """A process that releases so many rounds, does `then`, and is killed: kill -9, nothing is closed."""
    child = os.fork()
    if not child:
        ledger = opened(path, key_file)
        for round in range(releases):
            release(ledger, round)
        then(ledger)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("releases", [1, 3])
def test_the_log_is_not_needed_after_a_kill(tmp_path: Path, key_file: Path, releases: int) -> None:
    path = tmp_path / "run.db"
    killed_after(releases, path, key_file, lambda ledger: ledger.plan_round(releases, ["bob"]))
    (tmp_path / "run.db-wal").unlink()
    (tmp_path / "run.db-shm").unlink()
    assert (verify(path).released, verify(path).problems) == (releases, ())
    with opened(path, key_file) as ledger:
        assert ledger.resume().round == releases
        assert ledger.history(["ann"]).counts == {"ann": releases}


@pytest.mark.parametrize("elsewhere", [True, False], ids=["typing error", "unmounted volume"])
def test_a_lost_ledger_does_not_begin_the_run_again(tmp_path: Path, key_file: Path, elsewhere: bool) -> None:
    path = tmp_path / "run.db"
    killed_after(2, path, key_file)
    other = tmp_path / "rum.db" if elsewhere else path
    if not elsewhere:
        for file in tmp_path.glob("run.db*"):
            file.rename(tmp_path / f"gone.{file.name}")
    for _ in range(2):
        with refused("begun-before"):
            opened(other, key_file)
    assert not list(tmp_path.glob(f"{other.name}*"))  # what is refused leaves no ledger
    with refused("begun-before"):
        opened(tmp_path / "folder" / "run.db", key_file)
    assert not (tmp_path / "folder").exists()
    with refused("begun-before"):  # a ledger in memory is no ledger
        Ledger.open(":memory:", plan=PLAN, configuration={}, key=NoiseKey.from_file(key_file))
    if elsewhere:
        with opened(path, key_file) as ledger:
            release(ledger, 2)


def test_of_two_that_begin_at_once_the_later_looks_again(tmp_path: Path) -> None:
    """Neither had released anything when both asked; one has, or was sealed, by the time the other begins."""
    with closing(Registry(tmp_path / "runs")) as registry:
        for settings in ("released", "sealed"):
            registry.begin(f"one {settings}", settings, "one.db")
            registry.check_new(settings, "two.db")
        with registry.release("one released", 0, [7]):
            pass
        registry.seal("one sealed", "2026-01-01")
        for settings in ("released", "sealed"):
            with refused("begun-before"):
                registry.begin(f"two {settings}", settings, "two.db")
            assert registry.run(f"two {settings}") is None


def test_of_two_copies_that_run_side_by_side_one_releases(tmp_path: Path, key_file: Path) -> None:
    path = tmp_path / "run.db"
    with opened(path, key_file) as ledger:
        release(ledger, 0)
    shutil.copy(path, tmp_path / "copy.db")
    with opened(path, key_file) as one, opened(tmp_path / "copy.db", key_file) as other:
        release(one, 1)
        with refused("another-copy"):
            release(other, 1)
    # What was refused is not in the copy either: `fedcgd ledger model` would hand it out, a second release of the round.
    assert verify(tmp_path / "copy.db").released == 1
    with refused("old-copy"):
        opened(tmp_path / "copy.db", key_file)
    with opened(path, key_file) as one:
        release(one, 2)


def test_a_run_that_released_nothing_may_begin_again_and_the_first_is_over(tmp_path: Path, key_file: Path) -> None:
    with opened(tmp_path / "first.db", key_file) as first:
        with opened(tmp_path / "second.db", key_file) as second:
            release(second, 0)
        with refused("another-copy"):
            release(first, 0)
    with refused("begun-again"):
        opened(tmp_path / "first.db", key_file)


def test_a_crash_between_ledger_and_registry_goes_on(tmp_path: Path, key_file: Path, monkeypatch) -> None:
    path = tmp_path / "run.db"
    with opened(path, key_file) as ledger:
        release(ledger, 0)
        monkeypatch.setattr(ledger._registry, "_write", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            release(ledger, 1)
    with opened(path, key_file) as ledger:
        assert ledger.resume().round == 2
        release(ledger, 2)


@pytest.mark.parametrize("fails", ["ledger", "model"])
def test_a_disk_that_fails_undoes_the_release(
    tmp_path: Path, key_file: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, layout = tmp_path / "run.db", "x" * 10**5

    def no_space(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(path, key_file) as ledger:
        release(ledger, 0)
        first, connection = ledger.resume().model, ledger._connection
        attempt = ledger.plan_round(1, ["ann"])
        ledger.record_aggregated(1, attempt, 17)
        with monkeypatch.context() as patched:
            if fails == "model":
                patched.setattr(os, "fsync", no_space)
            else:
                (pages,) = connection.execute("PRAGMA page_count").fetchone()
                connection.execute(f"PRAGMA max_page_count = {pages + 10}")
            with pytest.raises((sqlite3.OperationalError, OSError), match=r"(?i)full|no space") as told:
                ledger.record_released(1, attempt, bytes(10**6), layout=layout)
        assert MAKE_ROOM in str(told.value)
        assert f"{path}{'-model-1' if fails == 'model' else ''}" in str(told.value)
        assert (tmp_path / "run.db-model-1").exists() == (fails != "model")
        assert (ledger.resume().round, ledger.resume().model) == (1, first)
        connection.execute("PRAGMA max_page_count = 1000000")
        ledger.skip(1, "the disk failed")
        assert not (tmp_path / "run.db-model-1").exists()  # nothing that was not released lies around
        release(ledger, 1)
        shown = ledger.resume()
    with opened(path, key_file) as ledger:
        assert (ledger.resume().round, ledger.resume().model) == (2, shown.model)
    assert verify(path).problems == ()


def test_a_link_to_the_key_remembers_the_same_runs(tmp_path: Path, key_file: Path) -> None:
    with opened(tmp_path / "run.db", key_file) as ledger:
        release(ledger, 0)
    link = tmp_path / "link.key"
    link.symlink_to(key_file)
    with refused("begun-before"):
        opened(tmp_path / "lost.db", link)


@pytest.fixture
def copy(tmp_path: Path, key_file: Path) -> Path:
    """The key and the ledger of a run of two rounds, without the register."""
    with opened(key_file.with_name("run.db"), key_file) as ledger:
        for round in range(2):
            release(ledger, round)
    (tmp_path / "copy").mkdir()
    for name in ("noise.key", "run.db"):
        shutil.copy2(key_file.with_name(name), tmp_path / "copy")
    return tmp_path / "copy"


def without_register(key_file: Path) -> None:
    """As keys are that were made without one."""
    key_file.write_text(key_file.read_text().split()[0])


def test_key_and_ledger_without_the_register(copy: Path) -> None:
    with refused("register-lost"):
        opened(copy / "run.db", copy / "noise.key")
    assert sorted(path.name for path in copy.iterdir()) == ["noise.key", "run.db"]
    (copy / "noise.key.runs").touch(0o600)  # somebody has made an empty one
    with refused("register-lost"):
        opened(copy / "run.db", copy / "noise.key")
    without_register(copy / "noise.key")
    (copy / "noise.key.runs").unlink()
    for _ in range(2):
        with refused("unknown-to-the-register"):
            opened(copy / "run.db", copy / "noise.key")


def test_the_key_alone(copy: Path) -> None:
    """It says itself that it was made with a register. A key that says nothing begins: nothing here can know of other runs."""
    (copy / "run.db").unlink()
    with refused("register-lost"):
        opened(copy / "run.db", copy / "noise.key")
    assert [path.name for path in copy.iterdir()] == ["noise.key"]
    without_register(copy / "noise.key")
    opened(copy / "run.db", copy / "noise.key").close()
    # What has released nothing needs no register.
    (copy / "noise.key.runs").unlink()
    with opened(copy / "run.db", copy / "noise.key") as ledger:
        release(ledger, 0)


def test_a_reviewer_is_told_of_a_ledger_that_others_can_read(copy: Path) -> None:
    """It may be a copy that was given out on purpose: it is checked nevertheless."""
    said = []
    for mode in (0o600, 0o644):
        (copy / "run.db").chmod(mode)
        said.append(run("ledger", "verify", copy / "run.db"))
    assert [one.exit_code for one in said] == [0, 0]
    assert ["others may" in " ".join(one.output.split()) for one in said] == [False, True]
