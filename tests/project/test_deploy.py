"""docs/deploy.md, run as it is written: TLS, node keys, a silo killed, the server killed, and the record checked."""

import re
from pathlib import Path

import pytest
from documented_deployment import followed

from fedcgd.ledger import export, verify
from fedcgd_simulations.flower_runs import APP, free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
LIMIT = 900.0  # seconds: what the page promises a newcomer
ROUNDS = 6


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.timeout(LIMIT + 60)
def test_the_deployment_guide_works_as_written(tmp_path: Path) -> None:
    steps = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
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
