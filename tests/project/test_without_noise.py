"""σ = 0 is for debugging: everything but the noise is as in the real run, and no record of it can be taken for a private one."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from fake_grid import FakeGrid
from flower_runs import node
from flwr.serverapp.strategy import FedAvg
from ledgers import KEY, refused, release
from plans import make_plan
from shared import record

from fedcgd import DPSGD, LambdaCGD, Ledger, Participation, Plan, accounting
from fedcgd.accounting.guarantee import ADJACENCY, NO_NOISE
from fedcgd.ledger import JointBudget, export, joint, verify
from fedcgd.ledger.statement import privacy_statement
from fedcgd_flower import AdaptiveClipping, CorrelatedNoise, PrivateEvaluation

NOISELESS = make_plan(LambdaCGD(0.8), Participation(rounds=4, min_separation=2), clip_norm=0.5, noise_multiplier=0)
NOISY = replace(NOISELESS, noise_multiplier=2.0)
SIZE = 6


def start(plan: Plan, ledger: Path | None = None, **options):
    """A run of four users at one node, whose updates are 1 in every coordinate, and so longer than the clip norm."""
    strategy = CorrelatedNoise(
        FedAvg(), plan, key=KEY, cohort_size=2, patience=0.0, ledger=ledger, trusted_nodes=True, **options
    )
    return strategy.start(FakeGrid({1: node("abcd")}), record(np.zeros(SIZE)), **({"num_rounds": 2} if ledger else {}))


def test_the_plan_promises_nothing_in_every_form() -> None:
    for plan in (NOISELESS, Plan.from_description(json.loads(json.dumps(NOISELESS.to_description())))):
        assert plan.noiseless
        for guarantee in (plan.guarantee(), plan.guarantee(released=2), plan.quick_guarantee(released=3)):
            assert guarantee.epsilon == math.inf
            for part in (NO_NOISE, "∞", "1e-05", ADJACENCY, "none"):
                assert part in str(guarantee)
    assert not NOISY.noiseless
    assert NOISY.guarantee().epsilon < math.inf


def test_a_federated_run_clips_adds_nothing_and_says_so_in_every_round(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flwr"):
        result = start(NOISELESS)
    step = np.floor(0.5 / np.sqrt(SIZE) * 2**13) / 2**13  # clipped to the norm 0.5, on the grid
    np.testing.assert_allclose(result.arrays["w"].numpy(), np.full(SIZE, 4 * step), atol=1e-6)
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert any(NO_NOISE in text for text in warned)
    rounds = [one.getMessage() for one in caplog.records if "[ROUND" in one.getMessage()]
    assert len(rounds) == 4
    assert all("NO NOISE" in text and "ε ≤" not in text for text in rounds)
    assert {metrics["epsilon"] for metrics in result.train_metrics_clientapp.values()} == {math.inf}


def test_every_record_of_the_run_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    start(NOISELESS, path)
    assert verify(path).noiseless
    assert verify(path).problems == ()
    assert export(path)["verification"]["noiseless"]
    statement = privacy_statement(path)
    assert (statement["private"], statement["noiseless"]) == (False, True)

    def printed(*words: str) -> str:
        result = run(*words)
        assert result.exit_code == 0, result.output
        return result.stdout

    for words in (["ledger", "show"], ["ledger", "verify"]):
        assert "NO NOISE" in printed(*words, str(path))
        assert json.loads(printed(*words, str(path), "--json"))
    assert "∞" in printed("ledger", "compose", str(path))
    assert json.loads(printed("ledger", "compose", str(path), "--json"))["groups"][0]["planned"]["epsilon"] == "inf"
    assert json.loads(printed("ledger", "show", str(path), "--json"))["verification"]["whole"]["epsilon"] == "inf"
    for name in ("report.html", "statement.md", "statement.json"):
        printed("report", str(path), "-o", str(tmp_path / name))
        text = (tmp_path / name).read_text()
        assert "NO NOISE" in text
        assert "% of cases" not in text
        assert "Verified" not in text
    assert json.loads((tmp_path / "statement.json").read_text())["whole_run"]["epsilon"] == "inf"


def test_together_with_other_runs_it_costs_everything(tmp_path: Path) -> None:
    path = tmp_path / "debug.db"
    with Ledger.open(path, plan=NOISELESS, configuration={}, key=KEY) as ledger:
        for t in range(4):
            release(ledger, t, ["ann" if t % 2 else "bob"])
    assert joint([path]).worst.planned.epsilon == math.inf
    budget = JointBudget(epsilon=100.0, delta=1e-5, after=[path])
    assert budget.admission(NOISY, key=KEY).refused == {"ann", "bob"}
    with refused("nobody-may-take-part"):
        JointBudget(epsilon=100.0, delta=1e-5, after=[]).admission(NOISELESS, key=KEY)


def test_what_needs_noise_refuses_to_go_without() -> None:
    for question in (accounting.compute_epsilon, accounting.compute_delta):
        rest = {"delta": 1e-5} if question is accounting.compute_epsilon else {"epsilon": 1.0}
        with pytest.raises(ValueError, match="noise_multiplier"):
            question(DPSGD(), NOISY.participation, noise_multiplier=0.0, **rest)
    with pytest.raises(ValueError, match="noise"):
        PrivateEvaluation(plan=replace(NOISELESS, clip_norm=1.0), bounds={"accuracy": 1.0})
    with pytest.raises(ValueError, match="adaptive"):
        start(NOISELESS, adaptive_clipping=AdaptiveClipping())
    words = ["account", "--mechanism", "dp-sgd", "--rounds", "4", "--delta", "1e-5", "--noise-multiplier", "0"]
    assert run(*words).exit_code == 2
