"""Invariant: a run that is stopped between rounds and goes on is, bit for bit, the run that was not stopped; or it is refused."""

import ast
import logging
from pathlib import Path

import numpy as np
import pytest
from flower_runs import SIZE, asked_users, make, two_nodes
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi
from shared import record

from fedcgd.ledger import Ledger
from fedcgd_flower import RunResult

ROUNDS = 6


class _WithVelocity(FedAvg):
    """Keeps its state in every shape that a strategy of one's own might."""

    def __init__(self) -> None:
        super().__init__(min_train_nodes=4)
        self.velocity: np.ndarray | None = None
        self.nested = {"norms": [], "pairs": {}, "last": (0, None)}
        self.step = 0
        self.scale = np.float32(1.0)
        self.record = ArrayRecord()
        self.seen = MetricRecord({"rounds": 0})

    def aggregate_train(self, server_round: int, replies: list[Message]):
        arrays, metrics = super().aggregate_train(server_round, replies)
        mean = arrays["w"].numpy()
        self.velocity = mean if self.velocity is None else np.float32(0.9) * self.velocity + mean
        self.step += 1
        self.scale = np.float32(self.scale * np.float32(0.97))
        self.nested["norms"].append(float(np.linalg.norm(mean)))
        self.nested["pairs"][self.step] = (mean[:2].copy(), [self.step])
        self.nested["last"] = (self.step, self.record.copy())
        self.record = arrays
        self.seen["rounds"] += 1
        [kept, [step]] = self.nested["pairs"][max(1, self.step - 1)]
        moved = mean + np.float32(0.1) * self.velocity * self.scale + np.float32(step + self.seen["rounds"])
        moved[:2] += kept + np.float32(sum(self.nested["norms"]))
        return record(moved), metrics


STRATEGIES = {
    "FedAvg": lambda: FedAvg(min_train_nodes=4),
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "FedAvgM": lambda: FedAvgM(server_learning_rate=0.5, server_momentum=0.9),
    "FedAdam": lambda: FedAdam(eta=0.05),
    "FedYogi": lambda: FedYogi(eta=0.05),
    "FedAdagrad": lambda: FedAdagrad(eta=0.05),
    "of one's own": _WithVelocity,
}


def run(inner, path: Path, **options) -> tuple[RunResult, list[list[str]]]:
    grid = two_nodes()
    return make(inner, ledger=path).start(grid, record(np.zeros(SIZE)), **options), asked_users(grid)


@pytest.mark.parametrize("name", STRATEGIES)
def test_resume_is_no_interruption(name: str, tmp_path: Path) -> None:
    whole, _ = run(STRATEGIES[name](), tmp_path / "whole.db")
    for _ in range(ROUNDS):
        part, _ = run(STRATEGIES[name](), tmp_path / "parts.db", num_rounds=1)
    np.testing.assert_array_equal(part.arrays["w"].numpy(), whole.arrays["w"].numpy())
    assert (part.released, part.complete, part.stopped) == (ROUNDS, True, "")


class _WithGenerator(FedAvg):
    """Draws from what has no form in a ledger, and says so by its state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return record(arrays["w"].numpy() + self.generator.normal(size=SIZE)), metrics


class _Stated(_WithGenerator):
    def state(self) -> dict:
        return {"generator": repr(self.generator.bit_generator.state)}

    def restore(self, state: dict) -> None:
        self.generator.bit_generator.state = ast.literal_eval(state["generator"])


class _NotSavable(_Stated):
    def state(self) -> dict:
        return {"generator": self.generator}


def test_a_strategy_that_says_its_state_goes_on_with_it(tmp_path: Path) -> None:
    whole, _ = run(_Stated(), tmp_path / "whole.db")
    for _ in range(ROUNDS):
        part, _ = run(_Stated(), tmp_path / "parts.db", num_rounds=1)
    np.testing.assert_array_equal(part.arrays["w"].numpy(), whole.arrays["w"].numpy())
    with pytest.raises(ValueError, match="_NotSavable returns"):
        run(_NotSavable(), tmp_path / "refused.db")


def test_a_round_that_fails_leaves_no_trace_in_a_strategy_that_says_its_state(tmp_path: Path, monkeypatch) -> None:
    inner = _Stated()
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "record_released", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            run(inner, tmp_path / "run.db")
    assert inner.state() == _Stated().state()


def test_what_cannot_be_saved_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it holds by reference is its author's affair: a line names it, at the start."""
    with caplog.at_level(logging.INFO):
        run(_WithGenerator(), tmp_path / "run.db")
    assert caplog.text.count("of _WithGenerator") == 1
    assert "and restore(state)" in caplog.text


def test_another_model_of_the_same_size_is_another_run(tmp_path: Path) -> None:
    """It was taken up as if it were the recorded one, and every number went to another place."""
    run(FedAvg(), tmp_path / "run.db", num_rounds=2)
    renamed = ArrayRecord({f"not-{name}": array for name, array in record(np.zeros(SIZE)).items()})
    with pytest.raises(ValueError, match="same model"):
        make(FedAvg(), ledger=tmp_path / "run.db").start(two_nodes(), renamed)
