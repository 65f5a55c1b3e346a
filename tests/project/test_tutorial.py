"""docs/tutorials/first_run.md, followed as it is written: the files that it shows, its commands, and the record they leave."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from fedcgd.ledger import export, verify
from fedcgd_simulations.flower_runs import local_superlink

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "first_run.md"
FILE = re.compile(r'^```\w+ title="(\S+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return COMMANDS.findall(PAGE.read_text())


def test_the_tutorial_shows_files_and_commands() -> None:
    assert [name for name, _ in FILE.findall(PAGE.read_text())] == [
        "digits/pyproject.toml",
        "digits/client.py",
        "digits/server.py",
    ]
    assert [text.split("\n")[-2].split()[:2] for text in commands()][1:] == [["fedcgd", "ledger"], ["fedcgd", "report"]]


@pytest.mark.slow
@pytest.mark.flower
def test_the_first_run_works_as_written(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name, text in FILE.findall(PAGE.read_text()):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    run, *after = commands()
    with local_superlink(tmp_path / "flower") as environment:
        # This test's SuperLink, which ends with it, in place of one that Flower would start and leave.
        command = "\n".join(line for line in run.splitlines() if not line.startswith("export"))
        log = followed(command, work, environment)
        assert len(re.findall(r"\[ROUND \d+/12\]", log)) == 12
        accuracies = [float(value) for value in re.findall(r"accuracy (0\.\d+)", log)]
        assert accuracies[-1] > 0.5 > accuracies[0]  # guessing: 0.1
        assert verify(work / "run.db").problems == ()
        assert verify(work / "run.db").released == 12
        assert verify(work / "run.db").delta_note is None  # the first run of many readers: δ far below 1 / users
        assert max(export(work / "run.db")["users_by_participations"]) == 3
        for step in after:
            followed("set -e\n" + step, work, environment)
    assert (work / "report.html").stat().st_size > 10_000
    assert not (work / "noise.key").exists()


def followed(script: str, work: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=work,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
