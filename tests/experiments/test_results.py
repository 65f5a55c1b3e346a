"""Tables of experiments say what their ε means: δ, adjacency, sampling and method."""

from fedcgd_experiments.results import claims


def row(**changes):
    return {"delta": 1e-5, "sampling": "none", "adjacency": "zero out one user", "method": "exact"} | changes


def test_each_delta_and_sampling_is_said_once() -> None:
    rows = [row(), row(), row(sampling="poisson", method="PLD")]
    assert (
        claims(rows) == "ε at δ = 1e-05; adjacency: zero out one user; sampling: none (exact); sampling: poisson (PLD)."
    )
    assert claims([row(), row(delta=1e-6)]).count("ε at δ = ") == 2
    assert claims([]) == ""
