"""Runs whose server is killed."""

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import server_worker as worker

from fedcgd.ledger import export, verify


@dataclass(frozen=True)
class Asked:
    life: str
    round: int
    attempt: int
    model: str
    users: frozenset[str]


@dataclass(frozen=True)
class Published:
    life: str
    release: int  # 0 is the initial model
    model: str


@dataclass(frozen=True)
class Opened:
    keeper: int
    kind: str
    round: int
    attempt: int
    answer: str


@dataclass(frozen=True)
class KilledRun:
    """What a run with kills left behind: its ledger in `folder`, and all that ever left the server process, in order."""

    folder: Path
    rounds: int
    kills: int
    asked: tuple[Asked, ...]
    published: tuple[Published, ...]
    written: frozenset[tuple[str, int]]
    """(life, round) in which a model was on the disk before the ledger named it."""
    opened: tuple[Opened, ...]
    """What left the nodes that are keepers."""
    attempts: tuple[dict, ...]

    @property
    def released_attempts(self) -> list[tuple[int, int]]:
        return [(a["round"], a["attempt"]) for a in self.attempts if a["state"] == "released"]


def run_with_kills(folder: Path, rounds: int, kills: int, noise: str = "server") -> KilledRun:
    done = subprocess.run(
        [sys.executable, worker.__file__, str(folder), str(rounds), str(kills), "7", noise],
        capture_output=True,
        text=True,
        timeout=280 if kills < 100 else 1500,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == [str(kills), "0"]
    lines = [line.split(" ") for line in (folder / "world").read_text().splitlines()]
    return KilledRun(
        folder=folder,
        rounds=rounds,
        kills=kills,
        asked=tuple(Asked(w[1], int(w[2]), int(w[3]), w[4], frozenset(w[5:])) for w in lines if w[0] == "asked"),
        published=tuple(Published(w[1], int(w[2]), w[3]) for w in lines if w[0] == "published"),
        written=frozenset((w[1], int(w[2])) for w in lines if w[0] == "written"),
        opened=tuple(Opened(int(w[1]), w[2], int(w[3]), int(w[4]), w[5]) for w in lines if w[0] == "opened"),
        attempts=tuple(export(folder / "ledger")["attempts"]),
    )


def check_that_nothing_is_lost_and_nothing_happens_twice(run: KilledRun) -> None:
    verification = verify(run.folder / "ledger")
    assert (verification.released, verification.problems, verification.run.simulated) == (run.rounds, (), False)

    # One model for each release, whoever saw it and however often the server was killed since.
    models = defaultdict(set)
    for shown in run.published:
        models[shown.release].add(shown.model)
    for asked in run.asked:
        models[asked.round].add(asked.model)
    assert {release: len(seen) for release, seen in models.items()} == dict.fromkeys(range(run.rounds + 1), 1)

    # An attempt is of one life of the server only, and is on record before anybody is asked under it.
    lives = defaultdict(set)
    for asked in run.asked:
        lives[asked.round, asked.attempt].add(asked.life)
    assert max(len(of) for of in lives.values()) == 1
    assert set(lives) <= {(a["round"], a["attempt"]) for a in run.attempts}
    assert set(lives) >= set(run.released_attempts)

    rounds_of = defaultdict(set)
    for asked in run.asked:
        for user in asked.users:
            rounds_of[user].add(asked.round)
    for rounds in rounds_of.values():
        assert all(later - earlier >= worker.SEPARATION for earlier, later in pairwise(sorted(rounds)))
