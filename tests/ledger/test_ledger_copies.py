"""A run that was copied whole and went on in two places: both are counted, against the two matrices written out."""

import math
import shutil
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from ledgers import reasons, refused, release
from oracles_accounting import gaussian_epsilon
from plans import make_plan
from scipy import optimize

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.ledger import JointBudget, Ledger, joint, seal, verify
from fedcgd.ledger.budget import RecordedRun, branches
from fedcgd.ledger.store import EVALUATION, EVALUATION_OF, RunSettings, StoredRun
from fedcgd.mechanisms import DPSGD, LambdaCGD, matrix

DELTA = 1e-5
PLAN = Plan.calibrated(LambdaCGD(0.8), Participation(rounds=6, min_separation=2), clip_norm=1.0, epsilon=8, delta=DELTA)
SHARED = 2


def patterns(n: int, b: int, k: int) -> list[tuple[int, ...]]:
    return [
        rounds
        for size in range(k + 1)
        for rounds in combinations(range(n), size)
        if all(later - earlier >= b for earlier, later in pairwise(rounds))
    ]


def go_on(
    folder: Path, first: int, last: int, users: list[str], *, plan: Plan = PLAN, configuration: dict | None = None
) -> Path:
    """Rounds [first, last); each user takes part every other round."""
    key = NoiseKey.from_file(folder / "noise.key", create=True)
    with Ledger.open(folder / "run.db", plan=plan, configuration=configuration or {}, key=key) as ledger:
        for round in range(first, last):
            release(ledger, round, users if round % 2 == 0 else [f"other-{round}"], b"")
    return folder / "run.db"


def copied(tmp_path: Path, rounds: int = SHARED, **options) -> tuple[Path, Path]:
    """Two folders with key, register and ledger, the second copied from the first after so many rounds."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    go_on(one, 0, rounds, ["ann"], **options)
    shutil.copytree(one, two)
    return one, two


def forked(tmp_path: Path, **options) -> tuple[Path, Path]:
    """The ledgers of such copies that were gone on with in both places."""
    one, two = copied(tmp_path, **options)
    return go_on(one, SHARED, 6, ["ann"], **options), go_on(two, SHARED, 6, ["ann", "bob"], **options)


def test_a_run_that_went_on_in_two_places_costs_both(tmp_path: Path) -> None:
    one, two = forked(tmp_path)
    assert verify(one).problems == verify(two).problems == ()
    assert (reasons(verify(one).notes), reasons(verify(two).notes)) == ([], ["another-place"])
    found = joint([one, two])
    # Both count whole, which is more than the shared rounds once and those of each copy.
    c, ways = matrix(LambdaCGD(0.8), 6), patterns(6, 2, 3)
    epsilon = gaussian_epsilon(
        math.sqrt(2) * max(np.linalg.norm(c[:, list(a)].sum(axis=1)) for a in ways) / PLAN.noise_multiplier
    )
    assert {(group.users, len(group.ledgers)) for group in found.groups} == {(4, 2), (1, 1)}  # bob is in one of them
    assert found.worst.planned.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert len(found.worst.ledgers) == 2
    assert not found.worst.planned.proof.exact
    assert found.worst.released.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert joint([one, two], user="bob").worst.planned.epsilon <= 8.0001
    assert found.problems == ()
    assert [reason for reason in reasons(found.notes) if "place" not in reason] == [
        "no-register",
        "no-register",
        "went-apart",
    ]
    # In any order, and with the older state of a third copy.
    assert joint([two, one]).worst.planned.epsilon == found.worst.planned.epsilon
    said = run("ledger", "compose", one, two)
    assert said.exit_code == 0
    assert all(part in said.stdout for part in ("ε ≤ 12.3", "4 users"))


def test_an_older_copy_is_the_same_run(tmp_path: Path) -> None:
    one, older = copied(tmp_path)
    latest = go_on(one, SHARED, 6, ["ann"])
    for paths in ([latest, older / "run.db"], [older / "run.db", latest], [latest, latest]):
        found = joint(paths)
        assert found.worst.planned.epsilon == pytest.approx(8, rel=1e-4)
        assert reasons(found.notes).count("older-copy") == (paths[0] != paths[1])
        assert {group.ledgers for group in found.groups} == {(str(latest),)}
        assert joint(paths, user="ann").worst.released.epsilon == pytest.approx(8, rel=1e-4)


def test_a_budget_counts_both_copies(tmp_path: Path) -> None:
    one, two = forked(tmp_path)
    both = joint([one, two]).worst.planned.epsilon
    mu = optimize.brentq(lambda mu: gaussian_epsilon(mu) - both, 0.1, 10)
    together = gaussian_epsilon(math.hypot(mu, optimize.brentq(lambda mu: gaussian_epsilon(mu) - 8, 0.1, 10)))
    key = NoiseKey.generate()
    for factor, left_out in ((1.001, set()), (0.999, {"ann", "other-1", "other-3", "other-5"})):
        budget = JointBudget(epsilon=together * factor, delta=DELTA, after=[one, two])
        assert set(budget.admission(PLAN, key=key).refused) == left_out
    # Named alone, a copy costs its own whole run: more than it takes to refuse nobody.
    assert not JointBudget(epsilon=together * 0.999, delta=DELTA, after=[two]).admission(PLAN, key=key).refused
    # Whoever counted one copy only is told so.
    third = tmp_path / "third.db"
    admission = JointBudget(epsilon=together, delta=DELTA, after=[one]).admission(PLAN, key=key)
    with Ledger.open(third, plan=PLAN, configuration=admission.configuration, key=key) as ledger:
        ledger.plan_round(0, ["cyd"])
    assert joint([one, third]).problems == ()
    assert joint([one, two, third]).problems == ()  # nobody is in all
    after = JointBudget(epsilon=together, delta=DELTA, after=[two, one]).admission(PLAN, key=key).configuration
    assert after == JointBudget(epsilon=together, delta=DELTA, after=[one, two]).admission(PLAN, key=key).configuration
    assert len(after["budget"]["after"]) == 2


def test_coins_are_the_same_in_both_copies(tmp_path: Path) -> None:
    """Whoever was drawn is drawn again: the copies are no independent runs, and count without sampling."""
    coins = make_plan(DPSGD(), Participation(rounds=6, sampling="poisson", sampling_rate=0.1), delta=DELTA)
    one, two = forked(tmp_path, plan=coins)
    # Twice six rounds, each with μ = 1/2.
    assert joint([one, two], user="ann").worst.planned.epsilon == pytest.approx(
        gaussian_epsilon(math.sqrt(12) / 2), rel=1e-6
    )


def test_each_copy_has_evaluations_of_its_own(tmp_path: Path) -> None:
    plan = make_plan(DPSGD(), Participation(rounds=2), noise_multiplier=4.0, delta=DELTA)
    options = {"configuration": {EVALUATION: {"plan": plan.to_description()}}}
    one, two = forked(tmp_path, **options)
    streams = set()
    for path in (one, two):
        key = NoiseKey.from_file(path.parent / "noise.key")
        with Ledger.open(path, plan=PLAN, **options, key=key) as ledger:
            stream = ledger.stream_id
            streams.add(stream)
        # As evaluations that were copied with the run, and went apart from the first on.
        configuration = {EVALUATION_OF: stream}
        with Ledger.open(
            path.with_name("run.db.evaluation"), plan=plan, configuration=configuration, key=NoiseKey.simulation(0)
        ) as ledger:
            ledger.plan_round(0, ["ann"])
    assert len(streams) == 1
    assert len(joint([one, two], user="ann").worst.ledgers) == 4
    two.with_name("run.db.evaluation").unlink()
    with refused("evaluations-missing"):
        joint([one, two])


def test_how_copies_are_told_apart() -> None:
    one = StoredRun(RunSettings("{}", "{}", "", 0), "", "stream", "")

    def ways(*nonces: tuple[int, ...]) -> list[tuple[str, tuple[str, ...]]]:
        ledgers = [
            RecordedRun(name=f"{i}", run_id="run", run=one, plan=PLAN, users=frozenset({f"{i}"}), nonces=each)
            for i, each in enumerate(nonces)
        ]
        found = list(branches(ledgers))
        assert [run.branch == "" for run in found] == [True] + [False] * (len(found) - 1)
        assert len({run.id for run in found}) == len(found)
        return [(run.name, tuple(sorted(run.users))) for run in found]

    assert ways((), (1,), (1, 2)) == [("2", ("0", "1", "2"))]
    assert ways((1, 2), (1, 2)) == [("0", ("0", "1"))]
    assert ways((1, 2, 4), (1,), (1, 2, 3)) == [("2", ("1", "2")), ("0", ("0", "1"))]
    assert ways((1, 5, 6), (1, 2), (1, 5, 7)) == [("1", ("1",)), ("0", ("0",)), ("2", ("2",))]


@pytest.mark.parametrize("released", [0, SHARED])
def test_a_whole_copy_says_so_also_from_before_the_first_round(tmp_path: Path, released: int) -> None:
    """Key, register and ledger: neither register refuses, and the ledger that went on elsewhere has a note."""
    one, two = copied(tmp_path, released)
    ledgers = go_on(one, released, 3, ["ann"]), go_on(two, released, 3, ["ann"])
    assert [reasons(verify(path).notes) for path in ledgers] == [[], ["another-place"]]
    assert "went-apart" in reasons(joint(ledgers).notes)


def test_of_two_copies_the_sealed_one_is_over(tmp_path: Path) -> None:
    one, copy = copied(tmp_path)
    seal(one / "run.db", None)
    admission = JointBudget(epsilon=20, delta=DELTA, after=[copy / "run.db", one / "run.db"])
    assert not admission.admission(PLAN, key=NoiseKey.generate()).refused
