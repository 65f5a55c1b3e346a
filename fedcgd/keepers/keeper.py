"""The opening of a round: a keeper takes its masks off the sum and adds its share of the noise, once."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from cryptography.exceptions import InvalidTag
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from fedcgd.keepers.agreement import Agreement
from fedcgd.keepers.identities import Card, KeeperKey, Keepers
from fedcgd.keepers.masks import SEED_BYTES, TICKET_BYTES, Residues, residues_of, subtract_masks
from fedcgd.keepers.record import AskedOpening, Opened, Record, RefusedError, record_file
from fedcgd.mechanisms import Mechanism
from fedcgd.noise import NoiseStream, Term
from fedcgd.noise.quantisation import Lattice, add_noise
from fedcgd.support.records import MEMORY, Closable
from fedcgd.support.untrusted import clean

__all__ = ["Keeper", "Opening", "Refusal", "RefusedError", "UnreadableError", "share_terms"]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What the server asks of one keeper for one round.

    Args:
        round: the round, from 0.
        attempt: the try of the round.
        present: the keepers of the round, sorted.
        tickets: of the nodes on the list, one for each.
        sealed: the seeds that these nodes sealed to this keeper, in the same order.
        after: the last released round that this keeper was in, or None: a part of its share there, and in those that came before
            it in turn, is cancelled. It decides how accurate the model is, and never how private.
    """

    round: int
    attempt: int
    present: tuple[str, ...]
    tickets: tuple[bytes, ...]
    sealed: tuple[bytes, ...]
    after: int | None


@dataclass(frozen=True)
class Refusal:
    """A keeper does not open.

    Attributes:
        reason: why; "" if it was only asked which seeds it cannot open.
        unreadable: which of the request's seeds these are.
    """

    reason: str
    unreadable: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", clean(self.reason))  # it goes into logs and ledgers of others


class UnreadableError(RefusedError):
    """Some sealed seeds cannot be opened: their nodes disagree with this keeper about the run, or cheat.

    Attributes:
        positions (tuple[int, ...]): which of the request's seeds these are.
    """

    def __init__(self, positions: Sequence[int], total: int) -> None:
        self.positions = tuple(positions)
        super().__init__(
            f"{len(positions)} of {total} seeds cannot be opened: their nodes see another plan, lattice, clip norm, keepers, "
            "round or attempt, sealed the same seed as each other, or sent something else"
        )


class Keeper(Closable):
    """A keeper that answers: its key and its record. Use `Keeper.open` for those on disk.

    Guarantee: for each round of each kind it opens one list of nodes only, whatever it is asked and whenever it is killed. The
    same request gets the same answer.

    Args:
        key: the keeper's.
        record: what it has opened so far.
        card: what the others know it by.
    """

    def __init__(self, key: KeeperKey, record: Record, card: Card) -> None:
        self.card = card
        self._key = key
        self._record = record

    @classmethod
    def open(cls, key_file: Path | str, keepers: Keepers) -> Self:
        """The keeper whose key is in a file, with its record next to it (keeper.key.record for keeper.key).

        Args:
            key_file: the key.
            keepers: those of the run, of which this is one.

        Raises:
            ValueError: if the key belongs to none of `keepers`, if others may read it or write its record, and if that is lost,
                emptied or another key's.
            FileNotFoundError: if there is no key file.
        """
        key = KeeperKey.from_file(key_file)
        card = keepers.card_of(key)
        if problem := key.noise.record_problem("the record of what this keeper has opened"):
            raise ValueError(
                f"{problem}: without it a round could be opened twice. Put it back; if it is lost, this key serves no run any "
                "more"
            )
        return cls(key, Record.open(record_file(key_file), card.fingerprint), card)

    @classmethod
    def simulation(cls, keepers: Keepers, number: int, record: Path | None = None) -> Self:
        """A simulated keeper.

        Args:
            keepers: simulated ones.
            number: which of them, from 0.
            record: the file of its record; None for one in memory.

        Raises:
            ValueError: unless `keepers` are simulated.
        """
        if keepers.simulation_seed is None:
            raise ValueError("these keepers are real: only they themselves hold their keys")
        key = KeeperKey.simulation(keepers.simulation_seed, number)
        card = keepers.card_of(key)
        return cls(key, Record.open(record or MEMORY, card.fingerprint), card)

    def __repr__(self) -> str:
        return f"Keeper({self.card.name!r}, fingerprint {self.card.fingerprint})"

    def close(self) -> None:
        """Close the record."""
        self._record.close()

    def reply(self, agreement: Agreement, opening: Opening, *, check: bool) -> Residues | Refusal:
        """What `answer` gives, or why it refuses.

        Args:
            agreement: of the run, as the server sees it.
            opening: the request.
            check: whether only the seeds that cannot be opened are asked for: then nothing is recorded, and nothing opened.
        """
        try:
            if check:
                return Refusal("", self.unreadable(agreement, opening))
            return self.answer(agreement, opening)
        except UnreadableError as refused:
            return Refusal(str(refused), refused.positions)
        except RefusedError as refused:
            return Refusal(str(refused))

    def unreadable(self, agreement: Agreement, opening: Opening) -> tuple[int, ...]:
        """Which of the sealed seeds of a request this keeper could not open. Nothing is recorded, and nothing opened.

        Args:
            agreement: of the run, as the server sees it.
            opening: the request.

        Returns:
            Positions in `opening.sealed`.

        Raises:
            RefusedError: for a request that is none of this keeper's, and for one that its record does not allow: a server that
                asks this first loses no round to a key that served another run, or to an old copy of a record.
        """
        self._check(agreement, opening)
        self._record.check(agreement.context, _asked(agreement, opening))
        return tuple(i for i, seed in enumerate(self._seeds(agreement, opening)) if seed is None)

    def answer(self, agreement: Agreement, opening: Opening) -> Residues:
        """−Σ masks of the listed nodes + this keeper's share of the round's noise.

        The round and its list are durable before anything is computed of it.

        Args:
            agreement: of the run, as the server sees it.
            opening: the request.

        Returns:
            Residues modulo 2^bits, shape (agreement.size,).

        Raises:
            UnreadableError: if seeds cannot be opened; nothing is recorded then.
            RefusedError: for another run than the key's first, a list with a node twice or of too few nodes, another list for an
                opened round, a round before the last opened one, too few keepers, and a list without this keeper.
        """
        self._check(agreement, opening)
        seeds = self._seeds(agreement, opening)
        unreadable = [i for i, seed in enumerate(seeds) if seed is None]
        if unreadable:
            raise UnreadableError(unreadable, len(seeds))
        readable = [seed for seed in seeds if seed is not None]
        asked = _asked(agreement, opening)

        def nonce_of(earlier: Sequence[int]) -> int:
            # Bound to the list as a central release's is to its sum: a copy of this process with the same random numbers and
            # another list has other noise.
            bound = np.frombuffer(asked.list_hash + asked.sealed_hash, np.uint8)
            return self._key.noise.nonce_of(agreement.stream, bound, earlier=earlier, attempt=opening.attempt)

        try:
            share = np.zeros(agreement.size, np.int64)  # first: a round without an answer would be spent
        except MemoryError:
            raise RefusedError(f"this keeper has no memory for {agreement.size} coordinates") from None
        agreed = json.dumps(agreement.to_description())
        opened = self._record.write(agreement.context, agreed, asked, nonce_of)
        self._add_share(share, agreement, opened)
        answer = residues_of(share, agreement.bits)
        subtract_masks(answer, readable)
        return answer

    def _check(self, agreement: Agreement, opening: Opening) -> None:
        try:
            if self._key.card(self.card.name) != agreement.keepers.card(self.card.name):
                raise ValueError(f"keeper {self.card.name!r} has another key in this run")
            agreement.info(opening.round, opening.attempt, opening.present)
        except KeyError:
            raise RefusedError(f"keeper {self.card.name!r} is none of this run's") from None
        except ValueError as error:
            raise RefusedError(str(error)) from None
        if self.card.name not in opening.present:
            raise RefusedError(f"keeper {self.card.name!r} is not one of the round's: {', '.join(opening.present)}")
        if agreement.keepers.simulated != self._key.noise.simulated:
            raise RefusedError("a simulated keeper serves simulations only, and a real one none")
        if len(opening.sealed) < agreement.keepers.nodes:
            raise RefusedError(
                f"{len(opening.sealed)} nodes are on the list, and the keepers' file says that at least "
                f"{agreement.keepers.nodes} must be"
            )
        if len(opening.tickets) != len(opening.sealed) or {len(t) for t in opening.tickets} != {TICKET_BYTES}:
            raise RefusedError(f"each sealed seed has a ticket of {TICKET_BYTES} bytes")
        if len(set(opening.tickets)) < len(opening.tickets):
            raise RefusedError("a node is twice on the list: two of its tickets are the same")
        if opening.after is not None and not 0 <= opening.after < opening.round:
            raise RefusedError(f"what is cancelled in round {opening.round} comes before it, got round {opening.after}")

    def _seeds(self, agreement: Agreement, opening: Opening) -> list[bytes | None]:
        """The nodes' seeds; None for one that cannot be opened, and for one that two nodes sealed, which is no accident."""
        info = agreement.info(opening.round, opening.attempt, opening.present)
        pairs = zip(opening.tickets, opening.sealed, strict=True)
        seeds = [self._unsealed(sealed, info + ticket) for ticket, sealed in pairs]
        times = Counter(seeds)
        return [seed if times[seed] == 1 else None for seed in seeds]

    def _unsealed(self, sealed: bytes, info: bytes) -> bytes | None:
        try:
            seed = self._key.open(sealed, info)
        except (InvalidTag, ValueError):
            return None
        return seed if len(seed) == SEED_BYTES else None

    def _add_share(self, share: NDArray[np.int64], agreement: Agreement, opened: Opened) -> None:
        mechanism, rounds = agreement.plan.mechanism, agreement.plan.participation.rounds
        earlier = self._record.before(opened, mechanism.inverse_bandwidth(rounds) - 1)
        terms = share_terms(mechanism, rounds, opened.round, opened.nonce, earlier)
        stream = NoiseStream(self._key.noise.noise_of(agreement.stream))
        add_noise(share, stream, terms, agreement.share_stddev, Lattice(agreement.step))


def share_terms(
    mechanism: Mechanism, rounds: int, round: int, nonce: int, earlier: Sequence[tuple[int, int]]
) -> list[Term]:
    """Row t of C[Q, Q]⁻¹, Q = t and the rounds of `earlier`, as weights of Z_t and of these rounds' Z.

    With Q = …, t − 2, t − 1, t this is the row of C⁻¹. For λ-CGD and Q = p, t it is Z_t − λ^(t−p)·Z_p. To cancel with C⁻¹'s own
    weights after a gap would be wrong: the squared sensitivity can grow (docs/explanations/keepers.md, "What is not true").

    Args:
        mechanism: one for which `longest_row` is finite.
        rounds: of the plan.
        round: t.
        nonce: of Z_t.
        earlier: (p, nonce of Z_p) of earlier rounds that the keeper was in, newest first.
    """
    indices = [round, *(before for before, _ in earlier)]
    if indices[-1] == round - len(earlier):  # none was missed
        weights = mechanism.inverse_row(round, rounds)[: len(indices)]
    else:
        upwards = np.array(indices[::-1])
        c = mechanism.columns(rounds, upwards)[upwards]
        last = np.eye(len(c))[-1]
        weights = solve_triangular(c.T, last)[::-1]
    nonces = [nonce, *(before for _, before in earlier)]
    return [(at, made, float(weight)) for at, made, weight in zip(indices, nonces, weights, strict=False)]


def list_hash(agreement: Agreement, opening: Opening) -> bytes:
    """SHA-256 of what is opened: the run, the kind, the round, the attempt, the keepers, and the nodes' tickets in any order.

    It is the same for all keepers that open the same list.
    """
    info = agreement.info(opening.round, opening.attempt, opening.present)
    return hashlib.sha256(hashlib.sha256(info).digest() + b"".join(sorted(opening.tickets))).digest()


def _asked(agreement: Agreement, opening: Opening) -> AskedOpening:
    """`opening` as a record has it: hashes in place of tickets and sealed seeds, which may come in any order."""
    pairs = zip(opening.tickets, opening.sealed, strict=True)
    sealed_hash = hashlib.sha256(b"".join(sorted(ticket + sealed for ticket, sealed in pairs))).digest()
    listed = list_hash(agreement, opening)
    return AskedOpening(agreement.kind, opening.round, opening.attempt, listed, sealed_hash, opening.after)
