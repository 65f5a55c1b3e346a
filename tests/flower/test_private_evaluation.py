"""Evaluation on users' data as noised sums: what one user moves, what is told, what the record proves, ε with the training."""

import itertools
import logging
import math
from dataclasses import replace
from pathlib import Path

import command_line
import ledgers
import numpy as np
import pytest
from fake_grid import FakeGrid, FakeNode, Killed
from flower_runs import hosting, one_user
from flwr.app import Array, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_plan
from shared import record
from sql import edit

from fedcgd import BLT, DPSGD, LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.accounting import PastRun, compose
from fedcgd.accounting.guarantee import rounded_up
from fedcgd.ledger import JointBudget, Ledger, joint, seal, verify
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice
from fedcgd.participation.cohorts import cohort
from fedcgd.participation.history import History
from fedcgd.release.run_noise import NoiseSource
from fedcgd_flower import (
    AdaptiveClipping,
    CorrelatedNoise,
    PrivateEvaluation,
    clipped_update_mod,
    sequential_training,
)
from fedcgd_flower.messages import NoUpdateError, answer

KEY = NoiseKey.simulation(11)
BOUNDS = {"eval_loss": 4.0, "eval_acc": 1.0}
USERS = 12
ROUNDS = 6


def truth(user: str) -> dict[str, float]:
    number = int(user[1:])
    return {"eval_loss": number / 4, "eval_acc": 1 - number / 20}


def pool(users, measure=None) -> FakeNode:
    def train(model, user, config, context):
        return record(model["w"].numpy() + 0.1)

    def evaluate(model, user, config, context):
        assert config["server-round"] > 0
        assert model["w"].numpy().any()  # a released model, not the initial one
        return (measure or truth)(user)

    return hosting(users, sequential_training(train), evaluate=evaluate)


def on_training_alone(message: Message, context, call_next) -> Message:
    """The mod, as on the train function alone."""
    called = clipped_update_mod if message.metadata.message_type == "train" else lambda *given: given[2](*given[:2])
    return called(message, context, call_next)


def single(user: str, mod=clipped_update_mod, measure=None) -> FakeNode:
    node = one_user(user, lambda model: model + 0.1, mod)

    @node.app.evaluate()
    def evaluate(message: Message, context) -> Message:
        message.content["arrays"]
        metrics = MetricRecord((measure or truth)(user) | {"num-examples": 3})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return node


def names(count: int = USERS) -> list[str]:
    return [f"u{i}" for i in range(count)]


def training(rounds: int = ROUNDS) -> Plan:
    return make_plan(LambdaCGD(0.8), Participation(rounds=rounds), noise_multiplier=5.0)


def evaluation(*, evaluations: int = 3, every: int = 2, noise_multiplier: float = 1e-6, bounds=None, **options):
    participation = {name: options.pop(name) for name in ("min_separation", "max_participations") if name in options}
    plan = make_plan(
        options.pop("mechanism", DPSGD()),
        Participation(rounds=evaluations, **participation),
        noise_multiplier=noise_multiplier,
    )
    return PrivateEvaluation(plan=plan, bounds=bounds or BOUNDS, every=every, **options)


def make(private: PrivateEvaluation, *, users: int = USERS, rounds: int = ROUNDS, **options) -> CorrelatedNoise:
    defaults = {"key": KEY, "cohort_size": users, "patience": 0.0, "evaluation": private}
    return CorrelatedNoise(FedAvg(), training(rounds), **defaults | options)


def start(strategy: CorrelatedNoise, grid: FakeGrid, **options):
    return strategy.start(grid, record(np.zeros(3)), **options)


def evaluated_users(grid: FakeGrid) -> list[list[str]]:
    """Users asked in each evaluation, in order."""
    rounds: dict[tuple[int, int], list[str]] = {}
    for message in grid.sent:
        if message.metadata.message_type == "evaluate":
            task = message.content["fedcgd"]
            rounds.setdefault((task["round"], task["attempt"]), []).extend(task["users"])
    return [rounds[key] for key in sorted(rounds)]


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=5),
    st.sampled_from([1e-3, 1.0, 4.0, 1e6]),
)
def test_one_user_adds_a_vector_of_norm_at_most_1(values: list[float], bound: float) -> None:
    """∞ and negative numbers included; the neighbour without the user has zeros there."""
    metrics = {f"m{i}": value for i, value in enumerate(values)}
    grid = Lattice.fitting(clip_norm=1.0, size=len(values), stddev=1.0)
    vector = grid.from_steps(answer(metrics, dict.fromkeys(metrics, bound), grid))
    assert np.linalg.norm(vector) <= 1
    expected = np.clip(values, 0, bound) / bound - 0.5
    np.testing.assert_allclose(vector, expected * 2 / math.sqrt(len(values)), atol=grid.step)


@pytest.mark.parametrize(
    "bad",
    [{"eval_loss": math.nan, "eval_acc": 1.0}, {"eval_acc": 1.0}, {"eval_loss": "4711", "eval_acc": "x 4711"}, None],
)
def test_no_number_is_no_answer_and_named_by_its_metric_alone(bad) -> None:
    with pytest.raises(NoUpdateError, match=r"eval_(loss|acc)") as raised:
        answer(bad, BOUNDS, Lattice(2.0**-10))
    assert "4711" not in str(raised.value)


@pytest.mark.parametrize("kind", ["pool", "mod"])
def test_without_noise_to_speak_of_the_means_are_the_true_ones(kind: str) -> None:
    users = names()
    grid = FakeGrid({1: pool(users)} if kind == "pool" else {i: single(user) for i, user in enumerate(users)})
    result = start(make(evaluation()), grid)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 6]
    for metrics in result.evaluate_metrics_clientapp.values():
        for name in BOUNDS:
            assert metrics[name] == pytest.approx(
                np.mean([truth(user)[name] for user in users]), abs=2e-3 * BOUNDS[name]
            )


@pytest.mark.parametrize("kind", ["pool", "mod"])
@pytest.mark.parametrize("lie", [1e9, math.inf, -1e9, math.nan])
def test_one_user_with_an_absurd_answer_moves_the_mean_by_its_share(lie: float, kind: str) -> None:
    def measure(user: str):
        return {"eval_loss": lie, "eval_acc": lie} if user == "u0" else {"eval_loss": 2.0, "eval_acc": 0.5}

    users = names()
    grid = FakeGrid(
        {1: pool(users, measure)} if kind == "pool" else {i: single(u, measure=measure) for i, u in enumerate(users)}
    )
    metrics = start(make(evaluation()), grid).evaluate_metrics_clientapp[6]
    for name, bound in BOUNDS.items():
        # Everybody else is at the middle, where nothing is added. In the sum of norm-1 vectors this one moves by at most 1.
        assert abs(metrics[name] / bound - 0.5) <= 0.5 / USERS + 1e-3
        assert math.isfinite(metrics[name])


def test_a_hostile_node_moves_the_sum_by_no_more_than_its_users() -> None:
    users = names()
    grid = FakeGrid({1: pool(users[:-1], lambda user: {"eval_loss": 2.0, "eval_acc": 0.5}), 2: pool(users[-1:])})

    def lie(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "evaluate":
            array = np.full(2, -(2**31), np.int32)
            reply.content["update"]["flat"] = Array(array)
            reply.content["fedcgd"]["checksum"] = int(array.sum(dtype=np.int64))
        return reply

    grid.nodes[2].tamper = lie
    metrics = start(make(evaluation()), grid).evaluate_metrics_clientapp[6]
    moved = np.array([metrics[name] / bound - 0.5 for name, bound in BOUNDS.items()]) * 2 / math.sqrt(2) * USERS
    assert 0.99 < np.linalg.norm(moved) <= 1.001


def test_the_noise_is_that_of_the_plan_from_its_own_part_of_the_key() -> None:
    """Measured = bound · ((Σ + σZ) / scale / cohort + 1/2), Z of the stream "evaluation", and not that of the training."""
    sigma = 3.0
    result = start(make(evaluation(noise_multiplier=sigma)), FakeGrid({1: pool(names())}))
    stream = NoiseStream(KEY.noise_of("evaluation"))
    assert KEY.noise_of("evaluation") != KEY.noise
    scale = 2 / math.sqrt(2)
    for evaluation_round, release in enumerate([2, 4, 6]):
        z = stream.normal(evaluation_round, 0, 0, 2).astype(np.float64)
        for i, (name, bound) in enumerate(BOUNDS.items()):
            mean = np.mean([truth(user)[name] for user in names()])
            expected = mean + bound * sigma * z[i] / scale / USERS
            smoothing = 4 * bound * sigma / 256 / scale / USERS
            assert result.evaluate_metrics_clientapp[release][name] == pytest.approx(
                expected, abs=smoothing + 1e-3 * bound
            )
    noise = evaluation(noise_multiplier=sigma).noise(USERS)
    assert noise["eval_loss"] == pytest.approx(4 * sigma / scale / USERS)
    correlated = evaluation(noise_multiplier=sigma, mechanism=LambdaCGD(0.5)).noise(
        USERS
    )  # rows of 1 and −1/2, but the first
    assert correlated["eval_loss"] == pytest.approx(4 * sigma * math.sqrt(1.25) / scale / USERS)


def test_who_is_asked_keeps_to_the_plan_of_the_evaluations(tmp_path: Path) -> None:
    grid = FakeGrid({1: pool(names())})
    private = evaluation(evaluations=6, every=1, cohort_size=4, min_separation=3, max_participations=2)
    start(make(private, ledger=tmp_path / "run.db"), grid)
    asked = evaluated_users(grid)
    assert [len(users) for users in asked] == [4] * 6
    choices = KEY.choices_of("evaluation")  # not the training's: who takes part in one tells nothing about the other
    first = cohort(private.plan.participation, 0, names(), History({}, {}), cohort_size=4, key=choices)
    assert first is not None
    assert set(asked[0]) == set(first)
    assert all(not set(asked[i]) & set(asked[j]) for i, j in itertools.combinations(range(6), 2) if j - i < 3)
    checked = verify(tmp_path / "run.db.evaluation")
    assert checked.problems == ()
    assert checked.released == 6


def test_the_last_model_is_evaluated_whatever_the_distance() -> None:
    result = start(make(evaluation(every=4)), FakeGrid({1: pool(names())}))
    assert sorted(result.evaluate_metrics_clientapp) == [4, 6]


def test_too_few_users_leave_the_evaluation_out_and_the_training_goes_on(caplog) -> None:
    private = evaluation(evaluations=6, every=1, cohort_size=8, max_participations=1, min_separation=6)
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result = start(make(private), FakeGrid({1: pool(names())}))
    assert result.complete
    assert sorted(result.evaluate_metrics_clientapp) == [1]
    assert "evaluation: too" in caplog.text


@pytest.mark.parametrize("after", range(10))
@pytest.mark.parametrize("point", ["plan_round", "record_aggregated", "record_released"])
def test_killed_anywhere_the_run_goes_on_without_using_noise_twice(
    point: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.db"
    private = evaluation(noise_multiplier=3.0)
    original, calls = getattr(Ledger, point), itertools.count()

    def dying(*args, **kwargs):
        if next(calls) == after:
            if after % 2:
                original(*args, **kwargs)
            raise Killed
        return original(*args, **kwargs)

    def run():
        return start(make(private, users=4, ledger=path), FakeGrid({1: pool(names(4))}))

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, point, dying)
        if after >= 9:  # six rounds and three evaluations
            run()
        else:
            with pytest.raises(Killed):
                run()
    result = run()
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 6]
    for ledger in (path, path.with_name("run.db.evaluation")):
        assert verify(ledger).problems == ()
    again = run()  # a finished run: nobody is asked again
    assert {k: dict(v) for k, v in again.evaluate_metrics_clientapp.items()} == {
        k: dict(v) for k, v in result.evaluate_metrics_clientapp.items()
    }


@pytest.mark.parametrize("mechanism", [DPSGD(), BLT((0.2, 0.1), (0.9, 0.5))], ids=["independent", "with buffers"])
def test_an_evaluation_that_cannot_be_recorded_is_made_again_by_the_same_process(
    mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fresh noise, and the later ones cancel what was released."""
    added: list[list[int]] = []
    original, add, calls = Ledger.record_released, NoiseSource.add, itertools.count()

    def failing(ledger, round, attempt, model, *args, **kwargs):
        if not model and next(calls) == 1:  # the second evaluation
            raise OSError("disk full")
        return original(ledger, round, attempt, model, *args, **kwargs)

    def listening(noise, total, nonces, stddev):
        if len(total) == len(BOUNDS):
            added.append(list(nonces))
        add(noise, total, nonces, stddev)

    monkeypatch.setattr(Ledger, "record_released", failing)
    monkeypatch.setattr(NoiseSource, "add", listening)
    grid = FakeGrid({1: pool(names())})
    with make(evaluation(noise_multiplier=3.0, mechanism=mechanism)) as strategy:
        with pytest.raises(OSError, match="disk full"):
            start(strategy, grid)
        result = start(strategy, grid)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 6]
    assert added == [[0], [0, 0], [0, 1], [0, 1, 0]]  # the attempts, which are a simulation's nonces


def test_epsilon_of_both_together_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, private = tmp_path / "run.db", evaluation(noise_multiplier=4.0)
    with caplog.at_level(logging.INFO, logger="flwr"):
        result = start(make(private, ledger=path, key=NoiseKey.generate()), FakeGrid({1: pool(names())}))
    # μ² = sensitivity²/σ² adds up: that of the whole training and of three evaluations by everybody.
    sigma = 1 / math.sqrt(3 / 4.0**2)
    runs = [
        PastRun(mechanism=training().mechanism, participation=training().participation, noise_multiplier=5.0),
        PastRun(mechanism=DPSGD(), participation=Participation(rounds=1), noise_multiplier=sigma),
    ]
    expected = compose(runs, delta=1e-5).epsilon
    assert result.evaluate_metrics_clientapp[6]["epsilon-with-training"] == pytest.approx(expected, rel=1e-9)
    assert expected > training().guarantee().epsilon
    for paths in ([path, path.with_name("run.db.evaluation")], [path]):
        assert joint(paths).worst.planned.epsilon == pytest.approx(expected, rel=1e-9)
    assert verify(path).with_evaluations == joint([path]).worst.planned
    for command in (["ledger", "show"], ["ledger", "verify"], ["ledger", "compose"]):
        assert rounded_up(expected) in command_line.run(*command, path).stdout
    for name in ("statement.md", "report.html", "statement.json"):
        assert command_line.run("report", path, "-o", tmp_path / name).exit_code == 0
        assert f"together, are ({rounded_up(expected)}, 1e-05)-diff" in (tmp_path / name).read_text()
    refused = command_line.run("report", path.with_name("run.db.evaluation"), "-o", tmp_path / "part.md")
    assert (refused.exit_code, (tmp_path / "part.md").exists()) == (2, False)
    found = command_line.figures("ledger", "verify", path)
    assert found["with_evaluations"]["epsilon"] == pytest.approx(expected, rel=1e-9)
    for words in (
        "training and evaluations together: ε ≤",
        "δ = 1e-05",
        "zero out one user",
        "samplings: none, none",
    ):
        assert words in caplog.text
    assert "private: epsilon-with-training" in caplog.text


def test_later_runs_pay_for_the_evaluations_whether_they_are_named_or_not(tmp_path: Path) -> None:
    """One training is ε ≤ 6.1, two are 9.2, and with three evaluations at σ = 4 between them 9.4."""
    path, moved = tmp_path / "run.db", tmp_path / "moved.db"
    start(make(evaluation(noise_multiplier=4.0), ledger=path, key=NoiseKey.generate()), FakeGrid({1: pool(names())}))
    beside = path.with_name("run.db.evaluation")
    past = PastRun(mechanism=training().mechanism, participation=training().participation, noise_multiplier=5.0)
    sigma = 4.0 / math.sqrt(3)
    three = PastRun(mechanism=DPSGD(), participation=Participation(rounds=1), noise_multiplier=sigma)
    truth, without = (compose(runs, delta=1e-5).epsilon for runs in ([past, past, three], [past, past]))
    assert truth > 1.01 * without

    def refused(epsilon: float, *after: Path) -> int:
        joint_budget = JointBudget(epsilon=epsilon, delta=1e-5, after=after)
        found = joint_budget.admission(training(), key=NoiseKey.generate())
        assert len(found.configuration["budget"]["after"]) == 2
        return len(found.refused)

    for named in ([path], [path, beside], [beside, path]):
        assert refused(truth * (1 - 1e-6), *named) == USERS
        assert refused(truth * (1 + 1e-6), *named) == 0
    beside.rename(moved)
    for call in (joint, lambda paths: refused(99, *paths)):
        with pytest.raises(ValueError, match="which says"):
            call([path])
        with pytest.raises(ValueError, match="the evaluations"):
            call([moved])
    other = tmp_path / "other.db"
    start(make(evaluation(noise_multiplier=4.0), ledger=other, key=NoiseKey.generate()), FakeGrid({1: pool(names())}))
    other.with_name("other.db.evaluation").rename(beside)
    with ledgers.refused("evaluations-missing"):
        joint([path])


def test_evaluations_that_are_not_over_are_waited_for_and_sound(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    private = evaluation(evaluations=4, noise_multiplier=4.0)
    start(make(private, ledger=path, key=NoiseKey.generate()), FakeGrid({1: pool(names())}))
    later = JointBudget(epsilon=50, delta=1e-5, after=[path])
    with pytest.raises(ValueError, match="4 rounds"):
        later.admission(training(), key=NoiseKey.generate())
    beside = path.with_name("run.db.evaluation")
    seal(beside, None)
    assert not later.admission(training(), key=NoiseKey.generate()).refused
    edit(beside, "UPDATE users SET participations = 0")
    with pytest.raises(ValueError, match="contradict each"):
        later.admission(training(), key=NoiseKey.generate())
    result = command_line.run("ledger", "compose", path)
    assert result.exit_code == 1
    assert f"{beside}: 12 users have counters that differ" in result.stdout


def test_a_run_without_evaluations_stays_without(tmp_path: Path) -> None:
    """Later runs were allowed for what it was begun with."""
    path = tmp_path / "run.db"
    plain = CorrelatedNoise(FedAvg(), training(), key=KEY, cohort_size=USERS, patience=0.0, ledger=path)
    start(plain, FakeGrid({1: pool(names())}))
    with pytest.raises(ValueError, match="configuration is"):
        start(make(evaluation(), ledger=path), FakeGrid({1: pool(names())}))
    assert verify(path).with_evaluations is None
    assert len(joint([path]).worst.ledgers) == 1


def test_real_keys_give_the_evaluations_noise_of_their_own(tmp_path: Path) -> None:
    key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
    path = tmp_path / "run.db"
    private = evaluation()
    start(make(private, ledger=path, key=key), FakeGrid({1: pool(names())}), num_rounds=3)
    result = start(make(private, ledger=path, key=key), FakeGrid({1: pool(names())}))
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 6]
    (path.with_name("run.db.evaluation")).unlink()
    with pytest.raises(ValueError, match="the record"):
        start(make(private, ledger=path, key=key), FakeGrid({1: pool(names())}))
    other = tmp_path / "other.db"
    start(make(private, ledger=other, key=NoiseKey.generate()), FakeGrid({1: pool(names())}))
    other.with_name("other.db.evaluation").rename(path.with_name("run.db.evaluation"))
    with pytest.raises(ValueError, match="another run"):
        start(make(private, ledger=path, key=key), FakeGrid({1: pool(names())}))


def test_a_mod_on_the_train_function_alone_tells_nothing_and_says_what_to_do(caplog) -> None:
    grid = FakeGrid({i: single(user, on_training_alone) for i, user in enumerate(names())})
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result = start(make(evaluation()), grid)
    assert result.complete
    assert not result.evaluate_metrics_clientapp
    assert "train function" in caplog.text
    assert "no evaluation" in caplog.text


def test_what_is_not_answered_counts_as_the_middle() -> None:
    users = names()
    grid = FakeGrid({1: pool(users[:6], lambda user: {"eval_loss": 4.0, "eval_acc": 1.0}), 2: pool(users[6:])})
    grid.nodes[2].tamper = lambda request, reply: (
        Message(RecordDict(), reply_to=request) if request.metadata.message_type == "evaluate" else reply
    )
    metrics = start(make(evaluation()), grid).evaluate_metrics_clientapp[6]
    assert metrics["eval_acc"] == pytest.approx(0.75, abs=1e-3)
    assert metrics["eval_loss"] == pytest.approx(3.0, abs=4e-3)


def test_what_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="6 evaluations"):
        make(evaluation(every=1))
    with pytest.raises(ValueError, match="6 evaluations"):
        make(evaluation(every=1, evaluations=5))
    with pytest.raises(ValueError, match="joint budget"):
        make(evaluation(), budget=JointBudget(epsilon=1, delta=1e-5, after=[]))
    with pytest.raises(TypeError, match="PrivateEvaluation"):
        make(training())
    with pytest.raises(ValueError, match="clip_norm 1"):
        PrivateEvaluation(plan=Plan(**vars(training()) | {"clip_norm": 0.5}), bounds=BOUNDS)
    for wrong in ({"bounds": {"eval_acc": math.inf}}, {"every": 0}, {"cohort_size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("s")):
            evaluation(**wrong)
    with pytest.raises(ValueError, match="bounds must"):
        PrivateEvaluation(plan=training(), bounds={})


def test_the_two_ledgers_are_sealed_one_after_the_other(tmp_path: Path) -> None:
    path, key_file = tmp_path / "run.db", tmp_path / "noise.key"
    key = NoiseKey.from_file(key_file, create=True)
    start(make(evaluation(), ledger=path, key=key), FakeGrid({1: pool(names())}))
    with pytest.raises(ValueError, match=r"run\.db\.evaluation"):
        seal(path, key_file)
    seal(path.with_name("run.db.evaluation"), None)
    seal(path, key_file)
    assert not key_file.exists()


@pytest.mark.parametrize(
    "sampling", [{"sampling": "poisson", "sampling_rate": 0.5}, {"sampling": "balls-in-bins", "min_separation": 3}]
)
def test_rounds_and_evaluations_of_secret_samplings(sampling) -> None:
    """With an adaptive norm too: everything runs, and ε together is below that without amplification."""
    plan = make_plan(DPSGD(), Participation(rounds=6, **sampling), noise_multiplier=1.0)
    strategy = CorrelatedNoise(
        FedAvg(),
        plan,
        key=KEY,
        cohort_size=4,
        patience=0.0,
        adaptive_clipping=AdaptiveClipping(count_noise=0.5),
        evaluation=PrivateEvaluation(plan=plan, bounds=BOUNDS),
    )
    result = start(strategy, FakeGrid({1: pool(names())}))
    assert result.complete
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3, 4, 5, 6]
    known = PastRun(
        mechanism=DPSGD(),
        participation=Participation(rounds=6, min_separation=plan.participation.min_separation),
        noise_multiplier=1.0,
    )
    together = result.evaluate_metrics_clientapp[6]["epsilon-with-training"]
    assert plan.guarantee().epsilon < together < compose([known, known], delta=1e-5).epsilon
    assert strategy.clip_norm != 1.0


def test_an_evaluation_of_a_secret_sampling_is_released_however_few_answer() -> None:
    """Whether it is there must not tell who was drawn."""
    private = evaluation(noise_multiplier=3.0)
    private = replace(
        private,
        plan=replace(private.plan, participation=Participation(rounds=3, sampling="poisson", sampling_rate=0.5)),
    )
    grid = FakeGrid({1: pool(names(), measure=lambda user: {})})  # nobody measures what is asked for
    result = start(make(private), grid)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 6]
