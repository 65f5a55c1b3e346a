"""A node counts its users' participations itself, for one run, and the keepers' file limits what a run may cost."""

import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from keeper_openings import PLAN, agreement_of
from sql import edit

from fedcgd.keepers import Keepers, NodeParticipations, RefusedError

KEEPERS = Keepers.simulation(7, 3, colluding=1)
AGREEMENT = agreement_of(KEEPERS)  # 12 rounds, 3 apart: at most 4 participations


def refused(counts: NodeParticipations, round: int, *users: str, attempt: int = 0, agreement=AGREEMENT) -> str:
    with pytest.raises(RefusedError) as error:
        counts.count(agreement, round, attempt, users)
    return str(error.value)


def test_a_user_has_the_participations_of_the_plan_and_no_more() -> None:
    with NodeParticipations.open(":memory:") as counts:
        for round in (0, 3, 6, 9):
            counts.count(AGREEMENT, round, 0, ["ada"])
            counts.count(AGREEMENT, round, 2, ["ada"])  # another try of the round
            assert "3 rounds" in refused(counts, round + 2, "ada")
            assert "round" in refused(counts, round - 1, "ada")
        assert "more than" in refused(counts, 12, "ada")


def test_a_user_is_asked_for_once_in_a_try() -> None:
    with NodeParticipations.open(":memory:") as counts:
        counts.count(AGREEMENT, 0, 1, ["ada"])
        for attempt in (0, 1):
            assert "in try" in refused(counts, 0, "ben", "ada", attempt=attempt)
        counts.count(AGREEMENT, 0, 1, ["ben"])  # nobody was counted
        counts.count(AGREEMENT, 0, 2, ["ada", "ben"])
        counts.count(AGREEMENT, 3, 0, ["ada", "ben"])


@pytest.mark.parametrize(
    ("count", "colluding", "away", "counted"), [(3, 1, 1, False), (4, 1, 1, True), (2, 0, 1, False)]
)
def test_no_participations_are_counted_where_two_tries_of_a_round_could_be_opened(
    count: int, colluding: int, away: int, counted: bool
) -> None:
    """With three keepers, one of them the server's, each of the others alone opens a try: two lists of one round."""
    agreement = agreement_of(Keepers.simulation(7, count, colluding=colluding, away=away))
    with NodeParticipations.open(":memory:") as counts:
        if counted:
            counts.count(agreement, 0, 0, ["ada"])
        else:
            assert "open another" in refused(counts, 0, "ada", agreement=agreement)


def test_a_file_is_for_one_run(tmp_path: Path) -> None:
    with NodeParticipations.open(tmp_path / "counts.db") as counts:
        counts.count(AGREEMENT, 0, 0, ["ada"])
    assert (tmp_path / "counts.db").stat().st_mode & 0o077 == 0
    with NodeParticipations.open(tmp_path / "counts.db") as counts:
        assert "another run" in refused(counts, 6, "ada", agreement=agreement_of(KEEPERS, run="second"))
        louder = agreement_of(KEEPERS, replace(PLAN, noise_multiplier=3.0))
        assert "another run" in refused(counts, 6, "ben", agreement=louder)
        counts.count(AGREEMENT, 3, 0, ["ada"])
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        counts.count(AGREEMENT, 6, 0, ["ada"])


def test_a_turn_is_on_the_disk_before_it_is_taken(tmp_path: Path) -> None:
    program = (
        "import os, sys; from keeper_openings import agreement_of; from fedcgd.keepers import Keepers, NodeParticipations\n"
        "NodeParticipations.open(sys.argv[1]).count(agreement_of(Keepers.simulation(7, 3, colluding=1)), 0, 0, ['ada'])\n"
        "os.kill(os.getpid(), 9)"
    )
    helpers = Path(__file__).parents[1] / "helpers"
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "counts.db"], cwd=helpers, check=False)
    assert done.returncode == -9
    with NodeParticipations.open(tmp_path / "counts.db") as counts:
        assert refused(counts, 1, "ada")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, and long enough to be read as one" * 9)
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(ValueError, match="node's count"):
        NodeParticipations.open(tmp_path / "text")
    NodeParticipations.open(tmp_path / "counts.db").close()
    edit(tmp_path / "counts.db", "PRAGMA user_version = 0")  # of a version that did not tell kinds apart
    with pytest.raises(ValueError, match="another version"):
        NodeParticipations.open(tmp_path / "counts.db")


def test_a_plan_that_costs_more_than_the_file_allows_is_refused() -> None:
    epsilon = PLAN.guarantee().epsilon
    within = replace(KEEPERS, epsilon=epsilon * 1.001, delta=PLAN.delta)
    assert agreement_of(within).keepers == within
    for short in (replace(within, epsilon=epsilon * 0.999), replace(within, delta=PLAN.delta / 2)):
        with pytest.raises(ValueError, match="keepers' file"):
            agreement_of(short)
        with pytest.raises(ValueError, match="keepers' file"):
            type(AGREEMENT).from_description(AGREEMENT.to_description() | {"keepers": short.digest}, short)


def test_limits_are_in_the_file_and_all_parties_have_the_same() -> None:
    limited = replace(KEEPERS, epsilon=8, delta=1e-5)
    assert replace(Keepers.from_toml(limited.to_toml()), simulation_seed=7) == limited
    others = (KEEPERS, limited, replace(limited, epsilon=9), replace(limited, delta=1e-6))
    assert len({keepers.digest for keepers in others}) == 4
    assert replace(Keepers.from_toml(KEEPERS.to_toml()), simulation_seed=7) == KEEPERS


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"epsilon": 8.0}, "together or not at all"),
        ({"delta": 1e-5}, "together or not at all"),
        ({"epsilon": 0.0, "delta": 1e-5}, "positive number, got 0.0"),
        ({"epsilon": float("nan"), "delta": 1e-5}, "positive number, got nan"),
        ({"epsilon": float("inf"), "delta": 1e-5}, "positive number, got inf"),
        ({"epsilon": "8", "delta": 1e-5}, "positive number, got '8'"),
        ({"epsilon": True, "delta": 1e-5}, "positive number, got True"),
        ({"epsilon": 8.0, "delta": 1.0}, "below 1, got 1.0"),
    ],
)
def test_limits_out_of_range_are_refused(limits: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(KEEPERS, **limits)
