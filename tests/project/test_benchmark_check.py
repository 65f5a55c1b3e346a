"""The command that compares the speed of now with the committed figures: it can fail, and says where."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BEFORE = {"round": 0.5, "peak, in models": 2.0}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("check_of_speed", BENCHMARKS / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "COMMITTED", tmp_path / "performance.json")
    module.COMMITTED.write_text(json.dumps(BEFORE))
    monkeypatch.setattr(sys, "argv", ["check.py"])
    return module


@pytest.mark.parametrize(
    ("now", "code", "marked"),
    [
        ({"round": 0.6, "peak, in models": 2.4}, 0, []),
        ({"round": 0.1, "peak, in models": 0.1}, 0, []),
        ({"round": 0.601, "peak, in models": 2.0}, 1, ["round"]),
        ({"round": 0.5, "peak, in models": 2.41}, 1, ["peak, in models"]),
        ({"round": math.nan, "peak, in models": 9.0}, 1, ["round", "peak, in models"]),
    ],
)
def test_a_figure_a_fifth_worse_fails(now, code, marked, check, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check, "measure", lambda: now)
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if "WORSE" in line] == marked
    assert len(lines) == 2
    assert json.loads(check.COMMITTED.read_text()) == BEFORE


def test_write_keeps_what_was_measured(check, monkeypatch) -> None:
    monkeypatch.setattr(check, "measure", lambda: {"round": 0.4})
    monkeypatch.setattr(sys, "argv", ["check.py", "--write"])
    check.main()
    assert json.loads(check.COMMITTED.read_text()) == {"round": 0.4}


def test_a_figure_that_is_not_measured_any_more_is_an_error(check, monkeypatch) -> None:
    monkeypatch.setattr(check, "measure", lambda: {"round": 0.4})
    with pytest.raises(ValueError, match="write it again with --write"):
        check.main()


def test_the_committed_figures_are_there() -> None:
    figures = json.loads((BENCHMARKS / "results" / "performance.json").read_text())
    assert figures
    assert all(0 < figure < math.inf for figure in figures.values())
