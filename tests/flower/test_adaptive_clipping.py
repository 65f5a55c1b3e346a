"""The adaptive clip norm: what one user can change, where the norm goes, what it costs; a resumed run is the same run."""

import itertools
import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid, FakeNode, Killed, is_training
from flower_requests import NodeSum, read_train_reply
from flower_runs import hosting, one_user
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM
from plans import make_plan
from shared import record

from fedcgd import DPSGD, LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.ledger import Ledger, export, verify
from fedcgd.ledger.statement import privacy_statement, statement_markdown
from fedcgd.noise.quantisation import Lattice
from fedcgd_flower import (
    AdaptiveClipping,
    CorrelatedNoise,
    one_gradient_step,
    run_loop,
    sequential_training,
)
from fedcgd_flower.clipping import adaptive_round, clipped_update, next_norm
from fedcgd_flower.layout import Layout
from fedcgd_flower.messages import TrainTask, train_message

SIZE = 5
MECHANISM = LambdaCGD(0.8)
KEY = NoiseKey.simulation(3)
COUNTED = AdaptiveClipping(count_noise=1e-4)
"""Settings under which tiny noise still leaves the count a good part of the norm."""


def directions(count: int) -> np.ndarray:
    vectors = np.random.default_rng(0).normal(size=(count, SIZE))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def users_of(norms) -> dict[str, np.ndarray]:
    """A user for each norm, whose update is always the same vector of that norm."""
    return {f"u{i:03d}": n * v for i, (n, v) in enumerate(zip(norms, directions(len(norms)), strict=True))}


def pool(updates: dict[str, np.ndarray]) -> FakeNode:
    def train(model, user, config, context):
        return record(model["w"].numpy() + updates[user])

    return hosting(updates, sequential_training(train))


def plan(*, rounds: int = 8, noise_multiplier: float = 1e-6, clip_norm: float = 1.0, mechanism=MECHANISM) -> Plan:
    return make_plan(mechanism, Participation(rounds=rounds), clip_norm=clip_norm, noise_multiplier=noise_multiplier)


def make(plan: Plan, users: int, clipping: AdaptiveClipping | None = COUNTED, inner=None, **options) -> CorrelatedNoise:
    return CorrelatedNoise(
        inner or FedAvg(),
        plan,
        **{"key": KEY, "cohort_size": users, "patience": 0.0, "adaptive_clipping": clipping} | options,
    )


def told(result, name: str) -> np.ndarray:
    return np.array([metrics[name] for _, metrics in sorted(result.train_metrics_clientapp.items())])


def minus_product(flat, x):
    """A loss whose gradient step is x."""
    return -(flat * x).sum()


def data(update, users, context):
    return (update[None],)


@pytest.mark.parametrize("beta", [0.01, 0.3, 1.0, math.sqrt(2)])
@pytest.mark.parametrize("clip_norm", [1e-6, 0.37, 5.0])
def test_one_user_adds_a_vector_of_norm_at_most_1_whatever_its_update_is(beta: float, clip_norm: float) -> None:
    """The sum with and without the user differs by that vector: on the mod's, the pool's and the gradient's path."""
    generator = np.random.default_rng(1)
    layout = Layout(("w",), ((SIZE,),), ("float32",))
    grid = Lattice.fitting(clip_norm=1.0, size=SIZE + 1, stddev=2.0)
    clipping = adaptive_round(clip_norm, beta / 2, grid)
    task = TrainTask(round=0, attempt=0, users=("u",), layout=layout, node=1, clipping=clipping)
    for size in (0.0, 1e-30, 0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 2.0, 1e9, 1e30):
        update = (clip_norm * size * (v := generator.normal(size=SIZE)) / np.linalg.norm(v)).astype(np.float32)
        within = np.linalg.norm(update.astype(np.float64)) <= clip_norm
        sent = clipped_update(update, np.zeros(SIZE, np.float32), clipping)
        step = one_gradient_step(minus_product, partial(data, torch.from_numpy(update)))
        request = train_message(np.zeros(SIZE, np.float32), ConfigRecord(), task)
        [reply] = FakeGrid({1: hosting(["u"], step)}).send_and_receive([request])
        stepped = read_train_reply(reply, task)
        assert isinstance(stepped, NodeSum)
        for vector in (sent, stepped.update):
            assert grid.step * np.linalg.norm(vector.astype(np.float64)) <= 1
            assert abs(vector[-1]) == clipping.indicator
            if abs(size - 1) > 1e-7:
                assert (vector[-1] > 0) == within
            expected = np.minimum(clip_norm / max(np.linalg.norm(update.astype(np.float64)), 1e-300), 1) * update
            np.testing.assert_allclose(
                grid.from_steps(vector[:-1]) * clipping.update_scale,
                expected,
                atol=2 * grid.step * clipping.update_scale + 1e-6 * clip_norm,
            )


def sums_before_noise(monkeypatch: pytest.MonkeyPatch, strategy: CorrelatedNoise, grid: FakeGrid, releases) -> list:
    """The sums of all rounds, in units; each round is then released as `releases` says, instead of with noise."""
    found: list[np.ndarray] = []

    class Recorded:
        def add(self, total, *, earlier, attempt, record) -> int:
            found.append(total.astype(np.float64) * self.lattice.step)
            record(len(earlier))
            total[:] = releases[len(earlier)]
            return len(earlier)

    def noise(plan, key, stream_id, lattice):
        assert plan.stddev == strategy.plan.noise_multiplier  # of vectors of norm 1, whatever the plan's clip norm is
        recorded = Recorded()
        recorded.lattice = lattice
        return recorded

    with monkeypatch.context() as patched:
        patched.setattr("fedcgd.release.protocol.array_noise", noise)
        strategy.start(grid, record(np.zeros(SIZE)))
    return found


def test_with_and_without_a_user_the_sums_of_all_rounds_differ_by_norm_at_most_1_each(monkeypatch) -> None:
    """Given the same releases, whatever they were, the norms are the same and the difference is the one user's vectors."""
    rounds = 8
    generator = np.random.default_rng(5)
    releases = generator.integers(-(10**5), 10**5, (rounds, SIZE + 1))
    updates = users_of([0.1, 0.9, 1.1, 3.0, 1e6])
    settings = AdaptiveClipping(learning_rate=1.0, count_noise=2e-7)  # β = 1
    largest = []
    for victim in updates:
        fewer = {user: update for user, update in updates.items() if user != victim}
        # The victim's updates become zero, and it answers nothing: the cohort stays as it was planned.
        with_user = sums_before_noise(monkeypatch, make(plan(), 5, settings), FakeGrid({1: pool(updates)}), releases)
        silent = FakeGrid({1: pool(fewer), 2: pool({victim: updates[victim]})})
        silent.nodes[2].tamper = lambda request, reply: None if is_training(request) else reply
        monkeypatch.setattr(run_loop, "receive", lambda grid, messages, _: grid.send_and_receive(messages))
        without = sums_before_noise(monkeypatch, make(plan(), 5, settings), silent, releases)
        differences = np.linalg.norm(np.array(with_user) - without, axis=1)
        assert (differences <= 1).all()
        largest.append(differences.max())
    assert max(largest) > 0.9  # it is the users' vectors that were measured


def test_the_norm_follows_its_formula_and_the_model_its_norm() -> None:
    """Without noise to speak of: ζ' = ζ·exp(−η(b − γ)) for the true share b; the model moves by the mean of clipped updates."""
    updates = users_of([0.3, 0.7, 2.0, 5.0])
    released = []
    result = make(plan(), 4, replace(COUNTED, learning_rate=0.7, quantile=0.6)).start(
        FakeGrid({1: pool(updates)}),
        record(np.zeros(SIZE)),
        evaluate_fn=lambda r, a: released.append(a["w"].numpy().astype(np.float64)),
    )
    norm, model = 1.0, np.zeros(SIZE)
    for release, metrics in sorted(result.train_metrics_clientapp.items()):
        assert metrics["clip-norm"] == pytest.approx(norm, rel=1e-3)
        share = np.mean([np.linalg.norm(u) <= norm for u in updates.values()])
        assert metrics["share-within-norm"] == pytest.approx(share, abs=1e-3)
        model = model + np.mean([u * min(1, norm / np.linalg.norm(u)) for u in updates.values()], axis=0)
        np.testing.assert_allclose(released[release], model, atol=0.01)
        norm *= math.exp(-0.7 * (share - 0.6))


def test_noise_has_the_size_that_the_module_says() -> None:
    """On updates σζ/α, on the share `count_noise`, measured over many coordinates and rounds with DP-SGD's independent noise."""
    size, rounds, users = 400, 40, 50
    settings = AdaptiveClipping(learning_rate=1e-9, count_noise=0.02)

    node = pool({f"u{i}": np.zeros(size) for i in range(users)})
    released = []
    strategy = make(plan(rounds=rounds, noise_multiplier=0.8, clip_norm=3.0, mechanism=DPSGD()), users, settings)
    result = strategy.start(
        FakeGrid({1: node}),
        record(np.zeros(size)),
        evaluate_fn=lambda r, a: released.append(a["w"].numpy().astype(np.float64)),
    )
    beta = 0.8 / (0.02 * users)
    expected = 0.8 * 3.0 / math.sqrt(1 - beta**2 / 4) / users
    assert np.diff(released, axis=0).std() == pytest.approx(expected, rel=0.02)  # 16,000 numbers: ±0.6 %
    shares = told(result, "share-within-norm")
    assert shares.std() == pytest.approx(0.02, rel=0.35)  # 40 numbers: ±11 %
    assert shares.mean() == pytest.approx(1.0, abs=0.01)


def test_the_mod_and_the_pool_give_the_same_run() -> None:
    updates = users_of([0.3, 0.7, 2.0, 5.0])
    singles = [one_user(user, lambda model, update=update: model + update) for user, update in updates.items()]
    grids = [FakeGrid({1: pool(updates)}), FakeGrid(dict(enumerate(singles, 1)))]
    models = [
        make(plan(noise_multiplier=0.2), 4, AdaptiveClipping()).start(grid, record(np.zeros(SIZE))).arrays["w"].numpy()
        for grid in grids
    ]
    np.testing.assert_array_equal(*models)


def test_a_run_that_was_killed_goes_on_with_the_norm_of_its_last_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release is durable, and the process dies with all that it knew."""
    grid, original, calls = (
        FakeGrid({1: pool(users_of([0.3, 0.7, 2.0, 5.0]))}),
        Ledger.record_released,
        itertools.count(),
    )

    def dying(*args, **kwargs):
        original(*args, **kwargs)
        if next(calls) == 3:
            raise Killed

    def run(ledger):
        strategy = make(plan(noise_multiplier=0.2), 4, AdaptiveClipping(), FedAvgM(), ledger=ledger)
        return strategy.start(grid, record(np.zeros(SIZE)))

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "record_released", dying)
        with pytest.raises(Killed):
            run(tmp_path / "run.db")
    resumed, whole = run(tmp_path / "run.db"), run(None)
    np.testing.assert_array_equal(told(resumed, "next-clip-norm")[:-1], told(resumed, "clip-norm")[1:])
    assert verify(tmp_path / "run.db").problems == ()
    np.testing.assert_array_equal(resumed.arrays["w"].numpy(), whole.arrays["w"].numpy())
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp
    assert len(whole.train_metrics_clientapp) == 8


def test_the_record_and_the_log_tell_the_norms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.db"
    with caplog.at_level(logging.INFO, logger="flwr"):
        result = make(plan(rounds=2), 4, ledger=path).start(
            FakeGrid({1: pool(users_of([0.3, 0.7, 2.0, 5.0]))}), record(np.zeros(SIZE))
        )
    releases = export(path)["train_metrics"]
    assert [r["release"] for r in releases] == [1, 2]
    assert [r["clip-norm"] for r in releases] == list(told(result, "clip-norm"))
    assert releases[0]["next-clip-norm"] == releases[1]["clip-norm"] == 1.0
    assert export(path)["run"]["configuration"]["adaptive_clipping"] == COUNTED.to_description()
    assert "within: 0.50)" in caplog.text
    assert "0.5 quantile" in caplog.text
    statement = statement_markdown(privacy_statement(path))
    assert "quantile of" in statement
    assert "is scaled" in statement  # of the vectors, which is true
    assert "**adaptive clipping**" in statement
    with pytest.raises(ValueError, match="its configuration"):
        make(plan(rounds=2), 4, None, ledger=path).start(FakeGrid({}), record(np.zeros(SIZE)))


def test_what_cannot_work_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="count_noise of"):
        make(plan(noise_multiplier=4.8 * math.sqrt(2)), 70, AdaptiveClipping(count_noise=0.05 * math.sqrt(0.5)))
    make(plan(noise_multiplier=4.8), 68, AdaptiveClipping())
    for settings in (
        {"quantile": 0.0},
        {"quantile": 1.0},
        {"learning_rate": 0.0},
        {"learning_rate": 3},
        {"count_noise": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            AdaptiveClipping(**settings)
    with pytest.raises(TypeError, match="AdaptiveClipping"):
        make(plan(), 4, True)


def test_no_round_moves_the_norm_by_more_than_its_learning_rate() -> None:
    settings = AdaptiveClipping(learning_rate=0.2)
    assert next_norm(1.0, 1e6, settings) == pytest.approx(math.exp(-0.2))
    assert next_norm(1.0, -1e6, settings) == pytest.approx(math.exp(0.2))
    assert next_norm(1.0, 0.5, settings) == 1.0
