"""A SuperLink of a script ends with it, and so does all that it has started."""

import os
from pathlib import Path

import pytest

from fedcgd_simulations import flower_runs

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="what left its session is found on Linux"
)


@pytest.fixture
def superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of Flower's: starts a process in a session of its own, and one more when it is told to end."""
    program = tmp_path / "bin" / "flower-superlink"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        "left() { setsid sh -c 'echo $$ >> pids; exec sleep 600' & }\n"
        "written() { until [ -f pids ] && [ $(wc -l < pids) -ge $1 ]; do sleep 0.02; done; }\n"
        "rm -f pids; left; written 1\n"
        "trap 'left; written 2; exit 0' TERM\n"
        "touch started\n"
        "while :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setattr(flower_runs, "flower_environment", lambda _: environment)
    monkeypatch.setattr(flower_runs, "_healthy", lambda _: (tmp_path / "home" / "started").exists())
    return tmp_path / "home"


def running(home: Path) -> list[str]:
    """The processes that were left, and have not ended."""
    return [pid for pid in (home / "pids").read_text().split() if alive(pid)]


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith((b"sleep", b"sh"))
    except OSError:
        return False


def test_what_has_left_its_session_ends_too_also_by_an_error_or_where_it_does_not_come_up(
    superlink: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt) as left, flower_runs.local_superlink(superlink):
        raise KeyboardInterrupt(*running(superlink))
    assert len(left.value.args) == 1
    assert len((superlink / "pids").read_text().split()) == 2
    assert running(superlink) == []
    monkeypatch.setattr(flower_runs, "_healthy", lambda _: False)
    monkeypatch.setattr(flower_runs, "_READY_TIMEOUT", 1.0)
    with pytest.raises(RuntimeError, match="not start"), flower_runs.local_superlink(superlink):
        pass
    assert (superlink / "started").exists()
    assert running(superlink) == []
