"""One text where a list of users is expected would be one user for each of its letters: refused wherever users are taken."""

import numpy as np
import pytest
from keeper_openings import agreement_of
from plans import make_plan

from fedcgd import LambdaCGD, NoiseKey, Participation
from fedcgd.keepers import Keepers, NodeParticipations
from fedcgd.ledger import Ledger
from fedcgd.participation.cohorts import cohort, eligible
from fedcgd.participation.history import History
from fedcgd.participation.user_ids import NoUserIdsError, user_ids
from fedcgd.release import ReleaseProtocol

PARTICIPATION = Participation(rounds=6)
KEY = NoiseKey.simulation(1)
PLAN = make_plan(LambdaCGD(0.5), PARTICIPATION)


def ledger() -> Ledger:
    return Ledger.open(":memory:", plan=PLAN, configuration={}, key=KEY)


def counted_on_a_node(users) -> None:
    with NodeParticipations.open(":memory:") as turns:
        turns.count(agreement_of(Keepers.simulation(7, 3, colluding=1)), 0, 0, users)


DOORS = {
    "cohort": lambda users: cohort(PARTICIPATION, 0, users, History(), cohort_size=1, key=b"k"),
    "eligible": lambda users: eligible(PARTICIPATION, 0, users, History()),
    "history": lambda users: History().with_round(0, users),
    "plan_round": lambda users: ReleaseProtocol(ledger(), PLAN, KEY).plan_round(users),
    "Ledger.plan_round": lambda users: ledger().plan_round(0, users),
    "Ledger.history": lambda users: ledger().history(users),
    "Ledger.bind_users": lambda users: ledger().bind_users(users, "silo"),
    "NodeParticipations": counted_on_a_node,
}


@pytest.mark.parametrize("users", ["ada", b"ada", bytearray(b"ada"), None, 17], ids=repr)
@pytest.mark.parametrize("door", DOORS)
def test_one_text_is_refused_where_a_list_of_users_is_taken(door: str, users) -> None:
    with pytest.raises(NoUserIdsError):
        DOORS[door](users)


@pytest.mark.parametrize("door", DOORS)
def test_a_list_of_one_user_is_taken(door: str) -> None:
    DOORS[door](["ada"])


@pytest.mark.parametrize("one", [17, np.int64(17), 1.5, None, "", b"ada"], ids=repr)
def test_an_id_is_a_text_that_is_not_empty(one) -> None:
    with pytest.raises(NoUserIdsError):
        user_ids(["ada", one])


def test_ids_are_taken_in_their_order_and_each_once() -> None:
    assert user_ids(name for name in ("ben", "ada")) == ("ben", "ada")
    assert user_ids(dict.fromkeys(["ben", "ada"]).keys()) == ("ben", "ada")
    assert user_ids([]) == ()
    for users in (["ada", "ben", "ada"], ["ada", "ada"]):
        with pytest.raises(ValueError, match="named twice"):
            user_ids(users)
