"""A run that dies at any step and starts again with its ledger: nothing lost, no noise twice, the same ε at the end."""

import collections
import io
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid, Killed
from flower_runs import SIZE, STEP, UPDATE, make, node, on_the_grid, two_nodes
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM
from shared import record

from fedcgd import NoiseKey, Participation
from fedcgd.ledger import Ledger, verify
from fedcgd.mechanisms import BSR, LambdaCGD, inverse_matrix
from fedcgd.noise import NoiseStream
from fedcgd_flower import IncompleteRunError, noise_provider, run_loop
from fedcgd_flower import round as training_rounds
from fedcgd_flower.inner import restore_state, saved_state

ROUNDS = 6


def dying(after: int, function):
    """`function`, but its call number `after` (from 0) kills the process before it does anything."""
    calls = collections.Counter()

    def run(*args, **kwargs):
        calls["n"] += 1
        if calls["n"] == after + 1:
            raise Killed
        return function(*args, **kwargs)

    return run


POINTS = {
    "receive": run_loop,
    "inner_step": training_rounds,
    "train_message": training_rounds,
    "sum_of_replies": noise_provider,
    "plan_round": Ledger,
    "record_aggregated": Ledger,
    "record_released": Ledger,
    "history": Ledger,
    "record_metrics": Ledger,
}


def final_model(path: Path | None, inner=None, **options) -> np.ndarray:
    strategy = make(inner or FedAvg(), ledger=path, **options)
    evaluated = strategy.start(
        two_nodes(), record(np.zeros(SIZE)), evaluate_fn=lambda release, _: MetricRecord({"release": release})
    )
    return evaluated.arrays["w"].numpy()


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_and_started_again(
    point: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.db"
    owner = POINTS[point]
    with monkeypatch.context() as patched:
        patched.setattr(owner, point, dying(after, getattr(owner, point)))
        with pytest.raises(Killed):
            final_model(path, FedAdam(eta=0.05))
    released: list[tuple[int, np.ndarray]] = []
    with make(FedAdam(eta=0.05), ledger=path) as strategy:
        before = strategy.releases
        strategy.start(
            two_nodes(), record(np.zeros(SIZE)), evaluate_fn=lambda r, a: released.append((r, a["w"].numpy().copy()))
        )
    assert strategy.releases == ROUNDS
    assert [r for r, _ in released] == list(range(before, ROUNDS + 1))
    checked = verify(path)
    assert checked.problems == ()
    assert checked.released == ROUNDS
    assert checked.guarantee is not None
    assert checked.guarantee.epsilon == pytest.approx(make().plan.guarantee().epsilon)


@pytest.mark.parametrize("mechanism", [LambdaCGD(0.8), BSR(bands=3)], ids=["replayed", "from buffers"])
def test_a_resumed_run_makes_the_noise_of_its_record_again(mechanism, tmp_path: Path) -> None:
    """The nonces of a secret key are random: in another order, what later rounds take off is not what earlier ones added."""
    path, key = tmp_path / "run.db", NoiseKey.generate()
    for _ in range(2):
        strategy = make(ledger=path, key=key, mechanism=mechanism)
        result = strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=3)
    assert result.complete
    with closing(sqlite3.connect(path)) as connection:
        (stream_id,) = connection.execute("SELECT stream_id FROM run").fetchone()
        rows = connection.execute(
            "SELECT round, nonce FROM attempts WHERE state = 'released' ORDER BY round"
        ).fetchall()
    terms = [(round, int.from_bytes(nonce, "big")) for round, nonce in rows]
    assert len({nonce for _, nonce in terms}) == ROUNDS
    stream = NoiseStream(key.noise_of(stream_id))
    noise = np.stack([stream.normal(*term, 0, SIZE) for term in terms]).astype(np.float64)
    added = on_the_grid(inverse_matrix(mechanism, ROUNDS) @ noise, terms, key.noise_of(stream_id))
    # The key is another each time: where it puts a number in the middle of two points of the grid, either is right.
    np.testing.assert_allclose(result.arrays["w"].numpy(), ROUNDS * UPDATE + added.sum(axis=0) / 4, atol=1.5 * STEP / 4)


@pytest.mark.parametrize(
    "change",
    [
        {"mechanism": LambdaCGD(0.7)},
        {"noise_multiplier": 1.0},
        {"clip_norm": 1.0},
        {"cohort_size": 3},
        {"identity": "authenticated"},
        {"participation": Participation(rounds=9, min_separation=3)},
        {"key": NoiseKey.simulation(8)},
    ],
)
def test_another_run_is_not_mixed_into_a_ledger(change, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    make(ledger=path).start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)
    with pytest.raises(ValueError, match="another run"):
        make(ledger=path, **change).start(two_nodes(), record(np.zeros(SIZE)))


def test_a_user_that_comes_back_under_a_new_node_id_keeps_its_participations(tmp_path: Path) -> None:
    users = [f"u{i}" for i in range(4)]
    options = {"participation": Participation(rounds=4, min_separation=2, max_participations=1)}
    options |= {"cohort_size": 4, "expected_users": 4}
    grid = FakeGrid({1: node(users)})
    strategy = make(ledger=tmp_path / "run.db", **options)
    strategy.start(grid, record(np.zeros(SIZE)), num_rounds=1)
    grid.nodes = {77: grid.nodes[1]}
    with pytest.raises(IncompleteRunError, match="time, which"):
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=3)
    assert strategy.releases == 1  # everybody has taken part once, which is all they may


def averaged() -> FedAvg:
    """The inner strategy of the guide, which begins after two rounds here."""
    page = Path(__file__).resolve().parents[2] / "docs" / "guides" / "planning.md"
    names: dict = {}
    exec(re.search(r"```python\n(from flwr.*?class Averaged.*?)```", page.read_text(), re.DOTALL)[1], names)
    names["Averaged"].after = 2
    return names["Averaged"](server_learning_rate=0.5, server_momentum=0.9)


def test_the_average_of_the_guide_is_that_of_released_models_also_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, models = tmp_path / "run.db", {}
    with monkeypatch.context() as patched:  # round 5 is averaged, and not released
        patched.setattr(Ledger, "record_released", dying(4, Ledger.record_released))
        with pytest.raises(Killed):
            make(averaged(), ledger=path).start(
                two_nodes(), record(np.zeros(SIZE)), evaluate_fn=lambda r, a: models.update({r: a["w"].numpy().copy()})
            )
    assert sorted(models) == [0, 1, 2, 3, 4]
    strategy = make(averaged(), ledger=path)
    strategy.start(
        two_nodes(), record(np.zeros(SIZE)), evaluate_fn=lambda r, a: models.update({r: a["w"].numpy().copy()})
    )
    total = sum(models[release] for release in (3, 4, 5, 6))
    assert strategy.inner.count == 4
    np.testing.assert_allclose(strategy.inner.total["w"], total, rtol=1e-6, atol=1e-7)


def test_what_is_set_on_the_inner_strategy_before_the_start_counts() -> None:
    """`start` put back what it was when it was wrapped."""
    models = []
    for first in (0.5, 0.25):
        strategy = make(FedAvgM(server_learning_rate=first))
        strategy.inner.server_learning_rate = 0.25
        models.append(strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1).arrays["w"].numpy())
    np.testing.assert_array_equal(*models)


class Counts(FedAvg):
    """Keeps a number and a text of its own."""

    def __init__(self) -> None:
        super().__init__(min_train_nodes=4)
        self.seen, self.folder = 0, "first"

    def aggregate_train(self, server_round, replies):
        self.seen += 1
        return super().aggregate_train(server_round, replies)


def test_what_is_set_after_a_release_is_put_back_and_a_text_is_the_process_own(tmp_path: Path) -> None:
    strategy = make(Counts(), ledger=tmp_path / "run.db")
    strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=2)
    strategy.inner.folder = "second"
    strategy.inner.seen, strategy.inner.fresh = 7, 1
    strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)
    assert (strategy.inner.seen, strategy.inner.folder) == (3, "second")
    assert not hasattr(strategy.inner, "fresh")


def test_settings_of_the_inner_strategy_are_those_that_the_ledger_was_opened_with(tmp_path: Path) -> None:
    inner = FedAvgM(server_learning_rate=1.0)
    with make(inner, ledger=tmp_path / "run.db") as strategy:
        strategy.inner.server_learning_rate = 0.25
        with pytest.raises(ValueError, match="server_learning_rate'"):
            strategy.start(two_nodes(), record(np.zeros(SIZE)))


def test_an_inner_state_of_the_earlier_format_is_read() -> None:
    """It had the texts of a strategy too."""
    begun, resumed, file = FedAvgM(server_momentum=0.9), FedAvgM(server_momentum=0.9), io.BytesIO()
    begun.momentum_vector = [np.arange(3.0)]
    with np.load(io.BytesIO(saved_state(begun, None))) as saved:
        tree = json.loads(saved["tree"].tobytes()) | {"texts at the start": {"a": "b", "c": "d"}}
        text = np.frombuffer(json.dumps(tree).encode(), np.uint8)
        np.savez(file, **{name: saved[name] for name in saved.files if name != "tree"}, tree=text)
    assert restore_state(resumed, file.getvalue()) is None
    np.testing.assert_array_equal(resumed.momentum_vector, begun.momentum_vector)
