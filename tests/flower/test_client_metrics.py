"""Metrics of clients that are forwarded without noise: part of what a run is, and of every statement about it."""

import json
from pathlib import Path

import command_line
import numpy as np
import pytest
from fake_grid import FakeGrid
from flower_runs import node
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from shared import record

from fedcgd import DPSGD, NoiseKey, Participation, Plan
from fedcgd.ledger import Ledger, verify
from fedcgd.ledger.statement import privacy_statement
from fedcgd_flower import CorrelatedNoise

PLAN = Plan.calibrated(DPSGD(), Participation(rounds=4, min_separation=1), clip_norm=0.5, epsilon=8, delta=1e-5)
USERS = [f"u{i}" for i in range(4)]


def run(path: Path, key: NoiseKey, rounds: int, **options) -> CorrelatedNoise:
    client = node(USERS)

    @client.app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"acc": 0.5, "num-examples": 3})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    strategy = CorrelatedNoise(
        FedAvg(min_available_nodes=1, min_train_nodes=1, min_evaluate_nodes=1),
        PLAN,
        key=key,
        ledger=path,
        cohort_size=4,
        patience=0.0,
        trusted_nodes=True,
        **options,
    )
    strategy.start(FakeGrid({1: client}), record(np.zeros(6)), num_rounds=rounds)
    return strategy


def command(*words: object) -> str:
    done = command_line.run(*words)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_resume_does_not_switch_it_on_or_off(tmp_path: Path) -> None:
    path, key = tmp_path / "run.db", NoiseKey.generate()
    run(path, key, 1)
    with pytest.raises(ValueError, match="forward_client_metrics: nothing"):
        run(path, key, 1, forward_client_metrics=True)
    assert run(path, key, 1).releases == 2
    other = tmp_path / "other.db"
    run(other, key, 1, forward_client_metrics=True)
    with pytest.raises(ValueError, match="forward_client_metrics: True"):
        run(other, key, 1)


def test_every_statement_says_so(tmp_path: Path) -> None:
    plain, told, key = tmp_path / "plain.db", tmp_path / "told.db", NoiseKey.generate()
    run(plain, key, 2)
    run(told, key, 2, forward_client_metrics=True)
    for path, said in ((plain, False), (told, True)):
        assert verify(path).run.forwards_client_metrics is said
        statement = privacy_statement(path)
        assert statement["private"] is not said
        assert statement["forwards_client_metrics"] is said
        texts = [command("ledger", "verify", path), command("ledger", "show", path), statement["statement"]]
        for name in ("report.html", "statement.md"):
            command("report", path, "-o", tmp_path / name)
            texts.append(" ".join((tmp_path / name).read_text().split()))
        for text in texts:
            assert ("forwarded as" in text and "covers them" in text) is said
        values = json.loads(command("ledger", "verify", path, "--json"))
        assert values["forwards_client_metrics"] is said


def test_ledgers_without_the_setting_are_found_by_what_is_on_record(tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    path, key = tmp_path / "run.db", NoiseKey.generate()
    with Ledger.open(path, plan=PLAN, configuration={}, key=key) as ledger:
        ledger.record_metrics("evaluate", 1, {"acc": 0.5})
        assert not verify(path).run.forwards_client_metrics
        ledger.record_metrics("evaluate on clients", 1, {"acc": 0.5})
    assert verify(path).run.forwards_client_metrics
