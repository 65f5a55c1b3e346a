"""kill -9 at random moments of a server and its keepers: no round of either kind opens twice, and every opening counts."""

from collections import defaultdict
from pathlib import Path

import pytest
import server_worker as worker
from server_kills import check_that_nothing_is_lost_and_nothing_happens_twice, run_with_kills

from fedcgd.keepers import EVALUATION, TRAINING
from fedcgd.keepers.record import read, record_file
from fedcgd.keepers.verification import contradictions
from fedcgd.ledger import verify
from fedcgd.ledger.attempts import read_openings as openings_of
from fedcgd.ledger.store import evaluation_ledger, reader

SIZES = [
    pytest.param((15, 8), id="8 kills"),
    pytest.param((300, 300), id="300 kills", marks=[pytest.mark.slow, pytest.mark.timeout(1600)]),
]
"""(rounds, kills)"""


@pytest.mark.parametrize("size", SIZES)
def test_whatever_is_killed_no_round_opens_twice_and_every_opening_counts(
    size: tuple[int, int], tmp_path: Path
) -> None:
    killed = run_with_kills(tmp_path, *size, "nodes")
    check_that_nothing_is_lost_and_nothing_happens_twice(killed)
    states = [attempt["state"] for attempt in killed.attempts]
    spent = verify(tmp_path / "ledger").keepers.spent
    assert states.count("released") + states.count("spent") == killed.rounds
    assert states.count("spent") == spent <= killed.kills

    # What left each keeper: one answer a round, the same however often it was asked, and all of one attempt.
    answers = defaultdict(set)
    for opened in killed.opened:
        answers[opened.keeper, opened.kind, opened.round].add((opened.attempt, opened.answer))
    assert all(len(given) == 1 for given in answers.values())

    # Whatever a keeper opened is on record as released or spent, in that very attempt; nobody was told another list.
    records = {f"k{i}": read(record_file(worker.key_file(tmp_path, i))) for i in range(worker.NODES)}
    assert contradictions(records, tmp_path / "ledger") == []
    counted = {}
    for kind, ledger in ((TRAINING, tmp_path / "ledger"), (EVALUATION, evaluation_ledger(tmp_path / "ledger"))):
        assert verify(ledger).problems == ()
        with reader(ledger) as connection:
            counted |= {(kind, opened.round, opened.attempt): opened for opened in openings_of(connection)}
    for record in records.values():
        assert {(opened.kind, opened.round, opened.attempt) for opened in record.openings} <= counted.keys()
    for (kind, round, _), opened in counted.items():
        if opened.state == "released":  # with the noise of all keepers
            assert all((kind, round) in {(o.kind, o.round) for o in records[name].openings} for name in opened.keepers)
    assert {kind for kind, _, _ in counted} == {TRAINING, EVALUATION}

    if killed.kills >= 300:
        assert spent > 0  # some were killed between the question and the release
        assert verify(evaluation_ledger(tmp_path / "ledger")).keepers.spent > 0
        assert "abandoned" in states
