"""How the server reaches keepers: nodes that prove which keeper they are, services, or simulated ones in its own process."""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from fedcgd.keepers import Agreement, Keeper, Keepers, Opening, Refusal, service
from fedcgd.keepers.masks import Residues
from fedcgd.keepers.wire import answer_from_bytes, challenges, to_bytes
from fedcgd_flower.flower_private import log_info, log_warning
from fedcgd_flower.grid import UnreadableReplyError, pull, push, send_and_receive
from fedcgd_flower.keepers.messages import keeper_question, read_answer


@dataclass(frozen=True)
class Waits:
    """How keepers are waited for, in seconds, and how much they may answer."""

    first: float = 0.02  # between looks at who a keeper is: longer each time
    logged_every: float = 30.0  # between lines about keepers that are waited for
    answer: float = 120.0  # until a keeper is asked the same once more
    proof: float = 10.0  # until a service counts as away
    most_words: int = 2**20  # bytes of a service's answer next to the residues


WAITS = Waits()

Answer = Residues | Refusal | None
"""A keeper's answer to an opening; None if nothing that can be read came."""


class Transport(ABC):
    """How the keepers of a run are reached."""

    def __init__(self, keepers: Keepers) -> None:
        self._keepers = keepers

    @abstractmethod
    def _reachable(self, grid: Grid) -> Collection[str]:
        """The keepers that can be reached now."""

    @abstractmethod
    def _ask_once(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], check: bool, within: float
    ) -> Mapping[str, Answer]:
        """What keepers answer to their requests within so many seconds."""

    def close(self) -> None:  # noqa: B027 — most have nothing to close
        """Close what is open."""

    def present(self, grid: Grid, patience: float) -> tuple[str, ...]:
        """The keepers that can be reached, sorted: all of them, or who is there after `patience` seconds."""
        began = time.monotonic()
        deadline, log_at, wait = began + patience, began + 1.0, WAITS.first
        while True:
            there = self._reachable(grid)
            missing = set(self._keepers.names) - set(there)
            now = time.monotonic()
            if not missing or now >= deadline:
                return tuple(sorted(there))
            if now >= log_at:
                log_info(f"waiting for keepers {', '.join(sorted(missing))}, up to {deadline - now:.0f} s")
                log_at = now + WAITS.logged_every
            time.sleep(min(wait, max(deadline - now, 0)))
            wait = min(1.5 * wait, 1.0)

    def ask(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], *, check: bool, patience: float
    ) -> dict[str, Answer]:
        """What each keeper answers to its request; None if nothing came within `patience` seconds.

        A keeper that gives no answer is asked the same again.
        """
        answers: dict[str, Answer] = dict.fromkeys(openings)
        deadline = time.monotonic() + patience
        while True:
            missing = {name: opening for name, opening in openings.items() if answers[name] is None}
            within = max(1.0, min(WAITS.answer, deadline - time.monotonic()))
            answers |= self._ask_once(grid, agreement, missing, check, within)
            if all(answer is not None for answer in answers.values()) or time.monotonic() >= deadline:
                return answers
            time.sleep(min(1.0, max(deadline - time.monotonic(), 0)))


class SimulatedKeepers(Transport):
    """Simulated keepers, in the server's own process; their records lie next to the ledger, or in memory without one."""

    def __init__(self, keepers: Keepers, ledger: Path | None, *, new: bool) -> None:
        super().__init__(keepers)
        self._running: dict[str, Keeper] = {}
        for number in range(len(keepers.cards)):
            beside = None if ledger is None else ledger.with_name(f"{ledger.name}-keeper-{number}.record")
            if beside is not None and new:  # of an earlier simulation, whose ledger is gone
                for suffix in ("", "-wal", "-shm"):
                    beside.with_name(beside.name + suffix).unlink(missing_ok=True)
            keeper = Keeper.simulation(keepers, number, beside)
            self._running[keeper.card.name] = keeper

    def _reachable(self, grid: Grid) -> Collection[str]:
        return self._running

    def _ask_once(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], check: bool, within: float
    ) -> Mapping[str, Answer]:
        return {name: self._running[name].reply(agreement, asked, check=check) for name, asked in openings.items()}

    def close(self) -> None:
        """Close their records."""
        for keeper in self._running.values():
            keeper.close()


class KeeperNodes(Transport):
    """Keepers that are connected nodes: each shows which one it is by opening a challenge that is sealed to its card."""

    def __init__(self, keepers: Keepers) -> None:
        super().__init__(keepers)
        self._nodes: dict[str, int] = {}
        self._others: set[int] = set()
        self._asked: dict[int, tuple[Message, dict[bytes, str]]] = {}

    def _reachable(self, grid: Grid) -> Collection[str]:
        self._look(grid)
        return self._nodes

    def _ask_once(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], check: bool, within: float
    ) -> Mapping[str, Answer]:
        self._look(grid)
        asked = [name for name in openings if name in self._nodes]
        question = "/check" if check else "/open"
        requests = [keeper_question(self._nodes[name], question, to_bytes(agreement, openings[name])) for name in asked]
        answers: dict[str, Answer] = {}
        for name, reply in zip(asked, send_and_receive(grid, requests, within) if requests else [], strict=True):
            answers[name] = None if reply is None else answer_from_bytes(read_answer(reply), agreement)
            if answers[name] is None:  # gone, or failing: the holder of its key may come back as another node
                del self._nodes[name]
        return answers

    def _look(self, grid: Grid) -> None:
        """Ask nodes that were not known before, and read what has been answered."""
        connected = set(grid.get_node_ids())
        self._nodes = {name: node for name, node in self._nodes.items() if node in connected}
        if len(self._nodes) == len(self._keepers.cards):
            return
        known = self._others | set(self._nodes.values()) | self._asked.keys()
        queries = []
        for node_id in sorted(connected - known):
            proofs, sealed = challenges(self._keepers)
            queries.append(keeper_question(node_id, "/who", sealed))
            self._asked[node_id] = queries[-1], proofs
        gone = {reply.metadata.src_node_id for reply in push(grid, queries)} if queries else set()
        self._asked = {node: asked for node, asked in self._asked.items() if node in connected and node not in gone}
        for node_id, (query, proofs) in list(self._asked.items()):
            name = None
            try:
                if (reply := pull(grid, query.metadata.message_id)) is None:
                    continue
                name = proofs.get(read_answer(reply))
            except UnreadableReplyError:
                pass
            del self._asked[node_id]
            if name is None:
                self._others.add(node_id)
            else:
                self._nodes[name] = node_id


class KeeperServices(Transport):
    """Keepers that are processes of their own, at the addresses on their cards (`fedcgd keeper serve`)."""

    def __init__(self, keepers: Keepers) -> None:
        super().__init__(keepers)
        self._troubles: dict[str, str] = {}
        """Why a keeper was not reached the last time, so that it is said once."""

    def _ask_once(
        self, grid: Grid, agreement: Agreement, openings: Mapping[str, Opening], check: bool, within: float
    ) -> Mapping[str, Answer]:
        requests = [to_bytes(agreement, opening) for opening in openings.values()]
        most = agreement.size * agreement.bits // 8 + WAITS.most_words
        answers = self._asked(tuple(openings), "/check" if check else "/open", requests, most, within)
        read = [None if answer is None else answer_from_bytes(answer, agreement) for answer in answers]
        return dict(zip(openings, read, strict=True))

    def _reachable(self, grid: Grid) -> Collection[str]:
        proofs, sealed = challenges(self._keepers)
        names = self._keepers.names
        answers = self._asked(names, "/who", [sealed] * len(names), WAITS.most_words, WAITS.proof)
        return [name for name, answer in zip(names, answers, strict=True) if proofs.get(answer or b"") == name]

    def _asked(
        self, names: Sequence[str], question: str, requests: Sequence[bytes], most: int, within: float
    ) -> list[bytes | None]:
        tls = self._keepers.tls
        assert tls is not None  # check_keepers has seen it  # noqa: S101

        def one(name: str, request: bytes) -> bytes | None:
            address, trouble, answer = self._keepers.card(name).address, "", None
            try:
                answer = service.ask(address, question, request, tls, most=most, timeout=within)
            except OSError as error:
                trouble = str(error)
                if trouble != self._troubles.get(name, ""):
                    log_warning(f"keeper {name} is not reached at {address}: {trouble}")
            self._troubles[name] = trouble
            return answer

        with ThreadPoolExecutor(max(1, len(names))) as pool:
            return list(pool.map(one, names, requests))


def transport_of(keepers: Keepers, ledger: Path | None, *, new: bool) -> Transport:
    """How these keepers are reached, in a run recorded at `ledger`, if in a file, that is `new` or has asked them before."""
    if keepers.simulated:
        return SimulatedKeepers(keepers, ledger, new=new)
    return KeeperServices(keepers) if keepers.are_services else KeeperNodes(keepers)
