"""Tables of experiments say what their ε means: δ, adjacency, sampling and method."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcgd_experiments import curvature
from fedcgd_experiments.__main__ import app
from fedcgd_experiments.claims import claims
from fedcgd_experiments.experiment import TEST_SEEDS

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def calibration(**setup):
    return {"setup": {"delta": 1e-5, "sampling": "none"} | setup, "adjacency": "one user", "method": "exact"}


def test_each_delta_and_sampling_is_said_once() -> None:
    records = [calibration(), calibration(), calibration(sampling="poisson") | {"method": "PLD"}]
    assert claims(records) == "ε at δ = 1e-05; adjacency: one user; sampling: none (exact); sampling: poisson (PLD)."
    assert claims([calibration(), calibration(delta=1e-6)]).count("ε at δ = ") == 2
    assert claims([]) == ""


@pytest.mark.parametrize(
    ("command", "file"), [(app, "tweets.jsonl"), (curvature.app, "curvature/fashion-mnist-6000.jsonl")]
)
def test_a_comparison_says_what_its_epsilon_means(command, file, tmp_path) -> None:
    lines = (RESULTS / file).read_text().splitlines()
    few = [json.loads(line) for line in lines]
    few = [r for r in few if (r.get("setup") or r["point"]["setup"])["epsilon"] == 8]
    # Three of the ten test seeds: the exact permutation test of ten against ten has 184,756 ways.
    few = [r for r in few if "point" not in r or r["point"]["seed"] % TEST_SEEDS < 3]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in few))
    done = CliRunner().invoke(command, ["compare", str(path)], env={"COLUMNS": "400"}, catch_exceptions=False)
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    for part in ("ε at δ = 1e-05", "adjacency: zero out one user", "sampling: none (exact Gaussian mechanism)"):
        assert part in said


def test_records_of_earlier_versions_say_what_was_proven_for_them() -> None:
    former = {"setup": {"delta": 1e-5, "sampling": "none"}, "adjacency": "add or remove one user", "method": "exact"}
    assert claims([former]) == "ε at δ = 1e-05; adjacency: zero out one user; sampling: none (exact)."
