"""kill -9 at random moments of a federated run: afterwards everything is as if nothing had been killed."""

import secrets
from collections import defaultdict
from pathlib import Path

import pytest
import server_worker as worker
from fake_grid import FakeGrid, FakeNode, is_training
from server_kills import KilledRun, check_that_nothing_is_lost_and_nothing_happens_twice, run_with_kills
from sql import rows

from fedcgd.ledger import export, verify
from fedcgd.noise.keys import NoiseKey
from fedcgd_flower.inner import saved_state

SIZES = [
    pytest.param((15, 10), id="10 kills"),
    pytest.param((300, 200), id="200 kills", marks=[pytest.mark.slow, pytest.mark.timeout(1600)]),
]
"""(rounds, kills)"""


def run_without_kills(killed: KilledRun, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """(model, users asked) of each round, when the coins fall as they did for the releases of the killed run."""
    (folder / "key").touch(mode=0o600)
    # Without the line that names its register: this copy of the key begins its own.
    (folder / "key").write_text((killed.folder / "key").read_text().split()[0])
    released = rows(killed.folder / "ledger", "SELECT nonce FROM attempts WHERE state = 'released' ORDER BY round")
    nonces = iter([int.from_bytes(nonce, "big") for (nonce,) in released])
    models = []
    monkeypatch.setattr(secrets, "token_hex", lambda count: export(killed.folder / "ledger")["run"]["stream_id"])
    monkeypatch.setattr(NoiseKey, "nonce_of", lambda *_, **__: next(nonces))
    grid = FakeGrid({number + 1: FakeNode(worker.node_app(number)) for number in range(worker.NODES)})
    worker.make_strategy(folder, killed.rounds).start(
        grid, worker.initial(), evaluate_fn=lambda release, arrays: models.append(worker.digest(arrays))
    )
    users = defaultdict(set)
    for message in grid.sent:
        if is_training(message):
            users[message.content["fedcgd"]["round"]] |= set(message.content["fedcgd"]["users"])
    return [(models[t + 1], users[t]) for t in range(killed.rounds)]


def final_state(folder: Path, rounds: int) -> bytes:
    """The inner strategy's state with which a further life of the server would go on."""
    strategy = worker.make_strategy(folder, rounds)
    strategy.start(FakeGrid({}), worker.initial())
    return saved_state(strategy.inner, None)


@pytest.mark.parametrize("size", SIZES)
def test_a_server_that_is_killed_trains_the_model_of_one_that_is_not(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with the same users in each round, the same moments of FedAdam and the same ε."""
    (tmp_path / "killed").mkdir()
    (tmp_path / "calm").mkdir()
    killed = run_with_kills(tmp_path / "killed", *size)
    check_that_nothing_is_lost_and_nothing_happens_twice(killed)
    assert [round for round, _ in killed.released_attempts] == list(range(killed.rounds))

    shown = {published.release: published.model for published in killed.published}
    users = defaultdict(set)
    for asked in killed.asked:
        users[asked.round] |= asked.users
    calm = run_without_kills(killed, tmp_path / "calm", monkeypatch)
    assert calm == [(shown[t + 1], users[t]) for t in range(killed.rounds)]
    assert final_state(killed.folder, killed.rounds) == final_state(tmp_path / "calm", killed.rounds)
    guarantees = [verify(tmp_path / name / "ledger").guarantee for name in ("killed", "calm")]
    assert guarantees[0] == guarantees[1]
    assert guarantees[0].epsilon > 0

    if killed.kills >= 200:
        check_that_the_kills_came_at_every_stage(killed)


def check_that_the_kills_came_at_every_stage(run: KilledRun) -> None:
    abandoned = [attempt for attempt in run.attempts if attempt["state"] == "abandoned"]
    asked = {(a.round, a.attempt) for a in run.asked}
    life_of = {(a.round, a.attempt): a.life for a in run.asked}
    first_seen = {}
    for shown in run.published:
        first_seen.setdefault(shown.release, shown)
    first_of_life = {}
    for shown in run.published:
        first_of_life.setdefault(shown.life, shown)
    stages = {
        "no round in flight": run.kills - len(abandoned),
        "planned, nobody asked yet": sum((a["round"], a["attempt"]) not in asked for a in abandoned),
        "asked, not aggregated": sum(
            (a["round"], a["attempt"]) in asked and a["aggregated"] is None for a in abandoned
        ),
        "aggregated, not released": sum(a["aggregated"] is not None for a in abandoned),
        "written, not released": sum(
            (life_of.get((a["round"], a["attempt"])), a["round"]) in run.written for a in abandoned
        ),
        "released, not published": sum(
            shown.release > 0 and first_of_life[shown.life] == shown for shown in first_seen.values()
        ),
    }
    assert min(stages.values()) > 0, stages
