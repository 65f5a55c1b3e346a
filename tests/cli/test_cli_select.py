"""`fedcgd select-lambda`: what it prints, draws and refuses."""

import json
from pathlib import Path

import pytest
from command_line import run

from fedcgd import Participation, select_lambda

RUN = ["--rounds", "100", "--separation", "20", "--epsilon", "2", "--delta", "1e-5"]


def invoke(*words: str):
    return run("select-lambda", *RUN, *words)


@pytest.mark.parametrize("objective", ["rmse", "max-se", "amplified-rmse", "practical", "excess"])
def test_json_is_the_library_s_answer(objective: str) -> None:
    result = invoke("--objective", objective, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    expected = select_lambda(Participation(rounds=100, min_separation=20), objective=objective, epsilon=2, delta=1e-5)
    assert (found["lam"], found["objective"], found["value"]) == (expected.lam, objective, expected.value)
    assert found["lams"] == list(expected.lams)
    assert found["values"] == list(expected.values)


def test_table_and_plot(tmp_path: Path) -> None:
    result = invoke("--objective", "rmse", "--plot", str(tmp_path / "curve.png"))
    assert result.exit_code == 0
    assert "λ by rmse, 100 rounds, sampling none" in result.stdout
    assert "0.842" in result.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_normalised_columns_have_a_minimum_of_their_own() -> None:
    plain, normalised = (json.loads(invoke("--json", "--objective", "rmse", *x).stdout) for x in ([], ["--normalized"]))
    assert plain["lam"] != normalised["lam"]


def test_bad_input_is_one_line_and_exit_code_2() -> None:
    result = invoke("--epsilon", "-1")
    assert result.exit_code == 2
    assert "epsilon must be" in result.stderr
    assert "Traceback" not in result.output
    assert invoke("--objective", "loss").exit_code == 2
