"""kill -9 at random moments of servers, and of nodes that are keepers too: no round opens twice, what was opened counts."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import keeper_worker
import pytest

from fedcgd.keepers.record import read, record_file
from fedcgd.keepers.verification import contradictions
from fedcgd.ledger import export, verify
from fedcgd.ledger.openings import read as openings_of
from fedcgd.ledger.store import reader

SIZES = [
    pytest.param((10, 8), "server,node", id="8 kills"),
    pytest.param((100, 100), "server", id="100 kills of servers", marks=[pytest.mark.slow, pytest.mark.timeout(2400)]),
    pytest.param((300, 300), "server,node", id="300 kills", marks=[pytest.mark.slow, pytest.mark.timeout(2400)]),
]
"""(rounds, kills), victims"""


@pytest.mark.parametrize(("size", "victims"), SIZES)
def test_whatever_is_killed_no_round_opens_twice_and_every_opening_counts(
    size: tuple[int, int], victims: str, tmp_path: Path
) -> None:
    rounds, kills = size
    done = subprocess.run(
        [sys.executable, keeper_worker.__file__, str(tmp_path), str(rounds), str(kills), "7", victims],
        capture_output=True,
        text=True,
        timeout=280 if kills < 200 else 2300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.stderr == ""
    servers, nodes, code = map(int, done.stdout.split())
    assert (servers + nodes, code) == (kills, 0)

    ledger = tmp_path / "ledger"
    found = verify(ledger)
    assert (found.released, found.problems, found.simulated) == (rounds, (), False)
    states = [attempt["state"] for attempt in export(ledger)["attempts"]]
    assert states.count("released") + states.count("spent") == rounds
    assert states.count("spent") == found.keepers.spent <= kills

    # What left each keeper: one answer a round, the same however often it was asked, and all of one attempt.
    lines = [line.split(" ") for line in (tmp_path / "world").read_text().splitlines()]
    answers = defaultdict(set)
    for word in lines:
        if word[0] == "opened":
            answers[int(word[1]), int(word[2])].add((word[3], word[4]))
    assert all(len(given) == 1 for given in answers.values())

    # Whatever a keeper opened is on record as released or spent, in that very attempt; nobody was told another list.
    records = {f"k{i}": read(record_file(keeper_worker.key_file(tmp_path, i))) for i in range(keeper_worker.KEEPERS)}
    assert contradictions(records, ledger) == []
    with reader(ledger) as connection:
        counted = {(opened.round, opened.attempt): opened for opened in openings_of(connection)}
    for record in records.values():
        assert {(opened.round, opened.attempt) for opened in record.openings} <= counted.keys()
    for opened in counted.values():
        if opened.state == "released":  # with the noise of all keepers
            assert all(opened.round in {one.round for one in records[name].openings} for name in opened.keepers)

    # One model for each release, whoever saw it.
    models = defaultdict(set)
    for word in lines:
        if word[0] == "published":
            models[int(word[2])].add(word[3])
    assert all(len(seen) == 1 for seen in models.values())
    if kills >= 200:
        assert found.keepers.spent > 0  # some were killed between the question and the release
        assert states.count("abandoned") > 0
