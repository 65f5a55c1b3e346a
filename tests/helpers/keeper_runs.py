"""Runs of a strategy with keepers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flower_runs
from fake_grid import FakeGrid, FakeNode
from flower_runs import names
from flwr.app import Message

from fedcgd.keepers import KeeperKey, Keepers
from fedcgd.keepers.record import read, record_file
from fedcgd.noise.keys import NoiseKey
from fedcgd_flower import CorrelatedNoise

SIMULATED = Keepers.simulation(7, 3, colluding=1)


def node(users, keepers: Keepers | None = SIMULATED, amount: float = 1.0, **options) -> FakeNode:
    return flower_runs.node(users, amount, keepers=keepers, **options)


def two_nodes(keepers: Keepers | None = SIMULATED) -> FakeGrid:
    return FakeGrid({1: node(names(12)[::2], keepers), 2: node(names(12)[1::2], keepers)})


def make(keepers: Keepers | None = SIMULATED, **options) -> CorrelatedNoise:
    return flower_runs.make(keepers=keepers, **options)


class RealKeepers:
    """Three keepers with keys on the disk, each a node of its own beside the two that host users."""

    def __init__(
        self,
        folder: Path,
        *,
        colluding: int = 1,
        away: int = 0,
        nodes: int = 1,  # of two, one may host a whole cohort
        names: Sequence[str] = ("k0", "k1", "k2"),
    ) -> None:
        self.files = [folder / f"{name}.key" for name in names]
        cards = tuple(KeeperKey.from_file(path, create=True).card(path.stem) for path in self.files)
        self.keepers = Keepers(cards=cards, colluding=colluding, away=away, nodes=nodes)
        self.key = NoiseKey.from_file(folder / "server.key", create=True)
        self.ledger = folder / "run.db"

    def grid(self) -> FakeGrid:
        grid = two_nodes(self.keepers)
        for i, path in enumerate(self.files):
            grid.nodes[10 + i] = node([], self.keepers, config={"keeper": str(path)})
        return grid

    def make(self, **options) -> CorrelatedNoise:
        return make(self.keepers, key=self.key, ledger=self.ledger, **{"trusted_nodes": True} | options)

    def openings(self, number: int) -> list[int]:
        return [opened.round for opened in read(record_file(self.files[number])).openings]


def opening_asked(request: Message) -> dict[str, Any]:
    """What a keeper is asked to open by `request`: its line of JSON; empty if it is asked nothing of the kind."""
    asked = request.content.config_records.get("fedcgd-keepers", {})
    return json.loads(asked["request"].partition(b"\n")[0]) if asked.get("question") == "/open" else {}


def refusal_in(reply: Message) -> str:
    """Why a keeper refuses in its `reply` to a request to open; empty if it opens the round."""
    answer = reply.content.array_records["update"]["flat"].numpy().tobytes()
    refused: str = json.loads(answer.partition(b"\n")[0]).get("refused", "")
    return refused
