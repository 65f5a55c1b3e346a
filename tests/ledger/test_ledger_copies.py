"""A run that was copied whole and went on in two places: both are counted, against the two matrices written out."""

import math
import shutil
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from ledgers import reasons, refused
from oracles_accounting import gaussian_epsilon
from plans import make_plan
from scipy import optimize

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.accounting import PastRun, compose
from fedcgd.ledger import JointBudget, Ledger, joint, seal, verify
from fedcgd.ledger.run_composition import EVALUATION, EVALUATION_OF, branches
from fedcgd.mechanisms import DPSGD, BinaryTree, LambdaCGD, Normalized, matrix
from fedcgd.mechanisms.tail_sensitivity import tail_sensitivity

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


def release(ledger: Ledger, first: int, last: int, users: list[str], key: NoiseKey) -> None:
    """Rounds [first, last); each user takes part every other round."""
    for round in range(first, last):
        attempt = ledger.plan_round(round, users if round % 2 == 0 else [f"other-{round}"])
        sums = np.arange(3) + round
        nonce = key.nonce_of(ledger.stream_id, sums, earlier=ledger.resume().nonces, attempt=attempt)
        ledger.record_aggregated(round, attempt, nonce)
        ledger.record_released(round, attempt, b"")


def opened(folder: Path, plan: Plan = PLAN, configuration: dict | None = None) -> tuple[Ledger, NoiseKey]:
    key = NoiseKey.from_file(folder / "noise.key", create=True)
    return Ledger.open(folder / "run.db", plan=plan, configuration=configuration or {}, key=key), key


def go_on(folder: Path, first: int, last: int, users: list[str], **options) -> Path:
    ledger, key = opened(folder, **options)
    with ledger:
        release(ledger, first, last, users, key)
    return folder / "run.db"


def forked(tmp_path: Path, **options) -> tuple[Path, Path]:
    """Key, register and ledger copied after two rounds, and gone on with in both places."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    go_on(one, 0, SHARED, ["ann"], **options)
    shutil.copytree(one, two)
    return go_on(one, SHARED, 6, ["ann"], **options), go_on(two, SHARED, 6, ["ann", "bob"], **options)


def test_a_run_that_went_on_in_two_places_costs_both(tmp_path: Path) -> None:
    one, two = forked(tmp_path)
    assert verify(one).problems == verify(two).problems == ()
    assert (reasons(verify(one).notes), reasons(verify(two).notes)) == ([], ["another-place"])
    found = joint([one, two])
    # The matrix of everything that is released: the shared rounds, then those of each copy, by enumeration of all patterns.
    c = matrix(LambdaCGD(0.8), 6)
    ways = patterns(6, 2, 3)
    truth = max(
        math.hypot(np.linalg.norm(c[:, list(a)].sum(axis=1)), np.linalg.norm(c[SHARED:, list(b)].sum(axis=1)))
        for a in ways
        for b in ways
        if [t for t in a if t < SHARED] == [t for t in b if t < SHARED]
    )
    epsilon = gaussian_epsilon(truth / PLAN.noise_multiplier)
    assert epsilon == pytest.approx(11.764, abs=0.001)
    assert {(group.users, len(group.ledgers)) for group in found.groups} == {(4, 2), (1, 1)}  # bob is in one of them
    assert found.worst.planned.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert len(found.worst.ledgers) == 2
    assert found.worst.released.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert joint([one, two], user="bob").worst.planned.epsilon <= 8.0001
    assert found.problems == ()
    assert reasons(found.copies) == ["went-apart"]
    # In any order, and with the older state of a third copy.
    assert joint([two, one]).worst.planned.epsilon == found.worst.planned.epsilon
    said = run("ledger", "compose", one, two)
    assert said.exit_code == 0
    assert "Copied:" in said.stdout
    assert "worst: ε ≤ 11.8 at δ = 1e-05 for 4 users" in said.stdout


def test_an_older_copy_is_the_same_run(tmp_path: Path) -> None:
    one, older = tmp_path / "one", tmp_path / "older"
    one.mkdir()
    go_on(one, 0, SHARED, ["ann"])
    shutil.copytree(one, older)
    latest = go_on(one, SHARED, 6, ["ann"])
    for paths in ([latest, older / "run.db"], [older / "run.db", latest], [latest, latest]):
        found = joint(paths)
        assert found.worst.planned.epsilon == pytest.approx(8, rel=1e-4)
        assert reasons(found.copies) == ["older-copy"] * (paths[0] != paths[1])
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
    assert "copies-not-counted" in reasons(joint([one, two, third]).problems)
    after = JointBudget(epsilon=together, delta=DELTA, after=[two, one]).admission(PLAN, key=key).configuration
    assert after == JointBudget(epsilon=together, delta=DELTA, after=[one, two]).admission(PLAN, key=key).configuration
    assert len(after["budget"]["after"]) == 2


def test_coins_are_the_same_in_both_copies(tmp_path: Path) -> None:
    """Whoever was drawn is drawn again: the copies are no independent runs, and count without sampling."""
    coins = make_plan(DPSGD(), Participation(rounds=6, sampling="poisson", sampling_rate=0.1), delta=DELTA)
    one, two = forked(tmp_path, plan=coins)
    # Six rounds and four more, each with μ = 1/2.
    assert joint([one, two], user="ann").worst.planned.epsilon == pytest.approx(
        gaussian_epsilon(math.sqrt(10) / 2), rel=1e-6
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
    moved = two.with_name("run.db.evaluation").rename(tmp_path / "moved")
    with refused("evaluations-missing"):
        joint([one, two])
    assert len(joint([one, two, moved], user="ann").worst.ledgers) == 4
    one.with_name("run.db.evaluation").unlink()
    with refused("evaluations-of-a-copy"):
        joint([one, two, moved])


def test_how_copies_are_told_apart() -> None:
    def ways(*nonces: tuple[int, ...]) -> list[tuple[int, tuple[int, ...], int]]:
        return [(branch.latest, branch.copies, branch.shared) for branch in branches(nonces)]

    assert ways((), (1,), (1, 2)) == [(2, (0, 1, 2), 0)]
    assert ways((1, 2), (1, 2)) == [(0, (0, 1), 0)]
    assert ways((1, 2, 4), (1,), (1, 2, 3)) == [(2, (1, 2), 0), (0, (0, 1), 2)]
    # Three ways: the last is compared with the nearest before it, not with the first alone.
    assert ways((1, 5, 6), (1, 2), (1, 5, 7)) == [(1, (1,), 0), (0, (0,), 1), (2, (2,), 2)]
    assert ways((1,), (2,)) == [(0, (0,), 0), (1, (1,), 0)]
    names = [branch.name for branch in branches([(1,), (2,), (3,)])]
    assert names[0] == ""
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    "mechanism", [DPSGD(), LambdaCGD(0.9), BinaryTree(), Normalized(LambdaCGD(0.7))], ids=lambda m: m.name
)
@pytest.mark.parametrize(("n", "b", "k"), [(7, 1, None), (7, 2, 2), (8, 3, None), (6, 6, 1)])
def test_later_rows_by_enumeration(mechanism, n: int, b: int, k: int | None) -> None:
    """Never below what a user can do, and no more than that by much."""
    participation = Participation(rounds=n, min_separation=b, max_participations=k)
    c = matrix(mechanism, n)
    for released in (n, n - 2):
        for shared in range(released + 1):
            rows = c[shared:released]
            truth = max(
                np.linalg.norm(rows[:, list(p)].sum(axis=1))
                for p in patterns(released, b, participation.participations)
            )
            found = tail_sensitivity(mechanism, participation, shared=shared, released=released)
            assert truth * (1 - 1e-9) <= found.value <= truth * 1.15 + 1e-12
            assert not found.exact or found.value == pytest.approx(truth, rel=1e-8)


def test_what_cannot_be_shared() -> None:
    run = PastRun(mechanism=DPSGD(), participation=Participation(rounds=4), noise_multiplier=1.0)
    tail = PastRun(mechanism=DPSGD(), participation=Participation(rounds=4), noise_multiplier=1.0, shared=3)
    assert compose([run, tail], delta=DELTA).epsilon == pytest.approx(gaussian_epsilon(math.sqrt(5)), rel=1e-6)
    assert compose([run, tail], delta=DELTA).released == 5
    with pytest.raises(ValueError, match="shared"):
        PastRun(mechanism=DPSGD(), participation=Participation(rounds=4), noise_multiplier=1.0, shared=5)
    coins = Participation(rounds=4, sampling="poisson", sampling_rate=0.5)
    with pytest.raises(ValueError, match="secret"):
        PastRun(mechanism=DPSGD(), participation=coins, noise_multiplier=1.0, shared=1)
    with pytest.raises(ValueError, match="shared"):
        tail_sensitivity(DPSGD(), Participation(rounds=4), shared=5)


def test_of_two_copies_the_sealed_one_is_over(tmp_path: Path) -> None:
    one, copy = tmp_path / "one", tmp_path / "copy"
    one.mkdir()
    go_on(one, 0, SHARED, ["ann"])
    shutil.copytree(one, copy)
    seal(one / "run.db", None)
    admission = JointBudget(epsilon=20, delta=DELTA, after=[copy / "run.db", one / "run.db"])
    assert not admission.admission(PLAN, key=NoiseKey.generate()).refused
