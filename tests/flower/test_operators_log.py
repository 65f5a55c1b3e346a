"""What the operator reads: a line a round, in Flower's manner, with causes apart, and nothing twice."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid, is_training
from flower_runs import SIZE, make, names, node, one_user, two_nodes
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedAvgM
from shared import record

from fedcgd import DPSGD, NoiseKey, Participation
from fedcgd.ledger import seal
from fedcgd_flower import IncompleteRunError, scheduled


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.name == "flwr"]


@pytest.fixture(autouse=True)
def _hear_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flwr")


def test_a_round_is_one_line_and_no_line_comes_twice(caplog: pytest.LogCaptureFixture) -> None:
    make().start(
        two_nodes(), record(np.zeros(SIZE)), evaluate_fn=lambda release, arrays: MetricRecord({"accuracy": release / 8})
    )
    said = lines(caplog)
    rounds = [line for line in said if line.startswith("[ROUND ")]
    assert len(rounds) == 6
    assert re.fullmatch(
        r"\[ROUND 3/6\] 4 users asked at [12] nodes, 4 answered \| ε ≤ [0-9.]+ so far at δ = 1e-05 \| evaluate: accuracy 0.375",
        rounds[2],
    )
    assert len(said) == len(set(said))
    assert len(said) < 6 + 25
    [once] = [line for line in said if "user counts" in line]
    assert "examples per" in once
    assert any("0: evaluate" in line for line in said)
    [ended] = [line for line in said if line.startswith("Finished")]
    assert re.fullmatch(r"Finished in [0-9.]+ s with 6 of 6 rounds released", ended)
    assert "round (cohort_size)" in caplog.text
    assert "noise alone" not in caplog.text


def test_epsilon_of_a_part_is_said_with_its_condition_beside_that_of_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    strategy = make()
    strategy.start(two_nodes(), record(np.zeros(SIZE)), num_rounds=2)
    whole, part = strategy.plan.guarantee().epsilon, strategy.plan.guarantee(released=2).epsilon
    assert part < whole
    last = lines(caplog)[-2]
    assert f"the planned run: ε ≤ {whole:.3g}" in last
    assert f"for the 2 rounds released, ε ≤ {part:.4g}, provided that nobody looked at a released model" in last
    assert "ended before" in lines(caplog)[-1]


def test_a_finished_run_that_is_started_again_says_that_it_trains_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for count in (0, 1):
        make(ledger=tmp_path / "run.db").start(two_nodes(), record(np.zeros(SIZE)))
        assert caplog.text.count("were released") == count


def failing(code: int, reason: str):
    return lambda q, r: Message(Error(code=code, reason=reason), reply_to=q) if is_training(q) else r


def test_causes_are_told_apart_and_a_hint_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    users = names(12)
    grid = FakeGrid({i + 1: node(users[2 * i : 2 * i + 2]) for i in range(6)})
    for i, tamper in enumerate(
        [
            failing(5, "node unavailable"),
            failing(2, "training failed"),
            failing(2, "KeyError: 'arrays' of patient 17"),
            lambda q, r: None if is_training(q) else r,
        ]
    ):
        grid.nodes[i + 1].tamper = tamper
    participation = Participation(rounds=3)
    make(participation=participation, cohort_size=12).start(grid, record(np.zeros(SIZE)), timeout=0.0)
    [line, *_] = [line for line in lines(caplog) if line.startswith("[ROUND ")]
    assert "failed: 2" in line
    assert caplog.text.count("raised outside") == 1
    assert caplog.text.count("its training") == 1
    assert "patient" not in caplog.text


def test_too_few_users_says_who_is_there_and_what_keeps_the_others(caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({1: node(names(9))})
    participation = Participation(rounds=6, min_separation=3, max_participations=1)
    with pytest.raises(IncompleteRunError):
        make(participation=participation, expected_users=9).start(grid, record(np.zeros(SIZE)))
    skipped = [line for line in lines(caplog) if "[ROUND 3/6]" in line]
    assert skipped[0] == (
        "[ROUND 3/6] not released: 9 users are there at 1 node and 1 may take part, of 4 a round; "
        "8 of them have taken part 1 time, which is all they may"
    )
    caplog.clear()
    participation = Participation(rounds=6, min_separation=3)
    with pytest.raises(IncompleteRunError):
        make(participation=participation, expected_users=9).start(grid, record(np.zeros(SIZE)))
    assert "round; 8" in caplog.text


@pytest.mark.parametrize(("fraction", "said"), [(0.5, 1), (0, 0)])
def test_evaluation_on_clients_is_said_to_be_left_out_if_it_was_wanted(fraction: float, said: int, caplog) -> None:
    make(FedAvg(fraction_evaluate=fraction)).start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)
    assert caplog.text.count("(fraction_evaluate") == said


def test_min_available_nodes_is_waited_for_unless_expected_users_says_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With cohorts of 4 the plan needs 12 users; 20 are asked for in Flower's way, and were not waited for."""
    inner = FedAvg(min_train_nodes=4, min_available_nodes=20)
    with pytest.raises(ValueError, match="12 users"):
        make(inner).start(two_nodes(), record(np.zeros(SIZE)))
    assert make(inner).start(two_nodes(20), record(np.zeros(SIZE)), num_rounds=1).released == 1
    assert make(inner, expected_users=12).start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1).released == 1


def test_updates_that_are_never_finite_end_the_run_with_advice_about_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The advice was to start again with the same ledger, and the nodes' logs held nothing at all."""
    grid = FakeGrid({i + 1: one_user(user, lambda model: model * np.nan) for i, user in enumerate(names(12))})
    with pytest.raises(IncompleteRunError) as stopped:
        make(ledger=tmp_path / "run.db").start(grid, record(np.zeros(SIZE)))
    words = str(stopped.value)
    assert "not released" in words
    assert "float32 holds" in words
    assert words.index("What helps") < words.index("Then start again with the same ledger")
    local = [entry for entry in caplog.records if "no update" in entry.getMessage()]
    assert len(local) == 40  # ten tries, four nodes
    assert not any(user in entry.getMessage() for entry in local for user in names(12))


def test_a_pool_logs_that_a_users_update_is_not_finite_and_not_whose(caplog: pytest.LogCaptureFixture) -> None:
    users = names(12)
    grid = FakeGrid({1: node(users, amount=np.inf)})
    with pytest.raises(IncompleteRunError, match="user's training"):
        make().start(grid, record(np.zeros(SIZE)))
    local = [entry.getMessage() for entry in caplog.records if "no update" in entry.getMessage()]
    assert len(local) == 40
    assert not any(user in line for line in local for user in users)


def test_a_release_that_nobody_answered_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """With a sampling nothing may depend on who answers, so that ε is spent; the operator has to hear it."""
    grid = two_nodes()
    for one in grid.nodes.values():
        one.tamper = failing(2, "training failed")
    coins = Participation(rounds=3, sampling="poisson", sampling_rate=0.9)
    make(participation=coins, mechanism=DPSGD()).start(grid, record(np.zeros(SIZE)))
    said = [entry for entry in caplog.records if entry.getMessage().startswith("[ROUND ")]
    assert len(said) == 3
    assert all("noise alone" in entry.getMessage() and entry.levelno == logging.WARNING for entry in said)


@pytest.mark.parametrize(("delta", "warned"), [(0.25, True), (1 / 12, True), (0.01, False)])
def test_a_delta_of_one_user_or_more_is_a_warning(caplog: pytest.LogCaptureFixture, delta: float, warned: bool) -> None:
    make(delta=delta).start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)
    assert ("the number" in caplog.text) == warned


def test_an_aggregation_of_metrics_that_is_not_called_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def mean_loss(records: list[RecordDict], key: str) -> MetricRecord:
        raise AssertionError

    make(FedAvg(train_metrics_aggr_fn=mean_loss)).start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)
    make().start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)
    assert caplog.text.count("train_metrics_aggr_fn is") == 1


def test_an_earlier_run_by_the_register_of_a_key_is_said_also_once_that_key_is_deleted(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Sealing deletes the key and leaves its register: the next run over the same people began without a word."""
    for name, clip_norm in (("first", 0.5), ("first", 0.5), ("second", 0.25)):
        assert "earlier run" not in caplog.text
        if name == "second":
            seal(tmp_path / "first.db", tmp_path / "noise.key")
        key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
        make(key=key, ledger=tmp_path / f"{name}.db", clip_norm=clip_norm).start(
            two_nodes(), record(np.zeros(SIZE)), num_rounds=1
        )
        assert key.noise_of("").hex() not in caplog.text
    [told] = [line for line in lines(caplog) if "1 earlier" in line]
    assert all(words in told for words in ("first.db", "2 rounds,", "sealed", "ledger compose"))


def test_a_strategy_that_sees_sums_before_they_are_on_record_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Saves(FedAvgM):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    class Indirectly(Saves):
        pass

    for inner, warned in (
        (FedAvg(), 0),
        (scheduled(FedAvgM, "linear", rounds=6)(), 0),
        (Saves(), 1),
        (Indirectly(), 1),
        (scheduled(Saves, "linear", rounds=6)(), 1),
    ):
        caplog.clear()
        make(inner).start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)
        assert caplog.text.count("Saves.aggregate_train is") == warned
        assert caplog.text.count("in on_release,") == warned


@pytest.mark.parametrize("wrong", ["4", 1.5, -1])
def test_a_number_of_rounds_that_is_none_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"num_rounds must be a whole number.*{wrong!r}"):
        make().start(two_nodes(), record(np.zeros(SIZE)), num_rounds=wrong)


@pytest.mark.parametrize(("noise_multiplier", "told"), [(2.0, False), (9.9, False), (10.1, True)])
def test_noise_that_exceeds_all_signal_is_said_at_the_start(noise_multiplier: float, told: bool, caplog) -> None:
    """Independent noise, one round, a hundred parameters, a hundred users: 10/√100 clip norms are what they can add."""
    options = {
        "mechanism": DPSGD(),
        "participation": Participation(rounds=1),
        "cohort_size": 100,
        "noise_multiplier": noise_multiplier,
    }
    grid = FakeGrid({1: node([f"u{i}" for i in range(100)])})
    with caplog.at_level(logging.WARNING):
        make(**options).start(grid, record(np.zeros(100)))
    words = "it moves the model's 100 parameters by about 1.01 clip norms, and the updates of 100 users a round by at most 1"
    assert (words in caplog.text) == told
