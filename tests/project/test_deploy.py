"""docs/tutorials/first_run.md and docs/deploy.md, followed as they are written, and the records that they leave."""

import re
from pathlib import Path

import pytest
from documented_deployment import COMMANDS, followed

from fedcgd.ledger import export, verify
from fedcgd_simulations.flower_runs import APP, free_port, local_superlink

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILE = re.compile(r'^```\w+ title="(\S+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LIMIT = 900.0  # seconds: what the page promises a newcomer
ROUNDS = 6


@pytest.mark.slow
@pytest.mark.flower
def test_the_first_run_works_as_written(tmp_path: Path) -> None:
    page, work = (DOCS / "tutorials" / "first_run.md").read_text(), tmp_path / "work"
    for name, text in FILE.findall(page):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    run, *after = COMMANDS.findall(page)
    with local_superlink(tmp_path / "flower") as environment:
        # This test's SuperLink, which ends with it, in place of one that Flower would start and leave.
        command = "\n".join(line for line in run.splitlines() if not line.startswith("export"))
        code, log, _ = followed(command, work, environment, 280)
        assert code == 0, log
        assert len(re.findall(r"\[ROUND \d+/12\]", log)) == 12
        accuracies = [float(value) for value in re.findall(r"accuracy (0\.\d+)", log)]
        assert accuracies[-1] > 0.5 > accuracies[0]  # guessing: 0.1
        found = verify(work / "run.db")
        assert (found.problems, found.released) == ((), 12)
        assert found.delta_note is None  # the first run of many readers: δ far below 1 / users
        assert max(export(work / "run.db")["users_by_participations"]) == 3
        for step in after:
            code, log, _ = followed("set -e\n" + step, work, environment, 280)
            assert code == 0, log
    assert (work / "report.html").stat().st_size > 10_000
    assert not (work / "noise.key").exists()


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.timeout(LIMIT + 60)
def test_the_deployment_guide_works_as_written(tmp_path: Path) -> None:
    steps = COMMANDS.findall((DOCS / "deploy.md").read_text())
    variables = {"PORT": str(free_port()), "APP": str(APP), "ROUNDS": str(ROUNDS)}
    code, printed, left = followed("set -euo pipefail\n" + "\n".join(steps), tmp_path, variables, LIMIT)
    assert code == 0, printed[-4000:]
    assert left == [], "the page's last step left processes behind"
    assert f"finished with {ROUNDS}" in printed
    for path in (tmp_path / "run.db", tmp_path / "server.key", tmp_path / "result.json"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert "going on" in (tmp_path / "run.log").read_text()
    verification = verify(tmp_path / "run.db")
    assert (verification.released, verification.problems, verification.run.simulated) == (ROUNDS, (), False)
    states = [attempt["state"] for attempt in export(tmp_path / "run.db")["attempts"]]
    assert "abandoned" in states, "the server was not killed in the middle of a round"
    assert not (tmp_path / "noise.key").exists()  # sealed
    assert list(tmp_path.glob("state.db*")) == []  # it holds what the silos sent, without noise

    refused, *lives = (tmp_path / "silo2.log").read_text().split("SuperNode ID: ")
    assert "train message" not in refused
    assert len(lives) == 2
    assert lives[0].split()[0] == lives[1].split()[0], "the silo came back as another node"
    assert all("Sending: train message" in life for life in lives), "the silo did not answer after it came back"
