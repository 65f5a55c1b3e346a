"""The last model lies beside its ledger: whole after a kill at any line, and told from every other file."""

import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from command_line import run
from ledgers import reasons, refused
from plans import make_plan

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.ledger import Ledger, export, model_file, released_model, seal, verify

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)  # from Python 3.12

PLAN = make_plan(LambdaCGD(0.5), Participation(rounds=500, min_separation=1))
LAYOUT = '[["w"], [[100]], ["float32"]]'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    NoiseKey.from_file(tmp_path / "noise.key", create=True)
    return tmp_path / "run.db"


def opened(path: Path) -> Ledger:
    return Ledger.open(path, plan=PLAN, configuration={}, key=NoiseKey.from_file(path.with_name("noise.key")))


def model_of(round: int) -> bytes:
    return np.full(100, round, np.float32).tobytes()


def summed(ledger: Ledger, round: int) -> int:
    attempt = ledger.plan_round(round, ["ann"])
    ledger.record_aggregated(round, attempt, int.from_bytes(os.urandom(16), "big"))
    return attempt


def release(ledger: Ledger, round: int, model: bytes | None = None) -> None:
    ledger.record_released(
        round, summed(ledger, round), model_of(round) if model is None else model, b"the state", LAYOUT
    )


def with_rounds(path: Path, rounds: int) -> Path:
    with opened(path) as ledger:
        for round in range(rounds):
            release(ledger, round)
    return path


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.glob(f"{path.name}*"))


def killed(work: Callable[[], object]) -> bool:
    """Whether the process of its own that does `work` was killed; else it came to its end."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill_before_line(line: int) -> None:
    """kill -9 to this process before the so-manieth line of the ledger's code in what is called from now on."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if "/fedcgd/ledger/" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


@pytest.mark.parametrize("every", [pytest.param(9, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_a_kill_at_any_line_of_a_release_loses_nothing(path: Path, every: int) -> None:
    """What is there afterwards is the release before, or this one; the record and the model agree on which."""
    with_rounds(path, 2)
    line, outcomes, left_over = 0, set(), 0
    models = {0: model_of(0), 1: model_of(1)}
    round = 2
    while True:
        attempted = np.random.default_rng(line).bytes(400)

        def work(attempted: bytes = attempted, round: int = round, line: int = line) -> None:
            ledger = opened(path)
            attempt = summed(ledger, round)
            kill_before_line(line)
            ledger.record_released(round, attempt, attempted, b"s", LAYOUT)

        died = killed(work)
        released = verify(path).released
        assert released in (round, round + 1)
        if released > round:
            models[round] = attempted
        outcomes.add(released - round)
        unused = model_file.file_of(path, released)
        left_over += released == round and unused.exists() and unused.read_bytes() != models[round - 2]
        np.testing.assert_array_equal(released_model(path)["w"], np.frombuffer(models[released - 1], np.float32))
        with opened(path) as ledger:
            assert not unused.exists()  # what was not released is gone
            run = ledger.resume()
            assert (run.round, run.model) == (released, models[released - 1])
            assert run.state in (b"s", b"the state")
        round = released
        if not died:
            break
        line += every
    assert outcomes == {0, 1}
    assert left_over > 1, "no kill came between the file and the commit"
    assert verify(path).problems == ()


DAMAGE = {
    "deleted": (Path.unlink, "model-missing"),
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "model-changed"),
    "one bit": (lambda file: file.write_bytes(b"\x01" + file.read_bytes()[1:]), "model-changed"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_the_ledgers_is_refused_and_the_records_are_read(path: Path, damage: str) -> None:
    change, reason = DAMAGE[damage]
    with_rounds(path, 2)
    whole, kept = path.with_name("run.db-model-1").read_bytes(), export(path)
    change(path.with_name("run.db-model-1"))
    with opened(path) as ledger, refused(reason):
        ledger.resume()
    shown = run("ledger", "model", path, path.with_name("model.npz"))
    assert shown.exit_code == 2
    found = verify(path)
    assert found.released == 2
    told = (["model-not-there"], []) if damage == "deleted" else ([], ["model-differs"])
    assert (reasons(found.notes), reasons(found.problems)) == told
    assert {**export(path), "verification": 0} == {**kept, "verification": 0}
    for command, code in (("show", 0), ("verify", 0 if damage == "deleted" else 1)):
        assert run("ledger", command, path).exit_code == code
    assert run("report", path, "-o", path.with_name("report.md")).exit_code == code
    path.with_name("run.db-model-1").write_bytes(whole)  # the remedy
    with opened(path) as ledger:
        assert ledger.resume().model == model_of(1)
        release(ledger, 2)


def test_a_model_and_its_name_are_durable_once_it_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kill shows it, as the system lives on; a power cut would."""
    synced: list[tuple[int, int]] = []

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size if stat.S_ISREG(status.st_mode) else 0))

    monkeypatch.setattr(os, "fsync", fsync)
    model_file.write(path, 0, memoryview(bytes(400)), memoryview(b"state"), LAYOUT)
    assert synced == [(model_file.file_of(path, 0).stat().st_ino, 405), (path.parent.stat().st_ino, 0)]


def test_two_files_take_turns_and_are_for_the_owner_only(path: Path) -> None:
    with_rounds(path, 1)
    file = path.with_name("run.db-model-0")
    file.chmod(0o644)
    with opened(path) as ledger:
        for round in (1, 2):
            release(ledger, round, np.zeros(100 - round, np.float32).tobytes())
            assert ledger.resume().model == np.zeros(100 - round, np.float32).tobytes()
    assert files(path) == ["run.db", "run.db-model-0", "run.db-model-1"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size == 4 * 98 + len(b"the state")  # the longer model of round 0 has left nothing


def test_a_lost_ledger_is_said_before_its_model_file_is_in_the_way(path: Path) -> None:
    with_rounds(path, 2)
    path.unlink()
    with refused("begun-before"):
        opened(path)
    for name in ("noise.key", "noise.key.runs"):  # as where a key was begun anew
        path.with_name(name).unlink()
    NoiseKey.from_file(path.with_name("noise.key"), create=True)
    with refused("model-in-the-way"):
        opened(path)
    path.with_name("run.db-model-0").unlink()
    path.with_name("run.db-model-1").unlink()
    opened(path).close()  # a run that was refused is not remembered as begun


def test_what_is_empty_needs_no_file(path: Path) -> None:
    with opened(path) as ledger:
        ledger.record_released(0, summed(ledger, 0), b"")
        run = ledger.resume()
    assert (run.model, run.state) == (b"", b"")
    assert files(path) == ["run.db"]


@pytest.mark.parametrize("end", ["skip", "seal"])
def test_a_model_that_was_not_released_does_not_outlive_its_attempt(path: Path, end: str) -> None:
    with_rounds(path, 1)
    with opened(path) as ledger:
        attempt = summed(ledger, 1)
        with pytest.raises(TypeError):
            ledger.record_released(1, attempt, model_of(1), "no bytes")  # type: ignore[arg-type]
        path.with_name("run.db-model-1").write_bytes(model_of(1))
        if end == "skip":
            ledger.skip(1, "it could not be released")
    if end == "seal":
        seal(path, None)
    assert files(path) == ["run.db", "run.db-model-0"]
    assert released_model(path)["w"].tobytes() == model_of(0)


def test_it_lies_beside_the_ledger_and_not_beside_a_link_to_it(path: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    path.symlink_to(tmp_path / "disk" / "real.db")
    with_rounds(path, 2)
    assert files(tmp_path / "disk" / "real.db") == ["real.db", "real.db-model-0", "real.db-model-1"]
    assert files(path) == ["run.db"]
    for name in (path, tmp_path / "disk" / "real.db"):
        assert released_model(name)["w"].tobytes() == model_of(1)


def test_a_link_in_its_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    with_rounds(path, 1)
    with opened(path) as ledger:
        attempt = summed(ledger, 1)
        path.with_name("run.db-model-1").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="symbolic links"):
            ledger.record_released(1, attempt, model_of(1))
        assert not (tmp_path / "elsewhere").exists()


def test_whoever_reads_while_the_run_goes_on_gets_a_whole_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files are written anew between what the reader is told and what it finds."""
    with_rounds(path, 1)
    read = model_file.read
    with opened(path) as ledger:
        rounds = iter(range(1, 5))

        def overtaken(*arguments: Any) -> tuple[bytes, bytes]:
            for round in list(rounds)[:3]:
                release(ledger, round)
            return read(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(model_file, "read", overtaken)
            assert released_model(path)["w"].tobytes() == model_of(3)


NAMED = '[["weight", "bias", "half", "norm.running_var"], [[2, 3], [], [2], [2]], ["float32", "float64", "bfloat16", "float32"]]'


def test_the_arrays_come_back_by_name_before_and_after_the_seal(path: Path) -> None:
    flat, target = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, -9, 1], np.float32), path.with_name("model.npz")
    with opened(path) as ledger:
        for round, layout, reason in ((0, "", "no-model"), (1, NAMED, "model-without-layout")):
            with refused(reason):
                released_model(path)
            ledger.record_released(round, summed(ledger, round), (flat + round).tobytes(), b"", layout)
    for end in (lambda: None, lambda: seal(path, None)):
        end()
        done = run("ledger", "model", path, target)
        assert (done.exit_code, "4 trained" in done.stdout) == (0, True), done.stderr
        found = dict(np.load(target))
        np.testing.assert_array_equal(found["weight"], flat[:6].reshape(2, 3) + 1)
        assert (found["bias"].shape, found["bias"].dtype, float(found["bias"])) == ((), np.float64, 7)
        np.testing.assert_array_equal(found["half"], flat[7:9] + 1)
        np.testing.assert_array_equal(found["norm.running_var"], [0, 2])  # noise had made it negative
    assert ".npz" in run("ledger", "model", path, "model.pt").stderr
    assert run("ledger", "model", path, path / "no" / "folder.npz").exit_code == 2
