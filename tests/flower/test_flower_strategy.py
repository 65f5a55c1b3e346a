"""CorrelatedNoise against its definition: who takes part, what is summed, which noise is added, what is told."""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_grid import FakeGrid, is_training
from flower_runs import KEY, PLAN, SIZE, STEP, UPDATE, asked_users, hosting, make, names, node, on_the_grid, two_nodes
from flwr.app import ConfigRecord
from flwr.server import strategy as legacy
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedXgbBagging,
    MultiKrum,
    QFedAvg,
)
from shared import record

from fedcgd import NoiseKey, Participation, Plan, calibrate
from fedcgd.ledger import Ledger, export
from fedcgd.mechanisms import DPSGD, BandedToeplitz, LambdaCGD, Normalized, inverse_matrix
from fedcgd.noise import NoiseStream
from fedcgd_flower import CorrelatedNoise, scheduled, sequential_training


@pytest.mark.parametrize("mechanism", [DPSGD(), LambdaCGD(0.8), Normalized(LambdaCGD(0.6))])
def test_model_moves_by_noised_mean_of_clipped_updates(mechanism) -> None:
    """x̂_t = x_t + ζσ·(C⁻¹Z)_t, divided by the planned cohort size, with C⁻¹ and Z taken from elsewhere."""
    released = []
    strategy = make(mechanism=mechanism)
    strategy.start(two_nodes(), record(np.zeros(SIZE)), evaluate_fn=lambda r, a: released.append(a["w"].numpy().copy()))

    noise = np.stack([NoiseStream(KEY.noise).normal(t, 0, 0, SIZE) for t in range(6)]).astype(np.float64)
    steps = (4 * UPDATE + on_the_grid(inverse_matrix(mechanism, 6) @ noise, [(t, 0) for t in range(6)])) / 4
    np.testing.assert_allclose(released, np.vstack([np.zeros(SIZE), np.cumsum(steps, axis=0)]), atol=2e-6)


def test_the_divisor_is_the_planned_cohort_however_many_answer() -> None:
    grid = two_nodes()
    grid.nodes[2].tamper = lambda request, reply: None if is_training(request) else reply
    strategy = make(noise_multiplier=1e-6)
    result = strategy.start(grid, record(np.zeros(SIZE)), num_rounds=1, timeout=0.01)
    answered = len([u for u in asked_users(grid)[0] if int(u[1:]) % 2 == 0])
    assert 0 < answered < 4
    np.testing.assert_allclose(result.arrays["w"].numpy(), answered * UPDATE / 4, rtol=1e-6)
    assert strategy.dropped == {"no answer": 1}


@pytest.mark.parametrize("sampling", ["poisson", "b-min-sep"])
def test_the_divisor_is_the_planned_cohort_however_many_are_drawn(sampling) -> None:
    """How many a coin drew is a secret, which a mean over those asked would tell."""
    grid = two_nodes()
    separation = 2 if sampling == "b-min-sep" else 1
    coins = Participation(rounds=3, sampling=sampling, sampling_rate=0.4, min_separation=separation)
    strategy = make(mechanism=DPSGD(), participation=coins, noise_multiplier=1e-6)
    result = strategy.start(grid, record(np.zeros(SIZE)))
    drawn = [len(users) for users in asked_users(grid)]
    assert any(number != 4 for number in drawn)
    np.testing.assert_allclose(result.arrays["w"].numpy(), sum(drawn) * UPDATE / 4, rtol=1e-6)


def test_users_that_their_node_leaves_out_are_counted() -> None:
    def some_fail(model, user, config, context):
        if user.endswith("1"):
            raise RuntimeError("no battery")
        return record(np.full(SIZE, np.nan)) if user.endswith("2") else model

    strategy = make(expected_users=4)
    strategy.start(
        FakeGrid({1: hosting(names(4), sequential_training(some_fail))}), record(np.zeros(SIZE)), num_rounds=1
    )
    assert (strategy.releases, dict(strategy.dropped)) == (1, {"left out": 2})


def test_every_release_is_on_the_same_grid_whoever_took_part() -> None:
    """What is released, times the cohort, is a whole number of steps; with a user more it still is."""
    for amount in (1.0, 0.123456789):
        users = names(12)
        grid = FakeGrid({1: node(users[:11]), 2: node(users[11:], amount=amount)})
        models = []
        make(cohort_size=4).start(
            grid, record(np.zeros(SIZE)), evaluate_fn=lambda r, a, models=models: models.append(a["w"].numpy().copy())
        )
        assert np.abs(models[-1]).max() < 8  # float32 holds multiples of STEP/4 up to 2⁹
        in_steps = np.array(models, np.float64) * 4 / STEP
        np.testing.assert_array_equal(in_steps, np.round(in_steps))


def test_too_few_answers_means_no_release_and_a_fresh_noise_index() -> None:
    grid = two_nodes()
    silent = {"on": True}
    for fake in grid.nodes.values():
        fake.tamper = lambda q, r: None if silent["on"] and is_training(q) else r
    with make() as strategy:
        initial = record(np.zeros(SIZE))
        assert strategy.start(grid, initial, num_rounds=1, timeout=0.01).arrays is initial
        assert strategy.releases == 0
        silent["on"] = False
        result = strategy.start(grid, initial, num_rounds=1)
        noise = (
            NoiseStream(KEY.noise).normal(0, 1, 0, SIZE).astype(np.float64)
        )  # attempt 1: attempt 0 is never released
        expected = UPDATE + on_the_grid(noise[None], [(0, 1)])[0] / 4
        np.testing.assert_allclose(result.arrays["w"].numpy(), expected, atol=2e-6)


def test_a_nonce_is_bound_to_the_rounds_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that copies of a run which released other rounds have other noise from then on, whatever their random numbers."""
    bound = []

    def made(key, stream, total, *, earlier, attempt):
        bound.append(list(earlier))
        return 10 + len(bound)

    monkeypatch.setattr(NoiseKey, "nonce_of", made)
    make().start(two_nodes(), record(np.zeros(SIZE)), num_rounds=3)
    assert bound == [[], [11], [11, 12]]


def test_too_few_users_skips_the_round_without_spending_noise(tmp_path: Path) -> None:
    users = names(12)
    grid = FakeGrid({1: node(users[:3])})
    strategy = make(expected_users=3, ledger=tmp_path / "run.db")
    initial = record(np.zeros(SIZE))
    assert strategy.start(grid, initial, num_rounds=2).arrays is initial
    assert strategy.releases == 0
    assert asked_users(grid) == []
    assert [skip["round"] for skip in export(tmp_path / "run.db")["skips"]] == [0, 0]
    grid.nodes[2] = node(users[3:])
    strategy.start(grid, initial)
    assert strategy.releases == 6


def test_stops_when_the_rounds_are_used_up() -> None:
    grid = two_nodes()
    with make() as strategy:
        result = strategy.start(grid, record(np.zeros(SIZE)), num_rounds=100)
        assert strategy.releases == 6
        with pytest.raises(ValueError, match="6 planned"):
            strategy.configure_train(7, result.arrays, None, grid)


def test_epsilon_so_far_grows_to_the_budget_and_no_further() -> None:
    sigma = calibrate(PLAN["mechanism"], PLAN["participation"], epsilon=3.0, delta=1e-5).noise_multiplier
    strategy = make(noise_multiplier=sigma)
    result = strategy.start(two_nodes(), record(np.zeros(SIZE)))
    spent = [metrics["epsilon"] for _, metrics in sorted(result.train_metrics_clientapp.items())]
    assert len(spent) == 6
    assert spent == sorted(spent)
    assert spent[0] < 3
    assert spent[-1] == pytest.approx(3.0, rel=1e-6)
    assert spent[-1] <= 3.0 * (1 + 1e-9)
    assert set(result.train_metrics_clientapp[1]) == {"epsilon", "epsilon-planned", "delta", "releases"}


def test_two_runs_of_a_key_choose_users_apart(tmp_path: Path) -> None:
    """Else who takes part in one would tell who does in the other, and their samplings would not be independent."""
    key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
    grids = [two_nodes(), two_nodes()]
    for i, grid in enumerate(grids):
        make(key=key, ledger=tmp_path / f"{i}.db", noise_multiplier=2.0 + i).start(grid, record(np.zeros(SIZE)))
    first, second = map(asked_users, grids)
    assert len(first) == len(second) == 6
    assert first != second  # but once in 10⁷ times: 4 of 12, of the other 8, and of those before again


def test_noise_that_would_outgrow_the_grid_is_refused_before_the_first_round() -> None:
    """C⁻¹ of this C grows like 1.6^t: Σ|w| of the last row is 10^30."""
    grid = two_nodes()
    strategy = make(
        mechanism=BandedToeplitz((1.0, -1.6)), participation=Participation(rounds=150, min_separation=3), cohort_size=2
    )
    with pytest.raises(ValueError, match="lattice holds"):
        strategy.start(grid, record(np.zeros(SIZE)))
    assert asked_users(grid) == []


def test_a_round_that_cannot_be_recorded_leaves_no_trace_in_the_inner_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is full when round 0 is to be recorded; then there is room. The momentum must not hold the first noise."""
    inner = FedAvgM(server_learning_rate=0.5, server_momentum=0.9)
    with make(inner) as strategy:
        initial = record(np.zeros(SIZE))
        with monkeypatch.context() as patched:
            patched.setattr(Ledger, "record_released", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                strategy.start(two_nodes(), initial, num_rounds=1)
        # At once, for whoever drives the rounds without `start`.
        assert (strategy.releases, inner.momentum_vector) == (0, None)
        result = strategy.start(two_nodes(), initial, num_rounds=1)
        noise = NoiseStream(KEY.noise).normal(0, 1, 0, SIZE).astype(np.float64)
        mean = UPDATE + on_the_grid(noise[None], [(0, 1)])[0] / 4
        np.testing.assert_allclose(result.arrays["w"].numpy(), 0.5 * mean, atol=2e-6)


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("sampling", ["balls-in-bins", "poisson", "b-min-sep"])
def test_who_was_drawn_is_asked_in_each_try_of_the_round_however_silent(sampling) -> None:
    """Else who takes part would hang on who answers, and the sampling would not be the one that is accounted for."""

    class Failing(FedAvg):
        def aggregate_train(self, server_round, replies):
            if server_round == 2:
                raise RuntimeError("no model")
            return super().aggregate_train(server_round, replies)

    shape = {
        "balls-in-bins": {"min_separation": 2},
        "poisson": {"sampling_rate": 0.5},
        "b-min-sep": {"min_separation": 2, "sampling_rate": 0.5},
    }[sampling]
    grid = two_nodes(24)
    strategy = make(
        Failing(), mechanism=DPSGD(), participation=Participation(rounds=4, sampling=sampling, **shape), min_answers=0
    )
    asked = []
    with strategy:
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=1)
        grid.nodes[2].tamper = lambda request, reply: None if is_training(request) else reply
        for _ in range(4):
            before = len(grid.sent)
            with pytest.raises(RuntimeError, match="no model"):
                strategy.start(grid, record(np.zeros(SIZE)), timeout=0.01)
            asked.append(sorted(u for m in grid.sent[before:] if is_training(m) for u in m.content["fedcgd"]["users"]))
    assert asked == [asked[0]] * 4
    assert any(int(user[1:]) % 2 for user in asked[0])  # of the silent node


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cohort_size": 0}, "cohort_size must be at least 1"),
        ({"min_answers": 5}, "min_answers"),
        ({"min_answers": 1, "participation": Participation(rounds=6, sampling="balls-in-bins")}, "secret sampling"),
        ({"identity": "guess"}, "identity"),
        ({"hosts": ["u001"]}, "hosts must"),
        ({"trainable": "weight"}, "trainable must"),
        ({"on_release": "wandb"}, "on_release"),
        ({"patience": "60"}, "patience must"),
        ({"patience": float("nan")}, "patience must"),
    ],
)
def test_settings_that_contradict_or_have_another_type_are_refused(options, words) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make(**options)


def test_a_run_whose_record_was_in_memory_does_not_begin_again() -> None:
    strategy = make()
    strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=2)
    with pytest.raises(ValueError, match="2 rounds"):
        strategy.start(two_nodes(), record(np.zeros(SIZE)))


def test_nothing_is_opened_before_start_and_everything_is_closed_after_it(tmp_path: Path) -> None:
    """Also when it fails. Python 3.13 warns of a connection that nobody closed, and warnings are errors here."""
    path = tmp_path / "run.db"
    strategy = make(ledger=path)
    assert not path.exists()
    strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=2)
    with pytest.raises(RuntimeError, match="evaluation"):
        strategy.start(two_nodes(), record(np.zeros(SIZE)), evaluate_fn=lambda r, a: _raise(RuntimeError("evaluation")))
    # The last connection to close removes the journal.
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.db", "run.db-model-1"]
    with pytest.raises(ValueError, match="ledger is"):
        strategy.configure_train(1, record(np.zeros(SIZE)), ConfigRecord(), two_nodes())
    with strategy:
        assert strategy.releases == 2


def _raise(error: Exception):
    raise error


@pytest.mark.parametrize(
    ("inner", "options", "cohort"),
    [
        (FedAvg(min_train_nodes=60), {}, 60),
        (FedAvg(min_train_nodes=60), {"cohort_size": 30}, 30),
        (FedAvg(fraction_train=0.1, min_train_nodes=60), {"expected_users": 1000}, 100),
        (FedAvg(fraction_train=0.1, min_train_nodes=60), {"expected_users": 100}, 60),
        (FedAvg(), {"expected_users": 7}, 7),
        (FedAvg(min_train_nodes=3), {"expected_users": 4}, 3),  # who is waited for does not change who is asked
    ],
)
def test_the_cohort_is_what_the_inner_strategy_says(inner, options, cohort: int) -> None:
    assert make(inner, **{"cohort_size": None} | options).cohort_size == cohort


@pytest.mark.parametrize(
    "inner", [FedAvg(), FedAvg(fraction_train=1.0), FedAvg(fraction_train=0.1, min_train_nodes=60)]
)
def test_a_cohort_that_nothing_says_is_asked_for(inner) -> None:
    """FedAvg() asks every node in each round, which no separation allows; it used to run with cohorts of 2."""
    with pytest.raises(ValueError, match="cohort_size"):
        make(inner, cohort_size=None)


@pytest.mark.parametrize(
    "inner",
    [
        FedMedian(),
        MultiKrum(),
        QFedAvg(client_learning_rate=0.1),
        FedXgbBagging(),
        DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 4),
        DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 1.0, 400),
    ],
    ids=lambda inner: type(inner).__name__,
)
def test_inner_strategies_that_cannot_work_are_refused_at_once(inner) -> None:
    """Of these Flower's DP strategies waited for nodes for ever, and the robust ones silently became the mean."""
    with pytest.raises(ValueError, match=type(inner).__name__):
        make(inner)


@pytest.mark.parametrize("planned", [5, 7])
def test_a_schedule_over_other_rounds_than_the_plan_s_is_refused(planned: int) -> None:
    """Over fewer, the rate stayed at its last, smallest factor to the end; over more, it ended high above it."""
    message = (
        rf"rate of ScheduledFedAvgM is scheduled over {planned} rounds, and the plan has 6: .*scheduled\(…, rounds=6\)"
    )
    with pytest.raises(ValueError, match=message):
        make(scheduled(FedAvgM, "linear", rounds=planned)())
    make(scheduled(FedAvgM, "linear", rounds=6)())
    make(scheduled(FedAvgM, "constant", rounds=planned)())


class _WaitsForNodes(FedAvg):
    """As Flower's strategies wait, for more nodes than its attributes tell."""

    wanted = 500

    def configure_train(self, server_round, arrays, config, grid):
        while len(list(grid.get_node_ids())) < self.wanted:
            pass
        return super().configure_train(server_round, arrays, config, grid)


def test_an_inner_strategy_that_waits_for_nodes_gets_them_or_an_error() -> None:
    assert make(_WaitsForNodes()).start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1).released == 1
    endless = _WaitsForNodes()
    endless.wanted = 10**9
    with pytest.raises(RuntimeError, match="inner strategy"):
        make(endless).start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)


@pytest.mark.parametrize(
    ("inner", "plan", "key", "words"),
    [
        (FedAvg, Plan(**PLAN), KEY, "FedAvg.*strategy.fedavg.FedAvg"),
        (legacy.FedAvg(), Plan(**PLAN), KEY, "flwr.serverapp.*got FedAvg"),
        (Plan(**PLAN), FedAvg(), KEY, "inner must"),
        (FedAvg(), "lambda-cgd", KEY, "plan must"),
        (FedAvg(), Plan(**PLAN), b"0123456789abcdef0123456789abcdef", "a NoiseKey"),
    ],
)
def test_wrong_types_are_named_and_no_key_shows(inner, plan, key, words: str) -> None:
    with pytest.raises(TypeError, match=words) as refused:
        CorrelatedNoise(inner, plan, key=key, cohort_size=4)
    assert "0123" not in str(refused.value)


def test_as_many_users_are_waited_for_as_their_participations_ask_for() -> None:
    once = Participation(rounds=6, min_separation=1, max_participations=1)  # 6 rounds of 4, each user once
    with pytest.raises(ValueError, match="24 users"):
        make(participation=once).start(two_nodes(23), record(np.zeros(SIZE)))
    assert make(participation=once).start(two_nodes(24), record(np.zeros(SIZE))).complete


def test_the_key_never_shows(caplog: pytest.LogCaptureFixture) -> None:
    grid = two_nodes()
    strategy = make()
    with caplog.at_level(logging.DEBUG):
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=2)
    shown = caplog.text + repr(strategy) + repr(vars(strategy)) + "".join(repr(m) for m in grid.sent)
    for secret in (KEY.noise, KEY.choices):
        for form in (secret.hex(), repr(secret), str(int.from_bytes(secret, "big"))):
            assert form not in shown


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_model_that_nobody_can_train_from_is_refused_before_anybody_is_asked(number: float) -> None:
    grid = two_nodes()
    with pytest.raises(ValueError, match="finite"):
        make().start(grid, record(np.full(SIZE, number)))
    assert not grid.sent


def test_who_waits_for_users_is_told_for_whom_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of an example, with too few nodes: the first round does not begin, and that must not take silence."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)  # passes by sleeping alone, however slow the machine
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr("fedcgd_flower.cohort.time", clock)
    strategy = make(patience=5.0)
    with caplog.at_level(logging.INFO, logger="flwr"), pytest.raises(ValueError, match="after 5 s"):
        strategy.start(two_nodes(4), record(np.zeros(SIZE)))
    told = [one.getMessage() for one in caplog.records if "waiting for" in one.getMessage()]
    assert len(told) == 1
    assert "are expected" in told[0]
    assert "plan's min_separation" in told[0]
    assert told[0].endswith("waiting for up to 5 s")


@pytest.mark.parametrize("name", ["inner", "plan", "cohort_size", "evaluation"])
def test_a_setting_that_is_set_later_is_refused_rather_than_ignored(name: str) -> None:
    strategy = make()
    with pytest.raises(AttributeError, match=name):
        setattr(strategy, name, getattr(strategy, name))


def test_a_subclass_is_called_for_each_step_and_sees_how_the_run_stands() -> None:
    seen: list[tuple] = []

    class Watched(CorrelatedNoise):
        def configure_train(self, server_round, arrays, config, grid):
            yield from super().configure_train(server_round, arrays, config, grid)  # Flower allows any iterable
            seen.append(("configure", server_round, self.releases, self.clip_norm))

        def aggregate_train(self, server_round, replies):
            released, metrics = super().aggregate_train(server_round, replies)
            seen.append(("aggregate", server_round, self.releases, dict(self.dropped)))
            metrics["mine"] = 1
            return released, metrics

    strategy = Watched(FedAvg(), make().plan, cohort_size=4, key=KEY, patience=0.0)
    result = strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=2)
    assert seen == [
        ("configure", 1, 0, 0.5),
        ("aggregate", 1, 1, {}),
        ("configure", 2, 1, 0.5),
        ("aggregate", 2, 2, {}),
    ]
    assert [metrics["mine"] for metrics in result.train_metrics_clientapp.values()] == [1, 1]
