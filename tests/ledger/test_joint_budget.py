"""A budget for people across runs: who may be in the next run, against compositions that are calculated without fedcgd."""

import logging
import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import command_line
import ledgers
import numpy as np
import pytest
from clock import Clock
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from fake_grid import FakeGrid, is_training
from flower_runs import node
from flwr.serverapp.strategy import FedAvg
from ledgers import reasons, refused, release
from oracles_accounting import gaussian_epsilon
from plans import make_plan
from shared import record
from sql import edit

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.accounting.compose import JOINT_CONDITION
from fedcgd.ledger import JointBudget, Ledger, joint, seal, verify
from fedcgd.mechanisms import DPSGD, LambdaCGD, matrix
from fedcgd_flower import CorrelatedNoise, IncompleteRunError

DELTA = 1e-5
SILOS = Participation(rounds=4, min_separation=2)
PLAN = Plan.calibrated(LambdaCGD(0.8), SILOS, clip_norm=0.5, epsilon=8, delta=DELTA)
COINS = make_plan(
    DPSGD(),
    Participation(rounds=20, sampling="poisson", sampling_rate=0.1),
    clip_norm=0.5,
    noise_multiplier=1.5,
    delta=DELTA,
)


def mu_of(plan: Plan) -> float:
    """Of the user who is in rounds 0, b, 2b, …, which is the worst where C has no negative entry."""
    columns = matrix(plan.mechanism, plan.participation.rounds)[:, :: plan.participation.min_separation]
    return float(np.linalg.norm(columns.sum(axis=1)) / plan.noise_multiplier)


def names(first: int, last: int) -> list[str]:
    return [f"person-{i:03d}" for i in range(first, last)]


def run(
    path: Path, users: list[str], *, plan: Plan = PLAN, budget: JointBudget | None = None, size: int = 4, **options
) -> tuple[CorrelatedNoise, set[str]]:
    """A whole run with these users around; the strategy, and whoever was asked."""
    grid = FakeGrid({1: node(users)})
    options = {"key": NoiseKey.generate(), "patience": 0.0, "trusted_nodes": True} | options
    strategy = CorrelatedNoise(FedAvg(), plan, ledger=path, cohort_size=size, budget=budget, **options)
    strategy.start(grid, record(np.zeros(6)))
    asked = {user for message in grid.sent if is_training(message) for user in message.content["fedcgd"]["users"]}
    return strategy, asked


def recorded(
    path: Path, users: list[str], *, plan: Plan = PLAN, key: NoiseKey | None = None, over: bool = True
) -> Path:
    """The ledger of a run that has asked `users` once, and is sealed if it is `over`."""
    return ledgers.recorded(path, users, plan, key or NoiseKey.generate(), over=over)


def budget(epsilon: float, *after: Path, delta: float = DELTA) -> JointBudget:
    return JointBudget(epsilon=epsilon, delta=delta, after=after)


def test_two_runs_over_overlapping_people(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """8 people in both, 4 in each alone; 8 and 8 are 12.3 together. Three budgets: enough, not enough, none."""
    one, two, three, four = (tmp_path / f"{name}.db" for name in "ABCD")
    _, first = run(one, names(0, 8))
    assert first == set(names(0, 8))
    worst = gaussian_epsilon(math.sqrt(2) * mu_of(PLAN))
    assert gaussian_epsilon(mu_of(PLAN)) == pytest.approx(8, rel=1e-4)

    # Enough, by a hair: everybody may take part, and the worst user's ε is what it is by hand.
    strategy, asked = run(two, names(4, 12), budget=budget(worst * (1 + 1e-6), one))
    assert (asked, strategy._last.selector.over_budget) == (set(names(4, 12)), 0)
    assert joint([one, two]).worst.planned.epsilon == pytest.approx(worst, rel=1e-6)

    # Less by a hair: whoever was in A is not asked, and nobody is above 8.
    with caplog.at_level(logging.INFO, "flwr"):
        strategy, asked = run(three, names(4, 16), budget=budget(worst * (1 - 1e-6), one))
    assert (asked, strategy._last.selector.over_budget) == (set(names(8, 16)), 4)
    said = [record.getMessage() for record in caplog.records if "joint budget" in record.getMessage()]
    assert len(said) == 1
    assert " 4 users" in said[0]
    assert "person-" not in caplog.text
    assert joint([one, three]).worst.planned.epsilon == pytest.approx(8, rel=1e-4)
    assert joint([one, three]).problems == ()

    # Without a budget nobody is refused.
    assert run(four, names(4, 12))[1] == set(names(4, 12))


def test_what_two_ledgers_say_together(tmp_path: Path) -> None:
    one, two = recorded(tmp_path / "A.db", ["ann", "bob"]), recorded(tmp_path / "B.db", ["bob"])
    both, found = math.sqrt(2) * mu_of(PLAN), joint([one, two])
    assert [(group.users, group.ledgers) for group in found.groups] == [(1, (str(one), str(two))), (1, (str(one),))]
    assert found.worst.planned.epsilon == pytest.approx(gaussian_epsilon(both), rel=1e-4)
    first = math.sqrt(2) / PLAN.noise_multiplier  # C[0, 0] = 1
    assert found.worst.released.epsilon == pytest.approx(gaussian_epsilon(first), rel=1e-4)
    assert joint([one, two], user="ann").worst.planned.epsilon == pytest.approx(8, rel=1e-4)
    smaller = joint([one, two], user="bob", delta=1e-9).worst.planned
    assert smaller.epsilon == pytest.approx(gaussian_epsilon(both, 1e-9), rel=1e-4)
    said = command_line.run("ledger", "compose", one, two)
    assert said.exit_code == 0, said.stderr
    assert all(word in said.stdout for word in ("ε ≤ 12.3", "1e-05", "1 user", "zero out one user", "A.db, "))
    assert "bob" not in said.stdout
    figures = command_line.figures("ledger", "compose", one, two)
    assert (figures["problems"], figures["groups"][0]["planned"]["condition"]) == ([], JOINT_CONDITION)


def test_what_cannot_be_composed_is_refused(tmp_path: Path) -> None:
    one, empty = recorded(tmp_path / "A.db", ["ann"]), recorded(tmp_path / "D.db", [])
    two = recorded(tmp_path / "B.db", ["ann"], plan=replace(PLAN, delta=1e-6))
    for paths, options, reason in (
        ([one, two], {}, "several-deltas"),
        ([one, tmp_path / "C.db"], {}, "no-ledger"),
        ([empty], {}, "no-users"),
        ([one], {"user": "eve"}, "unknown-user"),
    ):
        with refused(reason):
            joint(paths, **options)


def test_users_of_three_runs_each_by_their_own_history(tmp_path: Path) -> None:
    """Budget for two of the three plans: who was in both earlier runs is refused, who was in one of them is not."""
    one, two = recorded(tmp_path / "A.db", ["ann", "bob"]), recorded(tmp_path / "B.db", ["bob", "cyd"])
    limit = gaussian_epsilon(math.sqrt(2.5) * mu_of(PLAN))
    admission = budget(limit, one, two).admission(PLAN, key=NoiseKey.generate())
    assert admission.refused == {"bob"}
    assert not budget(admission.cost, one, two).admission(PLAN, key=NoiseKey.generate()).refused
    assert budget(admission.cost * 0.999, one, two).admission(PLAN, key=NoiseKey.generate()).refused == {"bob"}
    assert budget(8.001, one, two).admission(PLAN, key=NoiseKey.generate()).refused == {"ann", "bob", "cyd"}
    assert not budget(20, one, two).admission(PLAN, key=NoiseKey.generate()).refused


def test_the_budget_is_at_its_own_delta(tmp_path: Path) -> None:
    """The same two runs cost more at a smaller δ than that of either plan."""
    one = recorded(tmp_path / "A.db", ["ann"])
    for delta in (DELTA, 1e-9):
        cost = gaussian_epsilon(math.sqrt(2) * mu_of(PLAN), delta)
        assert budget(cost * 0.999, one, delta=delta).admission(PLAN, key=NoiseKey.generate()).refused == {"ann"}
        assert not budget(cost * 1.001, one, delta=delta).admission(PLAN, key=NoiseKey.generate()).refused


@pytest.mark.parametrize("expected_users", [None, 1])
def test_a_budget_that_refuses_too_many_is_told_at_once_with_what_helps(
    tmp_path: Path, expected_users: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 and 8 are 12.3 together, and 10 is the budget."""
    one, together = recorded(tmp_path / "A.db", names(0, 12)), gaussian_epsilon(math.sqrt(2) * mu_of(PLAN))
    monkeypatch.setattr("fedcgd_flower.cohort.time", clock := Clock())
    with pytest.raises(ValueError, match=r"\b12\b.*\b12\b.*budget") as refused:
        run(tmp_path / "B.db", names(0, 12), budget=budget(10, one), patience=60.0, expected_users=expected_users)
    assert clock.now < 30
    for said in re.findall(r"(?:cost up to|a joint budget of) ε = ([0-9.]+)", str(refused.value)):
        assert together <= float(said) < together * 1.01
    with pytest.raises(IncompleteRunError if expected_users else ValueError, match=r"\b8\b.*budget"):
        run(tmp_path / "C.db", names(4, 14), budget=budget(10, one), expected_users=expected_users)


def test_a_start_that_no_budget_admits_leaves_no_key_file(tmp_path: Path) -> None:
    one, key_file = recorded(tmp_path / "A.db", ["ann"]), tmp_path / "noise.key"
    with refused("nobody-may-take-part"):
        run(tmp_path / "B.db", names(0, 8), budget=budget(7.9, one), key=NoiseKey.from_file(key_file, create=True))
    assert not key_file.exists()
    assert not (tmp_path / "B.db").exists()
    NoiseKey.from_file(key_file, create=True)  # one that was there before stays
    with refused("nobody-may-take-part"):
        run(tmp_path / "B.db", names(0, 8), budget=budget(7.9, one), key=NoiseKey.from_file(key_file))
    assert key_file.exists()


def test_a_secret_sampling_before_counts_for_everybody(tmp_path: Path) -> None:
    """Who was drawn and who was not get one answer, and it is that of dp-accounting."""
    sampled = recorded(tmp_path / "A.db", ["drawn"], plan=COINS)
    plain = recorded(tmp_path / "B.db", ["ann"])
    accountant = PLDAccountant()
    coins = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.5))
    accountant.compose(dp_event.SelfComposedDpEvent(coins, 20))
    accountant.compose(dp_event.GaussianDpEvent(1 / mu_of(PLAN)))
    once = accountant.get_epsilon(DELTA)
    key = NoiseKey.generate()
    assert budget(once * 1.01, sampled, plain).admission(PLAN, key=key).refused == {"ann"}
    with refused("nobody-may-take-part"):
        budget(once * 0.99, sampled, plain).admission(PLAN, key=key)
    with refused("nobody-may-take-part"):
        budget(7.99, plain).admission(PLAN, key=key)
    assert not budget(8, recorded(tmp_path / "C.db", [])).admission(PLAN, key=key).refused


def test_a_sampled_run_after_others_is_joint_with_those_it_admitted_alone(tmp_path: Path) -> None:
    """Whoever its budget refused was not in the draw: `joint` does not count it in."""
    one, two = recorded(tmp_path / "A.db", names(0, 8)), tmp_path / "B.db"
    strategy, asked = run(two, names(4, 40), plan=COINS, budget=budget(8.0, one), size=4)
    assert strategy._last.selector.over_budget == 4
    assert asked
    assert asked.isdisjoint(names(0, 8))
    found = joint([one, two])
    assert {(group.users, len(group.ledgers)) for group in found.groups} == {(8, 1), (len(asked), 1)}
    assert found.problems == ()
    # Without A's ledger it says that something is missing.
    assert reasons(joint([two]).problems) == ["ledgers-missing"]


SIX = Plan.calibrated(LambdaCGD(0.8), SILOS, clip_norm=0.5, epsilon=6, delta=DELTA)


def begun(path: Path, users: list[str], limit: JointBudget, key: NoiseKey, *, plan: Plan = PLAN) -> Path:
    """The ledger of a run with this budget that has asked `users`, whomever the budget refuses."""
    with Ledger.open(path, plan=plan, configuration=limit.admission(plan, key=key).configuration, key=key) as ledger:
        release(ledger, 0, users)
    return path


def test_a_budget_sees_every_run_that_the_register_of_its_key_knows(tmp_path: Path) -> None:
    key = NoiseKey.from_file(tmp_path / "keys" / "noise.key", create=True)
    one = recorded(tmp_path / "A.db", names(0, 8), key=key)
    two = recorded(tmp_path / "C.db", names(0, 8), plan=SIX, key=key)
    three = tmp_path / "E.db"
    start = {"path": three, "users": names(0, 16), "key": key}
    with refused("unregistered-before"):
        run(**start, budget=budget(12.5, one))
    assert not three.exists()
    worst = gaussian_epsilon(math.hypot(mu_of(PLAN), mu_of(SIX), mu_of(PLAN)))
    assert run(**start, budget=budget(worst * (1 - 1e-6), one, two))[1] == set(names(8, 16))
    assert joint([one, two, three]).problems == ()

    # Begun since: the run may go on.
    recorded(tmp_path / "F.db", names(0, 8), plan=SIX, key=key)
    run(**start, budget=budget(worst * (1 - 1e-6), one, two))
    # A run that knows of this one has to name all.
    with refused("unregistered-before"):
        run(tmp_path / "G.db", names(8, 16), key=key, budget=budget(20, one))


def test_a_run_without_releases_counts_if_it_may_still_release(tmp_path: Path) -> None:
    key = NoiseKey.from_file(tmp_path / "keys" / "noise.key", create=True)
    one = recorded(tmp_path / "A.db", ["ann"], key=key)
    going = tmp_path / "C.db"
    Ledger.open(going, plan=SIX, configuration={}, key=key).close()
    with refused("unregistered-before"):
        budget(20, one).admission(PLAN, key=key)
    seal(going, None)
    assert not budget(20, one).admission(PLAN, key=key).refused
    Ledger.open(tmp_path / "D.db", plan=SIX, configuration={}, key=key).close()
    (tmp_path / "D.db").unlink()
    assert not budget(20, one).admission(PLAN, key=key).refused


def test_a_register_beside_an_earlier_ledger_is_asked_too(tmp_path: Path) -> None:
    """The new run has a key of its own, whose register knows nothing."""
    key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
    one, two = (recorded(tmp_path / f"{name}.db", ["ann"], key=key) for name in "AC")
    with refused("unregistered-before"):
        budget(20, one).admission(PLAN, key=NoiseKey.generate())
    assert not budget(20, one, two).admission(PLAN, key=NoiseKey.generate()).refused


def test_compose_checks_every_run_against_every_budget(tmp_path: Path) -> None:
    """8 and 6 before, and 8 within a budget that counts the first only; then one after it that counts nothing."""
    one = recorded(tmp_path / "A.db", ["ann"])
    two = recorded(tmp_path / "C.db", ["ann", "cyd"], plan=SIX)
    three = begun(tmp_path / "E.db", ["ann", "bob", "cyd"], budget(12.5, one), NoiseKey.generate())
    assert joint([one, three]).problems == ()
    cost = gaussian_epsilon(math.hypot(mu_of(PLAN), mu_of(SIX), mu_of(PLAN)))
    assert cost > 12.5 > gaussian_epsilon(math.hypot(mu_of(PLAN), mu_of(SIX)))
    [problem] = joint([one, two, three]).problems
    assert problem.reason == "beyond-the-budget"
    assert f"({one}, {two})" in problem
    assert cost <= float(re.search(r"up to ε = ([0-9.]+[0-9])", problem)[1]) < cost * 1.01
    said = command_line.run("ledger", "compose", one, two, three)
    assert said.exit_code == 1
    assert "cyd" not in said.stdout
    # Whoever is in none of the others is within it, and so is who is in one of them alone.
    assert joint([one, two, three], user="bob").problems == joint([one, two, three], user="cyd").problems == ()

    later = recorded(tmp_path / "F.db", ["bob"], plan=PLAN)
    assert joint([one, three, later]).problems == ()  # 12.26 for who is in both
    last = recorded(tmp_path / "G.db", ["bob"], plan=PLAN)
    [problem] = joint([one, three, later, last]).problems
    assert problem.reason == "beyond-the-budget"
    assert f"({later}, {last})" in problem


def test_compose_names_the_runs_that_a_register_knows_and_nobody_gave(tmp_path: Path) -> None:
    """A note, and a problem where one of the runs has a budget: whether it was kept nobody can say without them."""
    key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
    one, two = (recorded(tmp_path / f"{name}.db", ["ann"], key=key) for name in "AC")
    assert "unnamed-runs" not in reasons(joint([one, two]).notes)
    assert "unnamed-runs" in reasons(joint([one]).notes)
    three = begun(tmp_path / "E.db", ["bob"], budget(20, one, two), key)
    assert joint([one, two, three]).problems == ()
    later = recorded(tmp_path / "F.db", ["bob"], key=key)
    [problem] = joint([one, two, three]).problems
    assert (problem.reason, str(later) in problem) == ("unnamed-runs", True)
    assert command_line.run("ledger", "compose", one, two, three).exit_code == 1
    assert joint([one, two, three, later]).problems == ()


def test_a_run_goes_on_after_the_same_runs_only(tmp_path: Path) -> None:
    one, other = recorded(tmp_path / "A.db", ["ann"]), recorded(tmp_path / "X.db", ["bob"])
    key, path = NoiseKey.generate(), tmp_path / "B.db"
    first = budget(20, one)
    start = {"path": path, "users": names(0, 8), "key": key}
    run(**start, budget=first)
    run(**start, budget=first)
    moved = one.rename(tmp_path / "moved.db")
    run(**start, budget=budget(20, moved))
    for changed in (budget(20, moved, other), budget(20), budget(21, moved), None):
        with refused("another-configuration") as error:
            run(**start, budget=changed)
        assert "budget" in str(error.value)


def test_earlier_ledgers_that_cannot_count_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    good = recorded(tmp_path / "A.db", ["ann"])
    simulated = recorded(tmp_path / "S.db", ["ann"], key=NoiseKey.simulation(1))
    going = recorded(tmp_path / "G.db", ["ann"], over=False)
    (tmp_path / "text.db").write_text("no ledger")
    old = tmp_path / "old.db"
    recorded(old, ["ann"])
    edit(old, "UPDATE run SET format = 1")
    wrong = recorded(tmp_path / "W.db", ["ann"])
    edit(wrong, "UPDATE users SET participations = 2")
    own = tmp_path / "own.db"
    for after, reason in (
        ([tmp_path / "none.db"], "no-ledger"),
        ([tmp_path / "text.db"], "unreadable"),
        ([old], "another-version"),
        ([simulated], "simulation-before"),
        ([going], "not-over"),
        ([wrong], "contradiction-before"),
        ([own], "own-ledger"),
    ):
        with refused(reason):
            run(own, names(0, 8), budget=budget(20, *after))
        assert not own.exists(), after
    with pytest.raises(TypeError, match="after"):
        JointBudget(epsilon=8, delta=DELTA, after=str(good))


def released_twice(path: Path, key: NoiseKey) -> tuple[Path, Path]:
    """(The ledger of a run that is over, a copy from after its first round in another folder)."""
    older = path.parent / "older" / path.name
    older.parent.mkdir()
    with Ledger.open(path, plan=PLAN, configuration={}, key=key) as ledger:
        for round in range(PLAN.participation.rounds):
            release(ledger, round, [["ann"], ["bob"]][round % 2])
            if not round:
                shutil.copy(path, older)
    return path, older


def test_an_older_copy_is_told_by_a_register_also_among_several_runs(tmp_path: Path) -> None:
    """`verify` looked into the register beside a ledger; what adds runs up did not."""
    key = NoiseKey.from_file(tmp_path / "noise.key", create=True)
    path, older = released_twice(tmp_path / "A.db", key)
    assert joint([path]).notes == joint([path]).problems == ()
    assert joint([older]).problems == ()
    note = joint([older]).notes[-1]
    assert (note.reason, note.startswith(str(older))) == ("no-register", True)
    [problem] = joint([older], register=key.runs).problems
    assert problem.reason == "register-has-more"
    with refused("register-missing"):
        joint([older], register=tmp_path / "nowhere.runs")
    said = command_line.run("ledger", "compose", older, "--register", key.runs)
    assert said.exit_code == 1
    seal(older, None)
    with refused("contradiction-before"):
        budget(20, older).admission(PLAN, key=key)


def test_a_changed_model_of_an_earlier_run_is_a_warning_and_its_releases_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = released_twice(tmp_path / "A.db", NoiseKey.generate())
    (tmp_path / "A.db-model-1").write_bytes(b"MODEL")
    assert joint([path]).problems == ()
    words = joint([path]).notes[0]
    assert words.reason == "model-differs"
    with pytest.raises(ValueError, match="budget"):
        run(tmp_path / "B.db", ["ann", "bob"], budget=budget(8.5, path), size=1)
    assert words in caplog.text
    assert verify(path).problems  # where the model is asked for, it is a problem as before


def test_a_chain_of_runs_names_all_before(tmp_path: Path) -> None:
    one, two = recorded(tmp_path / "A.db", ["ann"]), tmp_path / "B.db"
    run(two, names(0, 8), budget=budget(20, one))
    with refused("unnamed-before"):
        run(tmp_path / "C.db", names(0, 8), budget=budget(20, two))
    run(tmp_path / "C.db", names(0, 8), budget=budget(20, one, two))
    counts = Counter(len(group.ledgers) for group in joint([tmp_path / "C.db", two, one]).groups)
    assert counts == {1: 1, 2: 1}


def test_simulations_of_one_seed_share_their_draws(tmp_path: Path) -> None:
    """Composed as if the rounds were known: a user who is drawn in one is drawn in the other."""
    same = [recorded(tmp_path / f"{name}.db", ["ann"], plan=COINS, key=NoiseKey.simulation(1)) for name in "AB"]
    other = recorded(tmp_path / "C.db", ["ann"], plan=COINS, key=NoiseKey.simulation(2))
    known = gaussian_epsilon(math.sqrt(2 * 20) / 1.5)  # two runs of twenty rounds each
    assert joint(same).worst.planned.epsilon == pytest.approx(known, rel=1e-6)
    assert joint([same[0], other]).worst.planned.epsilon < 0.9 * known
    # One key of ours draws others in each run, and the same key says the same of a new run's.
    key = NoiseKey.generate()
    ours = [recorded(tmp_path / f"{name}.db", ["ann"], plan=COINS, key=key) for name in "DE"]
    assert joint(ours).worst.planned.epsilon == joint([same[0], other]).worst.planned.epsilon
    limit = budget(0.95 * known, same[0])
    with refused("nobody-may-take-part"):
        limit.admission(COINS, key=NoiseKey.simulation(1))
    assert not limit.admission(COINS, key=NoiseKey.simulation(2)).refused
