"""docs/deploy.md, run as it is written: TLS, node keys, a silo killed, the server killed, and the record checked."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedcgd.ledger import verify
from fedcgd_simulations.flower_runs import APP, free_port

PAGE = Path(__file__).resolve().parents[1] / "docs" / "deploy.md"
LIMIT = 900.0  # seconds: what the page promises a newcomer


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.timeout(LIMIT + 60)
def test_the_deployment_guide_works_as_written(tmp_path: Path) -> None:
    steps = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "steps.sh"
    script.write_text("set -euo pipefail\n" + "\n".join(steps))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(free_port()),
        "APP": str(APP),
        "ROUNDS": "4",
    }
    with (tmp_path / "output.log").open("wb") as output:
        process = subprocess.Popen(
            ["bash", str(script)], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # SuperLink and nodes too, whatever state the page left them in
    printed = (tmp_path / "output.log").read_text()
    assert code == 0, printed[-4000:]
    assert "finished with 4" in printed
    verification = verify(tmp_path / "run.db")
    assert (verification.released, verification.problems, verification.simulated) == (4, (), False)
    assert not (tmp_path / "noise.key").exists()  # sealed
    log = (tmp_path / "run.log").read_text()
    assert "going on after release" in log
