"""Tables of experiments say what their ε means: δ, adjacency, sampling and method."""

from pathlib import Path

from click.testing import CliRunner

from fedcgd_experiments import curvature
from fedcgd_experiments.point import TEST_SEEDS
from fedcgd_experiments.results import Results, claims

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def row(**changes):
    return {"delta": 1e-5, "sampling": "none", "adjacency": "zero out one user", "method": "exact"} | changes


def test_each_delta_and_sampling_is_said_once() -> None:
    rows = [row(), row(), row(sampling="poisson", method="PLD")]
    assert (
        claims(rows) == "ε at δ = 1e-05; adjacency: zero out one user; sampling: none (exact); sampling: poisson (PLD)."
    )
    assert claims([row(), row(delta=1e-6)]).count("ε at δ = ") == 2
    assert claims([]) == ""


def test_a_comparison_says_what_its_epsilon_means(tmp_path) -> None:
    few = [r for r in Results(RESULTS / "curvature" / "fashion-mnist-6000.jsonl").rows() if r["epsilon"] == 8]
    # Three of the ten test seeds: the exact permutation test of ten against ten has 184,756 ways.
    few = [r for r in few if r["seed"] % TEST_SEEDS < 3]
    path = tmp_path / "results.jsonl"
    Results(path).append(few)
    done = CliRunner().invoke(curvature.app, ["compare", str(path)], env={"COLUMNS": "400"}, catch_exceptions=False)
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    for part in ("ε at δ = 1e-05", "adjacency: zero out one user", "sampling: none (exact Gaussian mechanism)"):
        assert part in said
