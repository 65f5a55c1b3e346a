"""Private evaluations whose noise comes from keepers: what is released and asked, what a failure costs, what is on record."""

import logging
from dataclasses import replace
from pathlib import Path

import command_line
import numpy as np
import pytest
from click.testing import Result
from fake_grid import FakeGrid, FakeNode
from flower_runs import names, node, one_user
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from keeper_runs import SIMULATED, RealKeepers, make, opening_asked
from plans import make_plan
from shared import record
from sql import edit, rows

from fedcgd import DPSGD, Participation
from fedcgd.keepers import EVALUATION, TRAINING, Keepers
from fedcgd.keepers.record import read, record_file
from fedcgd.ledger import verify
from fedcgd.ledger.statement import privacy_statement
from fedcgd.ledger.verification import with_evaluations
from fedcgd_flower import ClippedUpdateMod, PrivateEvaluation
from fedcgd_flower.noise_provider import question_of

SIZE = 6
BOUNDS = {"eval_loss": 4.0, "eval_acc": 1.0}


def truth(user: str) -> dict[str, float]:
    return {"eval_loss": int(user[1:]) / 4, "eval_acc": 0.25}


def evaluating(users, keepers: Keepers | None, measure=truth, **options) -> FakeNode:
    return node(users, evaluate=lambda model, user, config, context: measure(user), keepers=keepers, **options)


def two_nodes(keepers: Keepers | None = SIMULATED, **options) -> FakeGrid:
    return FakeGrid(
        {1: evaluating(names(12)[::2], keepers, **options), 2: evaluating(names(12)[1::2], keepers, **options)}
    )


def evaluation(*, noise_multiplier: float = 0.05, rounds: int = 3, **options) -> PrivateEvaluation:
    plan = make_plan(DPSGD(), Participation(rounds=rounds), noise_multiplier=noise_multiplier)
    return PrivateEvaluation(plan=plan, bounds=BOUNDS, every=2, **{"cohort_size": 12} | options)


def run(strategy, grid: FakeGrid, **options):
    return strategy.start(grid, record(np.zeros(SIZE)), **options)


def told(result) -> list[dict[str, float]]:
    return [{name: metrics[name] for name in BOUNDS} for metrics in result.evaluate_metrics_clientapp.values()]


@pytest.fixture
def real(tmp_path: Path) -> RealKeepers:
    return RealKeepers(tmp_path)


def real_grid(real: RealKeepers, **options) -> FakeGrid:
    grid = two_nodes(real.keepers, **options)
    for i, path in enumerate(real.files):
        grid.nodes[10 + i] = evaluating([], real.keepers, config={"keeper": str(path)})
    return grid


def verified_records(real: RealKeepers) -> Result:
    records = [f"{path.stem}={record_file(path)}" for path in real.files]
    return command_line.run("keeper", "verify", *records, "--ledger", real.ledger)


# What is released.


def test_one_simulated_keeper_measures_what_the_server_alone_would() -> None:
    private = evaluation(noise_multiplier=2.0)
    central = run(make(None, evaluation=private), two_nodes(None))
    one = Keepers.simulation(7, 1, colluding=0)
    assert told(run(make(one, evaluation=private), two_nodes(one))) == told(central)
    assert len(told(central)) == 3


def test_the_mod_masks_evaluations_too_and_answers_none_in_the_clear() -> None:
    ran: list[str] = []

    def single(user: str) -> FakeNode:
        node = one_user(user, lambda model: model, ClippedUpdateMod(keepers=SIMULATED))

        @node.app.evaluate()
        def evaluate(message: Message, context) -> Message:
            ran.append(user)
            return Message(RecordDict({"metrics": MetricRecord(truth(user))}), reply_to=message)

        return node

    grid = FakeGrid({i: single(user) for i, user in enumerate(names(12))})
    metrics = told(run(make(evaluation=evaluation()), grid))[-1]
    assert metrics["eval_loss"] == pytest.approx(1.375, abs=0.08)
    asked = next(m for m in grid.sent if m.metadata.message_type == "evaluate")
    before = len(ran)
    for dropped in ("fedcgd-keepers", "fedcgd"):  # what a server could read alone, and what is no private evaluation
        message = Message(RecordDict(dict(asked.content)), dst_node_id=1, message_type="evaluate")
        del message.content[dropped]
        [reply] = grid.send_and_receive([message])
        assert reply.has_error()
    assert len(ran) == before


@pytest.mark.parametrize(
    ("server", "nodes", "said"),
    [(SIMULATED, None, "given none"), (None, SIMULATED, "could read")],
    ids=["server", "nodes"],
)
def test_no_evaluation_where_either_server_or_node_has_no_keepers(server, nodes, said: str) -> None:
    asking = two_nodes(server)
    run(make(server, evaluation=evaluation()), asking)
    asked = next(m for m in asking.sent if m.metadata.message_type == "evaluate")
    app = ClientApp(mods=[ClippedUpdateMod(keepers=nodes)])
    app.evaluate()(lambda message, context: pytest.fail("nothing is measured"))
    grid = FakeGrid(
        {1: evaluating(names(12), nodes, lambda user: pytest.fail("nothing is measured")), 2: FakeNode(app)}
    )
    for reply in grid.send_and_receive(
        [Message(asked.content, dst_node_id=i, message_type="evaluate") for i in (1, 2)]
    ):
        assert said in reply.error.reason


def test_nothing_but_the_masked_integers_tells_one_users_answers_from_anothers() -> None:
    def described(measure) -> list[dict]:
        kept: list[Message] = []

        def keep(request: Message, reply: Message) -> Message:
            if request.metadata.message_type == "evaluate":
                kept.append(reply)
            return reply

        run(make(evaluation=evaluation()), two_nodes(measure=measure, tamper=keep))
        assert all(not reply.has_error() and set(reply.content) == {"fedcgd", "update"} for reply in kept)
        tasks = [dict(reply.content["fedcgd"]) for reply in kept]
        lengths = [{name: len(task.pop(name)) for name in ("ticket", "sealed")} for task in tasks]
        arrays = [reply.content["update"]["flat"] for reply in kept]
        return [
            task | length | {"dtype": array.dtype, "shape": tuple(array.shape)}
            for task, length, array in zip(tasks, lengths, arrays, strict=True)
        ]

    def failing(user: str):
        raise RuntimeError("this user's record says HIV")

    honest = described(truth)
    assert len(honest) == 6
    for measure in (failing, lambda user: {}, lambda user: {"eval_loss": float("nan"), "eval_acc": 1e30}):
        assert described(measure) == honest


# What is asked, and what a failure costs.


def test_each_kind_has_its_rounds_at_the_keepers_and_in_a_ledger_of_its_own(real: RealKeepers) -> None:
    grid = real_grid(real)
    strategy = real.make(evaluation=evaluation())
    result = run(strategy, grid)
    assert len(told(result)) == 3
    for path in real.files:
        opened = [(one.kind, one.round) for one in read(record_file(path)).openings]
        assert opened == [(TRAINING, round) for round in range(6)] + [(EVALUATION, round) for round in range(3)]
    questions = [question_of(m) for m in grid.sent if m.metadata.dst_node_id >= 10]
    assert questions.count("/open") == 3 * 9
    assert questions.count("/check") == 3 * 2  # in the first round of each kind
    beside = real.ledger.with_name("run.db.evaluation")
    assert verify(real.ledger).problems == verify(beside).problems == ()
    assert verify(beside).keepers.names == verify(real.ledger).keepers.names
    assert rows(beside, "SELECT round FROM openings") == [(0,), (1,), (2,)]
    verified = verified_records(real)
    assert verified.exit_code == 0, verified.output
    assert "included: k0" in " ".join(verified.stdout.split())
    shown = command_line.figures("keeper", "show", real.files[0])
    assert (shown["rounds_opened"], shown["evaluations_opened"]) == ([0, 1, 2, 3, 4, 5], [0, 1, 2])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE openings SET list_hash = zeroblob(32) WHERE round = 1", "evaluation round 1: the list in"),
        ("DELETE FROM openings WHERE round = 2", "evaluation round 2 was opened by k0, k1, k2"),
    ],
)
def test_records_of_evaluations_that_contradict_their_ledger_are_named(real: RealKeepers, change, problem) -> None:
    run(real.make(evaluation=evaluation()), real_grid(real))
    edit(real.ledger.with_name("run.db.evaluation"), change)
    verified = verified_records(real)
    assert verified.exit_code == 1
    assert problem in verified.stdout


def test_an_evaluation_whose_opening_fails_is_spent_and_the_training_goes_on(real: RealKeepers, caplog) -> None:
    """One is missing at the end then, because the plan has no further one."""
    failed: list[int] = []

    def silent_once(request: Message, reply: Message) -> Message | None:
        asked = opening_asked(request)
        if (asked.get("kind"), asked.get("round")) == (EVALUATION, 1):
            failed.append(1)
            return None
        return reply

    grid = real_grid(real)
    grid.nodes[11].tamper = silent_once
    with caplog.at_level(logging.WARNING):
        result = run(real.make(evaluation=evaluation()), grid, timeout=1)
    assert result.complete
    assert failed
    assert sorted(result.evaluate_metrics_clientapp) == [2, 6]
    assert "keeper k1" in caplog.text
    again = run(real.make(evaluation=evaluation()), real_grid(real))  # all that are planned are released or spent
    assert sorted(again.evaluate_metrics_clientapp) == [2, 6]
    checked = verify(real.ledger.with_name("run.db.evaluation"))
    assert (checked.released, checked.keepers.spent, checked.problems) == (3, 1, ())


def test_a_keeper_that_is_away_before_an_evaluation_spends_none(real: RealKeepers) -> None:
    grid = real_grid(real)

    def gone(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "evaluate":
            grid.nodes.pop(12, None)
        return reply

    grid.nodes[1].tamper = gone
    keeper = grid.nodes[12]
    result = run(real.make(evaluation=evaluation()), grid, num_rounds=2, timeout=1)
    assert told(result) == []
    grid.nodes[12] = keeper
    grid.nodes[1].tamper = lambda request, reply: reply
    result = run(real.make(evaluation=evaluation()), grid, timeout=1)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 6]
    assert verify(real.ledger.with_name("run.db.evaluation")).keepers.spent == 0


def test_nodes_that_count_participations_count_those_of_evaluations(tmp_path: Path) -> None:
    """A server that evaluates with a user more often than its plan says gets no answer from the node."""
    counted = {"participations": str(tmp_path / "participations.db")}
    alone = replace(SIMULATED, nodes=1)
    grid = FakeGrid({1: evaluating(names(12), alone, config=counted)})
    run(make(alone, evaluation=evaluation()), grid)
    counts = dict(rows(counted["participations"], "SELECT user, participations FROM users"))
    assert {user: counts[f"evaluation {user}"] for user in names(12)} == dict.fromkeys(names(12), 3)
    asked = [m for m in grid.sent if m.metadata.message_type == "evaluate"]
    again = Message(asked[-1].content, dst_node_id=1, message_type="evaluate")
    [reply] = grid.send_and_receive([again])
    assert reply.has_error()
    assert "2 already" in reply.error.reason


# What is promised.


def test_the_record_says_what_evaluations_and_training_cost_together_by_collusion(real: RealKeepers) -> None:
    private = evaluation(noise_multiplier=4.0)
    run(real.make(evaluation=private), real_grid(real))
    training = real.make(evaluation=private).plan
    both = with_evaluations(training, private.plan).epsilon
    louder = [replace(plan, noise_multiplier=plan.noise_multiplier / 2**0.5) for plan in (training, private.plan)]
    keepers = verify(real.ledger).keepers
    assert keepers.with_evaluations[1] == pytest.approx(both)
    assert keepers.with_evaluations[2] == pytest.approx(with_evaluations(*louder).epsilon)
    assert keepers.with_evaluations[3] == float("inf")
    assert all(
        found.epsilon < joint for found, joint in zip(keepers.planned[:3], keepers.with_evaluations, strict=False)
    )
    said = privacy_statement(real.ledger)["statement"]
    assert f"{keepers.with_evaluations[2]:.2f}"[:-1] in said


def test_a_keeper_that_was_told_of_other_evaluations_is_named(real: RealKeepers) -> None:
    run(real.make(evaluation=evaluation()), real_grid(real))
    edit(
        record_file(real.files[1]),
        "UPDATE run SET agreement = json_set(agreement, '$.evaluation.plan.noise_multiplier', 0.5)",
    )
    verified = verified_records(real)
    assert verified.exit_code == 1
    assert "on evaluations" in verified.stdout
