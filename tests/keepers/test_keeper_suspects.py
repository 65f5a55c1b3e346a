"""A node that spoils the sums is found by the rounds that it was in, named and left out, before turns are wasted on it."""

import logging
import math
import os
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid, is_training
from flower_runs import names
from flwr.app import Array, Message
from keeper_runs import RealKeepers, node
from shared import record

from fedcgd import Participation
from fedcgd.keepers import masks
from fedcgd.keepers.masks import SEED_BYTES
from fedcgd.ledger import verify
from fedcgd_flower import IncompleteRunError
from fedcgd_flower.keepers.openings import NodeSuspects

SIZE = 6


def searched(nodes: int, cheaters: set[str], rounds: int, least: int = 2) -> tuple[NodeSuspects, list[bool]]:
    """What is known after so many rounds of all nodes but those held back, and which rounds failed."""
    suspects, failed = NodeSuspects(least), []
    everybody = {f"silo-{i:02d}" for i in range(nodes)}
    for _ in range(rounds):
        if suspects.gives_up:
            break
        asked = next(left for held in suspects.to_hold_back() if len(left := everybody - held) >= least)
        failed.append(not asked.isdisjoint(cheaters))
        (suspects.spent if failed[-1] else suspects.released)(asked)
    return suspects, failed


@pytest.mark.parametrize("nodes", [3, 4, 5, 10, 33])
def test_a_node_that_always_cheats_is_found_and_no_other(nodes: int) -> None:
    for which in range(nodes):
        cheater = f"silo-{which:02d}"
        suspects, failed = searched(nodes, {cheater}, rounds=4 + 3 * math.ceil(math.log2(nodes)))
        assert suspects.left_out == {cheater}
        assert sum(failed) <= 2 + math.log2(nodes)
        assert not any(failed[-2:])


def test_of_two_that_cheat_both_are_found_and_no_other() -> None:
    for pair in combinations(range(10), 2):
        cheaters = {f"silo-{which:02d}" for which in pair}
        assert searched(10, cheaters, rounds=30)[0].left_out == cheaters


@pytest.mark.parametrize("cheating", [2, 3])
def test_where_too_few_are_honest_the_search_ends_and_names_nobody_else(cheating: int) -> None:
    for some in combinations(range(5), cheating):
        cheaters = {f"silo-{which:02d}" for which in some}
        assert searched(5, cheaters, rounds=40)[0].left_out <= cheaters


def test_a_node_that_cheated_once_is_not_left_out_for_it() -> None:
    suspects = NodeSuspects(1)
    suspects.spent({"a", "b"})
    suspects.released({"b"})
    assert not suspects.left_out
    assert [*suspects.to_hold_back()] == [set()]  # it is asked once more
    suspects.released({"a", "b"})
    assert suspects.to_description() == {"left_out": [], "failed_rounds": {"a": 1, "b": 1}, "suspects": []}


def test_what_is_known_survives_a_restart() -> None:
    suspects = NodeSuspects(1)
    suspects.spent({"a", "b", "c"})
    suspects.released({"b"})
    again = NodeSuspects.from_description(suspects.to_description(), 1)
    assert [*again.to_hold_back()] == [*suspects.to_hold_back()]
    assert again.spent({"a", "b"}) == again.left_out == set()
    again.released({"b", "c"})
    assert again.left_out == {"a"}


def random_residues(request: Message, reply: Message) -> Message:
    if is_training(request) and "users" in request.content["fedcgd"] and not reply.has_error():
        value = reply.content["update"]["flat"].numpy()
        reply.content["update"]["flat"] = Array(np.random.default_rng(1).integers(0, 2**32, len(value), np.uint32))
    return reply


@pytest.fixture(autouse=True)
def _do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcgd_flower.keepers.transport.time.sleep", lambda seconds: None)


def silos(real: RealKeepers, count: int, users: int, cheater: int | None = None) -> FakeGrid:
    """Registered nodes, each with so many users of its own, beside the keepers."""
    grid = real.grid()
    for node_id in (1, 2):
        del grid.nodes[node_id]
    for number in range(count):
        grid.nodes[100 + number] = node(names(users, f"s{number}-"), real.keepers, name=f"silo-{number}")
    if cheater is not None:
        grid.nodes[100 + cheater].tamper = random_residues
    return grid


def asked(grid: FakeGrid, node_id: int) -> int:
    return sum(
        is_training(m) and "users" in m.content["fedcgd"] and m.metadata.dst_node_id == node_id for m in grid.sent
    )


@pytest.mark.parametrize(("users", "cohort"), [(6, 8), (1, 4)], ids=["other users", "later participations"])
def test_a_silo_that_sends_random_residues_is_named_and_left_out(tmp_path: Path, users, cohort, caplog) -> None:
    """It spent every round that it was in, and nobody knew which node it was."""
    real = RealKeepers(tmp_path, nodes=2)
    count, rounds = (4, 16) if users > 1 else (12, 24)
    grid = silos(real, count, users, cheater=2)
    options = {"participation": Participation(rounds=rounds, min_separation=2), "cohort_size": cohort}
    with caplog.at_level(logging.INFO):
        result = real.make(**options).start(grid, record(np.zeros(SIZE)))
    assert "silo-2 was" in caplog.text
    assert "asked no" in caplog.text
    assert not any(f"silo-{i} was in" in caplog.text for i in range(count) if i != 2)
    assert result.complete
    assert (result.released + result.spent, result.spent) == (rounds, asked(grid, 102))
    assert result.spent <= 7  # of keys that are random; it was every round that it was in
    assert f"{result.released} of {rounds} rounds" in caplog.text
    assert verify(real.ledger).problems == ()


def test_who_is_left_out_stays_so_when_the_run_goes_on(tmp_path: Path) -> None:
    real = RealKeepers(tmp_path, nodes=2)
    options = {"participation": Participation(rounds=20, min_separation=2), "cohort_size": 8}
    real.make(**options).start(silos(real, 4, 6, cheater=2), record(np.zeros(SIZE)), num_rounds=16)
    grid = silos(real, 4, 6, cheater=2)
    result = real.make(**options).start(grid, record(np.zeros(SIZE)))
    assert result.complete
    assert asked(grid, 102) == 0


def test_where_no_half_can_be_held_back_the_run_ends_before_its_turns_are_wasted(tmp_path: Path, caplog) -> None:
    """Of two silos both are in every sum: "10 of 12 rounds released" was the last line of a run that opened none."""
    real = RealKeepers(tmp_path, nodes=2)
    grid = silos(real, 2, 12, cheater=1)
    options = {"participation": Participation(rounds=12, min_separation=2), "cohort_size": 8}
    with caplog.at_level(logging.INFO), pytest.raises(IncompleteRunError) as stopped:
        real.make(**options).start(grid, record(np.zeros(SIZE)))
    result = stopped.value.result
    assert (result.released, result.spent, result.complete) == (0, 3, False)
    assert "released, 3" in str(stopped.value)
    assert "failed rounds" in str(stopped.value)
    assert "released, 3" in caplog.text


def test_two_nodes_that_seal_the_same_seed_are_named_and_spend_no_round(tmp_path: Path, monkeypatch, caplog) -> None:
    """They spent every round: the check before an opening did not look for it."""
    real = RealKeepers(tmp_path, nodes=2)
    grid = silos(real, 5, 6)
    random, cheating = os.urandom, list[int]()

    def the_same(count: int) -> bytes:
        return b"s" * count if cheating and count == SEED_BYTES else random(count)

    monkeypatch.setattr(masks.os, "urandom", the_same)
    for node_id in (100, 101):

        def answered(message, context, app=grid.nodes[node_id].app):
            cheating.append(1)
            try:
                return app(message, context)
            finally:
                cheating.clear()

        grid.nodes[node_id].app = answered
    options = {"participation": Participation(rounds=8), "cohort_size": 30}  # every node is on every list
    with caplog.at_level(logging.WARNING):
        result = real.make(**options).start(grid, record(np.zeros(SIZE)))
    assert (result.released, result.spent) == (8, 0)
    assert "nodes cannot" in caplog.text
    assert "silo-0, silo-1" in caplog.text


def test_a_cohort_that_cannot_be_at_so_many_nodes_is_refused_at_the_start(tmp_path: Path) -> None:
    real = RealKeepers(tmp_path, nodes=5)
    with pytest.raises(ValueError, match="round cannot"):
        real.make(cohort_size=4)


def test_a_cohort_that_one_node_hosts_is_spread_over_two(tmp_path: Path) -> None:
    """Whoever draws it: its sum would never be opened, in ten tries of the same cohort."""
    real = RealKeepers(tmp_path, nodes=2)
    grid = real.grid()
    grid.nodes[1] = node(names(40)[:36], real.keepers)
    grid.nodes[2] = node(names(40)[36:], real.keepers)
    options = {"participation": Participation(rounds=8, min_separation=4), "cohort_size": 2}
    assert real.make(**options).start(grid, record(np.zeros(SIZE))).released == 8
