"""A server that lies to keepers about what to cancel, or to anybody about which keepers are there."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flower_runs import names
from flwr.app import ConfigRecord, Message, RecordDict
from keeper_runs import RealKeepers, node, refusal_in
from oracles_accounting import worst_squared_mu
from shared import record

from fedcgd import LambdaCGD, Participation, sensitivity
from fedcgd.keepers import Keeper
from fedcgd.keepers.record import read, record_file
from fedcgd.ledger import verify
from fedcgd_flower import IncompleteRunError
from fedcgd_flower.keepers.messages import Masking
from fedcgd_flower.keepers.openings import Openings
from fedcgd_flower.messages import question_of

ROUNDS, SIZE = 12, 20_000
MECHANISM, PARTICIPATION = LambdaCGD(0.9), Participation(rounds=ROUNDS, min_separation=6)
TERMS = {"mechanism": MECHANISM, "participation": PARTICIPATION, "cohort_size": 2}

_honest = Openings._requests


def lying_about_what_to_cancel(monkeypatch, pointer) -> None:
    """Keeper `name` is told in round t to cancel the share of `pointer(name, t)`."""

    def requests(self, masking, round, attempt, members):
        honest = _honest(self, masking, round, attempt, members)
        return {name: replace(asked, after=pointer(name, round)) for name, asked in honest.items()}

    monkeypatch.setattr(Openings, "_requests", requests)


def noise_seen(real: RealKeepers, monkeypatch, *, stolen: int) -> np.ndarray:
    """Each round's noise less the shares of keepers whose keys are stolen, for unit standard deviation of a planned round."""
    sums: list[np.ndarray] = []
    opened = Openings.add_noise

    def keeping(self, total, releases, attempt, masking, grid):
        noised, round = opened(self, total, releases, attempt, masking, grid), releases.count
        seen = noised.copy()
        for path in real.files[:stolen]:
            with Keeper.open(path, real.keepers) as keeper:
                share = np.zeros_like(seen)
                keeper._add_share(share, masking.agreement, read(record_file(path)).openings[round])
                seen -= share
        sums.append(seen * masking.agreement.step / masking.agreement.plan.stddev)
        return noised

    monkeypatch.setattr(Openings, "add_noise", keeping)
    grid = real.grid()
    for number in (1, 2):  # users whose updates are zeros, so that sums are noise alone
        grid.nodes[number] = node(names(12)[number - 1 :: 2], real.keepers, amount=0.0)
    assert real.make(**TERMS).start(grid, record(np.zeros(SIZE))).complete
    return np.array(sums)


def honest(name: str, round: int) -> int | None:
    return round - 1 if round else None


def two_histories(name: str, round: int) -> int | None:
    """The worst of small cases for cancelling late with λ itself, μ² 1.16 times the planned one."""
    return {0: None, 1: None, 6: 0}.get(round, round - 1)


def nothing(name: str, round: int) -> int | None:
    return None


def anything(name: str, round: int) -> int | None:
    generator = np.random.default_rng([round, int(name[1:])])
    return None if round == 0 else [None, *range(round)][generator.integers(round + 1)]


@pytest.mark.parametrize("pointer", [honest, two_histories, nothing, anything])
def test_whatever_a_server_lets_keepers_cancel_the_user_is_as_private_as_planned(
    pointer, tmp_path: Path, monkeypatch
) -> None:
    """μ of the noise that was released, with the keys of t = 1 keepers: measured, so 3 % above the plan's are chance."""
    lying_about_what_to_cancel(monkeypatch, pointer)
    seen = noise_seen(RealKeepers(tmp_path), monkeypatch, stolen=1)
    found = worst_squared_mu(seen @ seen.T / SIZE, PARTICIPATION, np.random.default_rng(0))
    planned = sensitivity(MECHANISM, PARTICIPATION).value ** 2
    assert found <= 1.03 * planned
    assert pointer is not honest or found >= 0.97 * planned  # the measure is not blind


def test_with_more_keys_than_planned_the_measure_sees_it(tmp_path: Path, monkeypatch) -> None:
    seen = noise_seen(RealKeepers(tmp_path), monkeypatch, stolen=2)
    found = worst_squared_mu(seen @ seen.T / SIZE, PARTICIPATION, np.random.default_rng(0))
    assert found == pytest.approx(2 * sensitivity(MECHANISM, PARTICIPATION).value ** 2, rel=0.03)


def test_a_share_that_a_keeper_never_made_is_not_cancelled(tmp_path: Path, monkeypatch) -> None:
    """It was away in rounds 0 and 1. Asked about it first, it refuses, the run ends, and no round is lost."""
    real = RealKeepers(tmp_path, colluding=1, away=1, names=("k0", "k1", "k2", "k3"))
    grid = real.grid()
    away = grid.nodes.pop(12)
    with real.make() as strategy:
        strategy.start(grid, record(np.zeros(6)), num_rounds=2)
    grid.nodes[12] = away
    with monkeypatch.context() as patched:
        lying_about_what_to_cancel(patched, lambda name, round: round - 1)
        with (
            real.make() as strategy,
            pytest.raises(IncompleteRunError, match="keeper's record"),
        ):
            strategy.start(grid, record(np.zeros(6)))
    assert real.openings(2) == []
    assert verify(real.ledger).keepers.spent == 0
    real.make().start(grid, record(np.zeros(6)))  # and goes on when it is told the truth
    assert real.openings(2) == [2, 3, 4, 5]


def test_once_answered_a_keeper_cancels_nothing_else_in_that_round(tmp_path: Path) -> None:
    """Two answers with two pointers would differ by a known weight of an earlier share: it would be open."""
    real = RealKeepers(tmp_path)
    grid = real.grid()
    real.make().start(grid, record(np.zeros(6)))
    asked = [m for m in grid.sent if m.metadata.dst_node_id == 10 and question_of(m) == "/open"][-1]
    told = dict(asked.content["fedcgd-keepers"])
    line, _, nodes = told["request"].partition(b"\n")
    for after, said in (
        (4, ""),
        (3, "opened already, for another request"),
        (None, "opened already"),
        (5, "comes before it"),
    ):
        request = json.dumps(json.loads(line) | {"after": after}).encode() + b"\n" + nodes
        content = RecordDict({"fedcgd-keepers": ConfigRecord(told | {"request": request})})
        [reply] = grid.send_and_receive([Message(content, dst_node_id=10, message_type="train")])
        refusal = refusal_in(reply)
        assert (refusal == "", said in refusal) == (after == 4, True), refusal


@pytest.mark.parametrize(
    ("told_nodes", "told_keepers", "reason"),
    [
        (("k0", "k1"), ("k0", "k1"), "a round needs 3 of 4 keepers"),
        (("k0", "k1", "k2", "k3"), ("k0", "k1", "k2"), "seeds cannot be opened"),
        (("k0", "k1", "k2"), ("k0", "k1", "k2", "k3"), "seeds cannot be opened"),
    ],
)
def test_a_false_list_of_keepers_opens_nothing(told_nodes, told_keepers, reason, tmp_path: Path, monkeypatch) -> None:
    """Fewer masks and shares than agreed, or shares of other keepers than the nodes masked for."""
    real = RealKeepers(tmp_path, colluding=1, away=1, names=("k0", "k1", "k2", "k3"))
    terms = Openings.terms

    def false(self, grid, size):
        return Masking(terms(self, grid, size).agreement, told_nodes)

    def requests(self, masking, round, attempt, members):
        some = _honest(self, masking, round, attempt, members)["k0"]
        return {
            name: replace(some, present=told_keepers, sealed=tuple(m.sealed.get(name, b"") for m, _ in members))
            for name in told_keepers
        }

    monkeypatch.setattr(Openings, "terms", false)
    monkeypatch.setattr(Openings, "_requests", requests)
    monkeypatch.setattr(Openings, "_readable", lambda self, grid, masking, round, attempt, members: members)
    answers: list[str] = []

    def hear(request: Message, reply: Message) -> Message:
        if reply.has_error():
            answers.append(reply.error.reason)
        elif question_of(request) == "/open":
            answers.append(refusal_in(reply))
        return reply

    grid = real.grid()
    for one in grid.nodes.values():
        one.tamper = hear
    with suppress(IncompleteRunError):  # rounds in which keepers were asked are spent, and a run of those alone ends
        real.make().start(grid, record(np.zeros(6)))
    assert any(reason in said for said in answers)
    records = [record_file(path) for path in real.files]
    assert not any(path.stat().st_size and read(path).openings for path in records)
