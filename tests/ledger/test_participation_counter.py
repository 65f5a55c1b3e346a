"""Who took part how often, and when last: what is kept in memory of the table, and what is read again."""

import random
import sqlite3

import pytest
from ledgers import refused

from fedcgd import Participation
from fedcgd.ledger import attempts
from fedcgd.ledger.attempts import ParticipationCounter
from fedcgd.ledger.store import USERS

PARTICIPATION = Participation(rounds=40, min_separation=4, max_participations=3)
PEOPLE = [f"user-{i}" for i in range(9)]


def counter(connection: sqlite3.Connection) -> ParticipationCounter:
    return ParticipationCounter(connection, PARTICIPATION)


@pytest.fixture
def connection():
    connection = sqlite3.connect(":memory:")
    connection.execute(USERS)
    yield connection
    connection.close()


@pytest.mark.parametrize("most", [0, 2, 5, 10**6])
def test_turns_are_those_of_a_plain_count_however_few_users_are_kept_in_memory(most, connection, monkeypatch) -> None:
    monkeypatch.setattr(attempts, "_MOST_SEEN", most)
    counted, draw = counter(connection), random.Random(most)
    rounds: dict[str, list[int]] = {}
    for round in range(40):
        cohort = draw.sample(PEOPLE, 4)
        for _ in range(draw.randint(1, 3)):  # a round may be tried again with the same users
            asked = [user for user in cohort if may(rounds.get(user, []), round)]
            for user in asked:
                rounds[user] = sorted({*rounds.get(user, []), round})
            counted.remember(counted.count(round, asked))
        before = [tuple(row) for row in connection.execute("SELECT * FROM users ORDER BY id")]
        for user in PEOPLE:
            if not may(rounds.get(user, []), round + 1):
                with refused("too-often"):
                    counted.count(round + 1, [user])
        assert before == list(connection.execute("SELECT * FROM users ORDER BY id"))
        turns = {user: (len(took), took[-1]) for user, took in rounds.items()}
        for known in (counted, counter(connection)):  # from memory, and from the table alone
            assert {user: record[1:] for user, record in known.of(PEOPLE).items()} == turns
    assert max(len(took) for took in rounds.values()) == 3


def may(rounds: list[int], round: int) -> bool:
    """Whether somebody that took part in `rounds` may take part in `round`, or did already."""
    return round in rounds or (len(rounds) < 3 and (not rounds or round - rounds[-1] >= 4))


def test_what_was_counted_and_undone_is_not_remembered(connection) -> None:
    counted = counter(connection)
    counted.remember(counted.count(0, ["alice"]))
    connection.commit()
    counted.count(9, ["alice", "bob"])
    connection.rollback()
    assert counted.of(["alice", "bob"]) == {"alice": (1, 1, 0)}
    counted.remember(counted.count(4, ["bob", "alice"]))
    assert (
        counted.of(["alice", "bob"])
        == counter(connection).of(["alice", "bob"])
        == {"alice": (1, 2, 4), "bob": (2, 1, 4)}
    )
