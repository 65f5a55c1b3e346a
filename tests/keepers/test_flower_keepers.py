"""CorrelatedNoise with keepers: what is released, who is asked what, and what happens when a keeper or a node fails."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from clock import Clock
from command_line import run
from fake_grid import FakeGrid, FakeNode, Killed, is_training
from flower_requests import TASK
from flower_runs import PLAN, names, one_user
from flwr.app import Array, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from keeper_runs import SIMULATED, RealKeepers, make, node, opening_asked, two_nodes
from shared import record
from sql import edit

from fedcgd import BISR, LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.keepers import Keepers, Refusal
from fedcgd.keepers.record import read, record_file
from fedcgd.ledger import export, released_model, verify
from fedcgd.ledger.attempts import read_openings as openings_of
from fedcgd.ledger.statement import privacy_statement, statement_markdown
from fedcgd.ledger.store import reader
from fedcgd_flower import AdaptiveClipping, ClippedUpdateMod, CorrelatedNoise, IncompleteRunError
from fedcgd_flower.keepers.messages import _bounded, _or_zeros
from fedcgd_flower.keepers.transport import Transport, Waits
from fedcgd_flower.noise_provider import question_of
from fedcgd_flower.round import TrainingRounds

SIZE = 6


BOTH_NODES = {"cohort_size": 8, "participation": Participation(rounds=6, min_separation=1)}
"""Of twelve users, six at each of two nodes: every cohort is at both."""


def released(strategy: CorrelatedNoise, grid: FakeGrid, **options) -> list[np.ndarray]:
    seen: list[np.ndarray] = []
    strategy.start(grid, record(np.zeros(SIZE)), evaluate_fn=lambda r, a: seen.append(a["w"].numpy().copy()), **options)
    return seen


@pytest.fixture
def real(tmp_path: Path) -> RealKeepers:
    return RealKeepers(tmp_path)


# What is released.


@pytest.mark.parametrize("mechanism", [LambdaCGD(0.8), BISR(3)], ids=["lambda-cgd", "bisr"])
def test_one_simulated_keeper_releases_what_the_server_alone_would(mechanism) -> None:
    """K = 1, t = 0: bit for bit, model by model; so a run can be moved to a notary without other numbers."""
    keepers = Keepers.simulation(7, 1, colluding=0)
    central = released(make(None, mechanism=mechanism), two_nodes(None))
    found = released(make(keepers, mechanism=mechanism), two_nodes(keepers))
    np.testing.assert_array_equal(found, central)


def test_real_keepers_are_found_by_their_cards_and_open_each_round_once(real: RealKeepers) -> None:
    grid = real.grid()
    found = released(real.make(), grid)
    assert len(found) == 7
    assert [real.openings(i) for i in range(3)] == [list(range(6))] * 3
    hashes = {tuple(opened.list_hash for opened in read(record_file(path)).openings) for path in real.files}
    assert len(hashes) == 1
    assert [opened.list_hash for opened in openings(real)] == list(hashes.pop())
    assert {opened.state for opened in openings(real)} == {"released"}
    asked = [question_of(m) for m in grid.sent if m.metadata.dst_node_id >= 10]
    assert asked.count("/open") == 18
    assert asked.count("/check") == 3  # in the first round alone


def test_the_mod_masks_too(real: RealKeepers) -> None:
    mod, keys = ClippedUpdateMod(keepers=real.keepers), [{"keeper": str(path)} for path in real.files] + [{}] * 9
    grid = FakeGrid({i: one_user(f"u{i}", lambda model: model + 1, mod, **key) for i, key in enumerate(keys)})
    found = released(real.make(noise_multiplier=0.1, min_answers=4), grid)
    np.testing.assert_allclose(found[-1], 6 * 0.5 / np.sqrt(SIZE), atol=0.1)


@pytest.mark.parametrize("kind", ["query", "evaluate"])
def test_a_node_with_keepers_answers_the_server_nothing_in_the_clear(real: RealKeepers, kind: str) -> None:
    app = ClientApp(mods=[ClippedUpdateMod(keepers=real.keepers)])

    @app.query()
    @app.evaluate()
    def tell(message: Message, context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"age": 81})}), reply_to=message)

    [reply] = FakeGrid({1: FakeNode(app)}).send_and_receive([Message(RecordDict(), dst_node_id=1, message_type=kind)])
    assert reply.has_error()
    assert "server asks" in reply.error.reason


def test_adaptive_clipping_goes_on_after_a_spent_round(real: RealKeepers) -> None:
    """The count of users within the norm is one coordinate more of the sum; a spent round changes nothing."""
    strategy = real.make(adaptive_clipping=AdaptiveClipping(count_noise=0.5), noise_multiplier=0.5, cohort_size=4)
    grid = real.grid()
    fail_once(grid, 11, round=2)
    with strategy:
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=2)
        norm = strategy.clip_norm  # whatever it is: a share of 0 and then one of 1 bring it back to the plan's
        assert strategy._rounds.ledger.metrics("train")[2]["clip-norm"] != 0.5
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=1)
        assert (strategy.clip_norm, strategy.releases) == (norm, 3)
    with real.make(adaptive_clipping=AdaptiveClipping(count_noise=0.5), noise_multiplier=0.5, cohort_size=4) as again:
        assert (again.clip_norm, again.releases) == (norm, 3)
        result = again.start(grid, record(np.zeros(SIZE)), num_rounds=0)
    assert {number: len(told) for number, told in result.train_metrics_clientapp.items()} == {1: 7, 2: 7}


def fail_once(grid: FakeGrid, node_id: int, *, round: int) -> None:
    """The keeper at that node answers, and its answer to `open` of `round` is lost on the way."""

    def tamper(request: Message, reply: Message) -> Message | None:
        return None if opening_asked(request).get("round") == round else reply

    grid.nodes[node_id].tamper = tamper


# What fails.


@pytest.fixture(autouse=True)
def _do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcgd_flower.keepers.transport.WAITS", Waits(answer=0.05))
    monkeypatch.setattr("fedcgd_flower.keepers.transport.time.sleep", lambda seconds: None)


def test_a_keeper_without_an_answer_is_asked_again_and_no_other() -> None:
    asked: list[list[str]] = []

    class Flaky(Transport):
        def _reachable(self, grid):
            return ()

        def _ask_once(self, grid, agreement, openings, check, within):
            asked.append(sorted(openings))
            return {name: Refusal("no") if name == "court" or len(asked) > 1 else None for name in openings}

    flaky = Flaky(Keepers.simulation(1, 2, colluding=1))
    answers = flaky.ask(None, None, dict.fromkeys(("court", "union")), check=False, patience=60.0)
    assert answers == dict.fromkeys(("court", "union"), Refusal("no"))
    assert asked == [["court", "union"], ["union"]]


def test_keepers_that_are_away_are_looked_for_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Clock(), []
    monkeypatch.setattr("fedcgd_flower.keepers.transport.time", clock)

    class Away(Transport):
        def _reachable(self, grid):
            assert len(looks) < 80
            return looks.append(clock.now) or ()

        def _ask_once(self, *_):
            raise AssertionError

    assert Away(Keepers.simulation(1, 2, colluding=1)).present(None, 60.0) == ()
    assert (clock.now, looks[1], len(looks) > 60) == (pytest.approx(60.0), 0.02, True)


def test_a_sum_that_is_too_long_is_scaled_before_it_is_masked() -> None:
    long, short = np.full(TASK.size, 2**40), np.ones(TASK.size, np.int64)
    norm = np.linalg.norm(TASK.clipping.grid.from_steps(_bounded(long, TASK, 1)))
    assert 0.99 * TASK.clipping.clip_norm < norm <= TASK.clipping.clip_norm
    assert np.array_equal(_bounded(short, TASK, 1), short)


@pytest.mark.parametrize(
    "wrong", [np.ones(TASK.size), np.ones(TASK.size + 1, np.int64), "text"], ids=["floats", "long", "text"]
)
def test_what_is_no_sum_in_whole_steps_is_masked_as_zeros(wrong) -> None:
    values = _or_zeros(lambda: wrong, TASK)
    assert (values.dtype, values.shape, values.any()) == (np.int64, (TASK.size,), False)


def test_a_round_whose_opening_failed_is_spent_and_the_next_cancels_what_was_released(real: RealKeepers) -> None:
    grid = real.grid()
    fail_once(grid, 11, round=2)
    models = released(real.make(), grid)
    assert len(models) == 6  # the initial one, and five releases of six rounds
    for number in range(3):
        opened = {o.round: o.after for o in read(record_file(real.files[number])).openings}
        assert opened == {0: None, 1: 0, 2: 1, 3: 1, 4: 3, 5: 4}  # round 3 cancels a part of round 1
    assert [o.state for o in openings(real)] == ["released", "released", "spent", *["released"] * 3]


def test_an_opening_that_a_killed_server_left_is_spent_on_resume(real: RealKeepers, monkeypatch) -> None:
    grid = real.grid()
    strategy = real.make()

    def die(request: Message, reply: Message) -> Message:
        if opening_asked(request).get("round") == 1:
            raise Killed
        return reply

    grid.nodes[10].tamper = die
    with monkeypatch.context() as killed:
        killed.setattr(TrainingRounds, "abort_round", lambda self, reason: None)  # it does nothing any more
        with pytest.raises(Killed):
            strategy.start(grid, record(np.zeros(SIZE)))
    models = released(real.make(), real.grid())
    assert len(models) == 5  # release 1, and rounds 2 to 5
    assert [o.state for o in openings(real)] == ["released", "spent", *["released"] * 4]


def openings(real: RealKeepers):
    with reader(real.ledger) as connection:
        return openings_of(connection)


def test_a_keeper_that_is_gone_before_it_is_asked_costs_no_round(real: RealKeepers) -> None:
    grid = real.grid()
    del grid.nodes[12]
    with pytest.raises(IncompleteRunError, match="missing: k2"):
        real.make().start(grid, record(np.zeros(SIZE)))
    assert not any(is_training(m) for m in grid.sent if "round" in m.content.config_records.get("fedcgd", {}))


def test_an_old_copy_of_a_keepers_record_spends_no_round(real: RealKeepers, tmp_path: Path) -> None:
    """The keeper has no share of round 2 on record that round 3 could cancel: it says so before the round is opened."""
    real.make().start(real.grid(), record(np.zeros(SIZE)), num_rounds=1)
    held = record_file(real.files[1])
    old = held.read_bytes()
    real.make().start(real.grid(), record(np.zeros(SIZE)), num_rounds=2)
    new = held.read_bytes()
    held.write_bytes(old)
    with pytest.raises(IncompleteRunError, match="keeper's record"):
        real.make().start(real.grid(), record(np.zeros(SIZE)))
    assert [opened.state for opened in openings(real)] == ["released"] * 3
    held.write_bytes(new)
    assert real.make().start(real.grid(), record(np.zeros(SIZE))).complete


def test_one_keeper_may_be_away_where_that_is_agreed(tmp_path: Path) -> None:
    real = RealKeepers(tmp_path, colluding=1, away=1, names=("k0", "k1", "k2", "k3"))
    grid = real.grid()
    away = grid.nodes.pop(12)
    with real.make() as strategy:
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=2)
        grid.nodes[12] = away
        strategy.start(grid, record(np.zeros(SIZE)))
    assert real.openings(2) == [2, 3, 4, 5]
    assert real.openings(0) == list(range(6))


def test_a_keeper_that_comes_back_as_another_node_is_found_again(real: RealKeepers) -> None:
    grid = real.grid()
    with real.make(patience=5.0) as strategy:
        strategy.start(grid, record(np.zeros(SIZE)), num_rounds=2)
        grid.nodes[99] = grid.nodes.pop(11)
        strategy.start(grid, record(np.zeros(SIZE)))
    assert real.openings(1) == list(range(6))


def test_who_only_says_that_it_is_a_keeper_is_none(real: RealKeepers) -> None:
    def lie(request: Message, reply: Message) -> Message:
        if question_of(request) == "/who":
            reply.content["update"]["flat"] = Array(np.zeros(32, np.uint8))
        return reply

    grid = real.grid()
    grid.nodes[1].tamper = lie
    del grid.nodes[10]
    with pytest.raises(IncompleteRunError, match="missing: k0"):
        real.make().start(grid, record(np.zeros(SIZE)))


def test_a_node_with_other_keepers_gets_no_answer_and_stops_nobody(real: RealKeepers, tmp_path: Path) -> None:
    grid = real.grid()
    (tmp_path / "other").mkdir()
    other = RealKeepers(tmp_path / "other")
    grid.nodes[3] = node([f"v{i}" for i in range(12)], other.keepers)
    strategy = real.make()
    strategy.start(grid, record(np.zeros(SIZE)))
    assert strategy.dropped["client error"] > 0


def test_seeds_that_cannot_be_opened_are_left_out_before_a_round_is_spent(real: RealKeepers, caplog) -> None:
    """A node that begins to cheat spends one round. From then on, as in the first, keepers are asked first what they can open."""

    def garbled(request: Message, reply: Message) -> Message:
        if "sealed" in reply.content.config_records.get("fedcgd", {}):
            task = reply.content["fedcgd"]
            if task["round"] > 1:
                task["sealed"] = b"x" * len(task["sealed"])
        return reply

    grid = real.grid()
    grid.nodes[2].tamper = garbled
    with caplog.at_level(logging.WARNING):
        real.make(**BOTH_NODES).start(grid, record(np.zeros(SIZE)))
    assert "nodes cannot" in caplog.text
    assert [o.state for o in openings(real)] == ["released", "released", "spent", *["released"] * 3]


@pytest.mark.parametrize("who", ["node", "keeper"])
def test_a_sum_that_is_too_long_is_no_release(real: RealKeepers, who: str, caplog) -> None:
    """Residues that do not fit their masks are uniform: the sum is far longer than updates and noise."""

    def garbled(request: Message, reply: Message) -> Message:
        asked = request.content.config_records.get("fedcgd", {}) if who == "node" else opening_asked(request)
        if asked.get("round") == 1 and not reply.has_error():
            value = reply.content["update"]["flat"].numpy().copy()
            value.view(np.uint8)[-1] ^= 2**6  # the highest byte of the last residue
            reply.content["update"]["flat"] = Array(value)
        return reply

    grid = real.grid()
    grid.nodes[2 if who == "node" else 10].tamper = garbled
    with caplog.at_level(logging.WARNING):
        real.make(**BOTH_NODES).start(grid, record(np.zeros(SIZE)))
    assert "sent something" in caplog.text
    assert [o.state for o in openings(real)] == ["released", "spent", *["released"] * 4]


# What the record says.


def test_the_record_says_against_whom_epsilon_holds(real: RealKeepers) -> None:
    """ε by the number of keepers, and rounds that are spent count: from the ledger alone, in every form of it."""
    grid = real.grid()
    fail_once(grid, 11, round=2)
    real.make().start(grid, record(np.zeros(SIZE)), num_rounds=4)
    verification = verify(real.ledger)
    assert (verification.problems, verification.released) == ((), 4)
    keepers = verification.keepers
    assert (keepers.names, keepers.colluding, keepers.spent) == (("k0", "k1", "k2"), 1, 1)
    plan = Plan(**PLAN)
    assert keepers.planned[1].epsilon == plan.guarantee().epsilon
    assert keepers.so_far[1].epsilon == plan.guarantee(released=4).epsilon
    assert keepers.planned[0].epsilon < keepers.planned[1].epsilon < keepers.planned[2].epsilon < np.inf
    assert keepers.planned[3].guarantee is None
    statement = privacy_statement(real.ledger)
    assert "the user's" in statement["statement"]
    assert "them nothing" in statement["statement"]
    assert statement["private"]
    page = statement_markdown(json.loads(json.dumps(statement)))
    assert "3 keepers" in page
    assert "consumed without" in page
    described = json.loads(json.dumps(export(real.ledger), allow_nan=False))["verification"]["keepers"]
    assert [found["epsilon"] for found in described["planned"]][3] is None
    for command in ("show", "verify"):
        output = run("ledger", command, real.ledger)
        assert output.exit_code == 0, output.output
        # A table's cell goes on in the next line, at a word that depends on the width that the process first saw.
        assert "rounds consumed" in " ".join(output.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("DELETE FROM openings WHERE round = 1", "no-opening"),
        ("UPDATE openings SET keepers = '[\"k0\"]' WHERE round = 0", "other-keepers"),
        ('UPDATE openings SET keepers = \'["k0", "k1", "x"]\'', "other-keepers"),
        ("UPDATE openings SET list_hash = zeroblob(32) WHERE round = 0", "no-opening"),
    ],
)
def test_records_of_keepers_that_contradict_themselves_are_told(real: RealKeepers, change: str, problem: str) -> None:
    real.make().start(real.grid(), record(np.zeros(SIZE)), num_rounds=2)
    edit(real.ledger, change)
    assert problem in [found.reason for found in verify(real.ledger).problems]


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"participation": Participation(rounds=6, min_separation=3, sampling="balls-in-bins")}, "sampling 'none'"),
        ({"key": NoiseKey.generate()}, "simulated keepers go with a simulation key"),
    ],
)
def test_what_keepers_cannot_promise_is_refused_before_anything_is_opened(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
    with pytest.raises(TypeError, match="keepers must"):
        make("keepers.toml")


def test_a_node_with_keepers_sends_nothing_in_the_clear_and_one_without_cannot_take_part() -> None:
    grid = two_nodes(SIMULATED)
    with pytest.raises(IncompleteRunError):
        make(None).start(grid, record(np.zeros(SIZE)), timeout=1)
    grid = two_nodes(None)
    with pytest.raises(IncompleteRunError):
        make(SIMULATED).start(grid, record(np.zeros(SIZE)), timeout=1)


def test_a_run_with_just_enough_users_has_two_nodes_in_every_round_and_one_node_is_asked_nothing() -> None:
    users = names(12)
    grid = FakeGrid({1: node(users[:9]), 2: node(users[9:])})  # a user of node 2 in each of three rounds
    assert make().start(grid, record(np.zeros(SIZE))).complete
    grid = FakeGrid({1: node(users)})
    with pytest.raises(IncompleteRunError, match="fewer than"):
        make().start(grid, record(np.zeros(SIZE)))
    assert not any(is_training(message) for message in grid.sent)


def test_the_log_says_against_whom_epsilon_holds(caplog) -> None:
    with caplog.at_level(logging.INFO):
        make().start(two_nodes(), record(np.zeros(SIZE)), num_rounds=1)
    assert "keepers: simulated-00" in caplog.text
    assert "(the plan's)" in caplog.text
    assert "ε ≤ ∞" in caplog.text
    assert "keepers their" in caplog.text


def test_models_of_rounds_around_a_spent_one_do_not_overwrite_each_other(real: RealKeepers) -> None:
    """The two files take turns by model, not by round: else a spent round would put the new model over the last one."""
    grid = real.grid()
    fail_once(grid, 11, round=2)
    strategy = real.make()
    result = strategy.start(grid, record(np.zeros(SIZE)), num_rounds=3)  # 0 and 1 released, 2 spent
    np.testing.assert_array_equal(released_model(real.ledger)["w"], result.arrays["w"].numpy())
    again = real.make().start(real.grid(), record(np.zeros(SIZE)), num_rounds=1)
    np.testing.assert_array_equal(released_model(real.ledger)["w"], again.arrays["w"].numpy())


def test_a_run_ends_where_its_last_round_is_spent(real: RealKeepers) -> None:
    grid = real.grid()
    fail_once(grid, 10, round=5)
    strategy = real.make()
    result = strategy.start(grid, record(np.zeros(SIZE)))
    assert result.complete
    assert strategy.releases == 6


@pytest.mark.parametrize(("lost", "ends"), [([0, 1, 3, 4], False), ([1, 2, 3], True)])
def test_three_consumed_rounds_in_a_row_end_a_run(real: RealKeepers, lost: list[int], ends: bool) -> None:
    """Each costs its users a participation, and a node or keeper that spoils sums does not mend itself."""
    grid = real.grid()
    grid.nodes[11].tamper = lambda request, reply: None if opening_asked(request).get("round") in lost else reply
    with pytest.raises(IncompleteRunError, match="keepers' logs") if ends else nullcontext():
        real.make().start(grid, record(np.zeros(SIZE)))
    states = ["spent" if round in lost else "released" for round in range(6)]
    assert [opened.state for opened in openings(real)] == states[: 4 if ends else 6]


def test_a_resumed_run_needs_the_same_keepers(real: RealKeepers, tmp_path: Path) -> None:
    real.make().start(real.grid(), record(np.zeros(SIZE)), num_rounds=1)
    (tmp_path / "other").mkdir()
    other = RealKeepers(tmp_path / "other")
    with pytest.raises(ValueError, match="its configuration"):
        make(other.keepers, key=real.key, ledger=real.ledger).start(real.grid(), record(np.zeros(SIZE)))
