"""How the server reaches keepers: nodes that prove which keeper they are, services, or simulated ones in its own process."""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from logging import INFO, WARNING
from pathlib import Path
from typing import Protocol

from flwr.serverapp import Grid

from fedcgd.keepers import Agreement, Keeper, Keepers, Opening, Refusal, service
from fedcgd.keepers.masks import Residues
from fedcgd.keepers.wire import CHALLENGE, answer_from_bytes, proof_of, to_bytes
from fedcgd_flower.flower_private import log
from fedcgd_flower.keeper_messages import keeper_query, opening_request, read_identity, read_opened
from fedcgd_flower.send_and_receive import UnreadableReplyError, pull, push, send_and_receive

_FIRST_WAIT = 0.02  # seconds between looks at who a keeper is: longer each time
_TOLD_EVERY = 30.0  # seconds between lines about keepers that are waited for
_ANSWER_WITHIN = 120.0  # seconds until a keeper is asked the same once more
_PROOF_WITHIN = 10.0  # seconds until a service counts as away
_MOST_WORDS = 2**20  # bytes of a service's answer beside the residues


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
            answers[name] = self._keepers[name].reply(agreement, opening, check=check)
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
        def reachable() -> Collection[str]:
            self._look(grid)
            return self._nodes

        return _wait_for(self._keepers, reachable, patience)

    def ask(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], *, check: bool, patience: float
    ) -> dict[str, Residues | Refusal | None]:
        def ask(missing: Sequence[str], within: float) -> list[Residues | Refusal | None]:
            self._look(grid)
            asked = [name for name in missing if name in self._nodes]
            requests = [opening_request(self._nodes[name], agreement, openings[name], check=check) for name in asked]
            replies = send_and_receive(grid, requests, within) if requests else []
            read = [None if reply is None else read_opened(reply, agreement) for reply in replies]
            answered = dict(zip(asked, read, strict=True))
            for name in asked:
                if answered[name] is None:  # gone, or failing: whoever has its key may come back as another node
                    del self._nodes[name]
            return [answered.get(name) for name in missing]

        return _ask_again(tuple(openings), ask, patience)

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


class KeeperServices:
    """Keepers that are processes of their own, at the addresses on their cards (`fedcgd keeper serve`)."""

    def __init__(self, keepers: Keepers) -> None:
        self._keepers = keepers
        self._troubles: dict[str, str] = {}
        """Why a keeper was not reached the last time, so that it is said once."""

    def present(self, grid: Grid, patience: float) -> tuple[str, ...]:
        return _wait_for(self._keepers, self._reachable, patience)

    def ask(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], *, check: bool, patience: float
    ) -> dict[str, Residues | Refusal | None]:
        question = "/check" if check else "/open"

        def ask(missing: Sequence[str], within: float) -> list[Residues | Refusal | None]:
            requests = [to_bytes(agreement, openings[name]) for name in missing]
            most = agreement.size * agreement.bits // 8 + _MOST_WORDS
            answers = self._asked(missing, question, requests, most, within)
            return [None if answer is None else answer_from_bytes(answer, agreement) for answer in answers]

        return _ask_again(tuple(openings), ask, patience)

    def _reachable(self) -> Collection[str]:
        names = self._keepers.names
        challenges = [os.urandom(32) for _ in names]
        sealed = [
            card.seal(challenge, CHALLENGE) for card, challenge in zip(self._keepers.cards, challenges, strict=True)
        ]
        proofs = self._asked(names, "/who", sealed, _MOST_WORDS, _PROOF_WITHIN)
        return [
            name
            for name, challenge, proof in zip(names, challenges, proofs, strict=True)
            if proof == proof_of(challenge)
        ]

    def _asked(
        self, names: Sequence[str], question: str, requests: Sequence[bytes], most: int, within: float
    ) -> list[bytes | None]:
        tls = self._keepers.tls
        assert tls is not None  # check_keepers has seen it

        def one(name: str, request: bytes) -> bytes | None:
            address, trouble, answer = self._keepers.card(name).address, "", None
            try:
                answer = service.ask(address, question, request, tls, most=most, timeout=within)
            except OSError as error:
                trouble = str(error)
                if trouble != self._troubles.get(name, ""):
                    log(WARNING, "fedcgd: keeper %s is not reached at %s: %s", name, address, trouble)
            self._troubles[name] = trouble
            return answer

        with ThreadPoolExecutor(max(1, len(names))) as pool:
            return list(pool.map(one, names, requests))


def transport_of(keepers: Keepers, ledger: Path | None, *, new: bool) -> Transport:
    """How these keepers are reached, in a run recorded at `ledger`, if in a file, that is `new` or has asked them before."""
    if keepers.simulated:
        return SimulatedKeepers(keepers, ledger, new=new)
    return KeeperServices(keepers) if keepers.are_services else KeeperNodes(keepers)


def _wait_for(keepers: Keepers, reachable: Callable[[], Collection[str]], patience: float) -> tuple[str, ...]:
    """The `reachable` keepers, sorted, once it is all of them or `patience` seconds have passed."""
    began = time.monotonic()
    deadline, told, wait = began + patience, began + 1.0, _FIRST_WAIT
    while True:
        there = reachable()
        missing = set(keepers.names) - set(there)
        now = time.monotonic()
        if not missing or now >= deadline:
            return tuple(sorted(there))
        if now >= told:
            log(INFO, "fedcgd: waiting for keepers %s, up to %.0f s", ", ".join(sorted(missing)), deadline - now)
            told = now + _TOLD_EVERY
        time.sleep(min(wait, max(deadline - now, 0)))
        wait = min(1.5 * wait, 1.0)


def _ask_again(
    names: Sequence[str], ask: Callable[[Sequence[str], float], list[Residues | Refusal | None]], patience: float
) -> dict[str, Residues | Refusal | None]:
    """What each of `names` answers to `ask(names, seconds)`, which is called for those that gave none until `patience` ends."""
    answers: dict[str, Residues | Refusal | None] = dict.fromkeys(names)
    deadline = time.monotonic() + patience
    while True:
        missing = [name for name in names if answers[name] is None]
        within = max(1.0, min(_ANSWER_WITHIN, deadline - time.monotonic()))
        answers |= zip(missing, ask(missing, within), strict=True)
        if all(answer is not None for answer in answers.values()) or time.monotonic() >= deadline:
            return answers
        time.sleep(min(1.0, max(deadline - time.monotonic(), 0)))
