"""How the server reaches keepers: nodes that prove which keeper they are, or simulated ones in its own process."""

import os
import time
from collections.abc import Mapping
from logging import INFO
from pathlib import Path
from typing import Protocol

from flwr.serverapp import Grid

from fedcgd.keepers import Agreement, Keeper, Keepers, Opening, RefusedError
from fedcgd.keepers.keeper import UnreadableError
from fedcgd.keepers.masks import Residues
from fedcgd_flower.flower_private import log
from fedcgd_flower.keeper_app import proof_of
from fedcgd_flower.keeper_messages import CHALLENGE, Refusal, keeper_query, opening_request, read_identity, read_opened
from fedcgd_flower.send_and_receive import UnreadableReplyError, pull, push, send_and_receive

_FIRST_WAIT = 0.02  # seconds between looks at who a keeper is: longer each time
_TOLD_EVERY = 30.0  # seconds between lines about keepers that are waited for
_ANSWER_WITHIN = 120.0  # seconds until a keeper is asked the same once more


class Transport(Protocol):
    """How keepers are reached."""

    def present(self, grid: Grid, patience: float) -> tuple[str, ...]:
        """The keepers that can be reached, sorted: all of them, or who is there after `patience` seconds."""
        ...

    def ask(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], *, check: bool, patience: float
    ) -> dict[str, Residues | Refusal | None]:
        """What each keeper answers to its request; None if nothing came within `patience` seconds."""
        ...


class SimulatedKeepers:
    """Simulated keepers, in the server's own process; their records lie beside the ledger, or in memory without one."""

    def __init__(self, keepers: Keepers, ledger: Path | None, *, new: bool) -> None:
        self._keepers: dict[str, Keeper] = {}
        for number in range(len(keepers.cards)):
            beside = None if ledger is None else ledger.with_name(f"{ledger.name}-keeper-{number}.record")
            if beside is not None and new:  # of an earlier simulation, whose ledger is gone
                for suffix in ("", "-wal", "-shm"):
                    beside.with_name(beside.name + suffix).unlink(missing_ok=True)
            keeper = Keeper.simulation(keepers, number, beside)
            self._keepers[keeper.card.name] = keeper

    def present(self, grid: Grid, patience: float) -> tuple[str, ...]:
        return tuple(sorted(self._keepers))

    def ask(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], *, check: bool, patience: float
    ) -> dict[str, Residues | Refusal | None]:
        answers: dict[str, Residues | Refusal | None] = {}
        for name, opening in openings.items():
            keeper = self._keepers[name]
            try:
                if check:
                    answers[name] = Refusal("", keeper.unreadable(agreement, opening))
                else:
                    answers[name] = keeper.answer(agreement, opening)
            except UnreadableError as refused:
                answers[name] = Refusal(str(refused), refused.positions)
            except RefusedError as refused:
                answers[name] = Refusal(str(refused))
        return answers

    def close(self) -> None:
        """Close their records."""
        for keeper in self._keepers.values():
            keeper.close()


class KeeperNodes:
    """Keepers that are connected nodes: each shows which one it is by opening a challenge that is sealed to its card."""

    def __init__(self, keepers: Keepers) -> None:
        self._keepers = keepers
        self._nodes: dict[str, int] = {}
        self._others: set[int] = set()
        self._asked: dict[int, tuple[str, dict[str, bytes]]] = {}

    def present(self, grid: Grid, patience: float) -> tuple[str, ...]:
        began = time.monotonic()
        deadline, told, wait = began + patience, began + 1.0, _FIRST_WAIT
        while True:
            self._look(grid)
            missing = set(self._keepers.names) - self._nodes.keys()
            now = time.monotonic()
            if not missing or now >= deadline:
                return tuple(sorted(self._nodes))
            if now >= told:
                log(INFO, "fedcgd: waiting for keepers %s, up to %.0f s", ", ".join(sorted(missing)), deadline - now)
                told = now + _TOLD_EVERY
            time.sleep(min(wait, max(deadline - now, 0)))
            wait = min(1.5 * wait, 1.0)

    def ask(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], *, check: bool, patience: float
    ) -> dict[str, Residues | Refusal | None]:
        answers: dict[str, Residues | Refusal | None] = dict.fromkeys(openings)
        deadline = time.monotonic() + patience
        while True:
            self._look(grid)
            waiting = [name for name, answer in answers.items() if answer is None and name in self._nodes]
            requests = [opening_request(self._nodes[name], agreement, openings[name], check=check) for name in waiting]
            within = max(1.0, min(_ANSWER_WITHIN, deadline - time.monotonic()))
            replies = send_and_receive(grid, requests, within) if requests else []
            for name, reply in zip(waiting, replies, strict=True):
                if reply is not None:
                    answers[name] = read_opened(reply, agreement)
                if answers[name] is None:  # gone, or failing: whoever has its key may come back as another node
                    self._forget(name)
            if all(answer is not None for answer in answers.values()) or time.monotonic() >= deadline:
                return answers
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0)))

    def _forget(self, name: str) -> None:
        self._nodes.pop(name, None)

    def _look(self, grid: Grid) -> None:
        """Ask nodes that were not known before, and read what has been answered."""
        connected = set(grid.get_node_ids())
        self._nodes = {name: node for name, node in self._nodes.items() if node in connected}
        if len(self._nodes) == len(self._keepers.cards):
            return
        known = self._others | set(self._nodes.values()) | self._asked.keys()
        new = sorted(connected - known)
        queries = []
        for node_id in new:
            challenges = {card.name: os.urandom(32) for card in self._keepers.cards}
            sealed = {card.name: card.seal(challenges[card.name], CHALLENGE) for card in self._keepers.cards}
            queries.append(keeper_query(node_id, sealed))
            self._asked[node_id] = ("", challenges)
        gone = {reply.metadata.src_node_id for reply in push(grid, queries)} if queries else set()
        for node_id, query in zip(new, queries, strict=True):
            self._asked[node_id] = (query.metadata.message_id, self._asked[node_id][1])
        for node_id, (message_id, challenges) in list(self._asked.items()):
            if node_id not in connected or node_id in gone:
                del self._asked[node_id]
                continue
            try:
                reply = pull(grid, message_id)
            except UnreadableReplyError:
                reply = None
                self._others.add(node_id)
                del self._asked[node_id]
            if reply is None:
                continue
            del self._asked[node_id]
            name, proof = read_identity(reply)
            if name in challenges and proof == proof_of(challenges[name]):
                self._nodes[name] = node_id
            else:
                self._others.add(node_id)
