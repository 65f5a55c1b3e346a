"""The table of simulated users next to pfl: ratios from runs in turns, and an honest end where pfl is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import simulation

    return simulation


def run(speed: float, work: float) -> dict[str, float]:
    return {"users/s": speed, "processor seconds a user": work}


def test_ratios_are_of_neighbours_and_by_the_clock_of_the_better_number_of_threads(simulation) -> None:
    found = simulation.compare(
        [run(300.0, 0.005), run(400.0, 0.004)],
        [[run(100.0, 0.010), run(60.0, 0.050)], [run(90.0, 0.012), run(200.0, 0.012)]],
    )
    assert found["times pfl by clock"] == [2.5, 2.0, 3.0]
    assert found["times pfl by processor time"] == [2.5, 2.0, 3.0]
    assert found["pfl users/s"] == 150.0
    assert found["users/s on 2 cores by processor time"] == pytest.approx(2 / 0.0045)


def test_without_pfl_there_are_no_ratios_and_the_command_fails(simulation, monkeypatch, capsys) -> None:
    without_packages = [sys.executable, "-I", "-S", str(simulation.PEER)]
    assert subprocess.run(without_packages, check=False).returncode == simulation.NOT_THERE
    monkeypatch.setattr(simulation, "measure", lambda *_: run(300.0, 0.005))
    missing = subprocess.CompletedProcess([], simulation.NOT_THERE, stdout="")
    monkeypatch.setattr(simulation.subprocess, "run", lambda *_, **__: missing)
    monkeypatch.setattr(sys, "argv", ["simulation.py", "--case", "128", "1"])
    with pytest.raises(SystemExit, match="pfl was not measured"):
        simulation.main()
    assert "times pfl" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["simulation.py", "--case", "128", "1", "--pfl", "none"])
    simulation.main()
    assert "users/s 300" in capsys.readouterr().out
