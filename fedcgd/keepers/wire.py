"""Requests to a keeper and its answers as bytes, and how a keeper shows that it is the one of its card.

A request is a line of JSON, and then the nodes' tickets and sealed seeds. An answer is a line of JSON, and then residues, least
byte first, if the keeper opens the round.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, cast, get_args

import numpy as np
from cryptography.exceptions import InvalidTag

from fedcgd.keepers.agreement import Agreement, Kind
from fedcgd.keepers.identities import SEALED_BYTES, KeeperKey, Keepers
from fedcgd.keepers.keeper import Opening, Refusal
from fedcgd.keepers.masks import TICKET_BYTES, Residues
from fedcgd.support.untrusted import MalformedError, parse_json

_CHALLENGE = b"fedcgd keeper: which node is it"  # never the `info` of a seed, which begins with an agreement's context
_NODE_BYTES = TICKET_BYTES + SEALED_BYTES


def challenges(keepers: Keepers) -> tuple[dict[bytes, str], bytes]:
    """(The proof that a keeper alone can give → its name; a question that every keeper can be asked, sealed to each in turn).

    The proofs are new each time.
    """
    asked = {card.name: os.urandom(32) for card in keepers.cards}
    sealed = b"".join(card.seal(asked[card.name], _CHALLENGE) for card in keepers.cards)
    return {_proof_of(challenge): name for name, challenge in asked.items()}, sealed


def proof(key: KeeperKey, keepers: Keepers, sealed: bytes) -> bytes:
    """The proof of the keeper that holds `key`; for bytes that are no challenge to it one that nobody takes.

    Raises ValueError if the key belongs to none of the keepers.
    """
    start = keepers.names.index(keepers.card_of(key).name) * SEALED_BYTES
    try:
        return _proof_of(key.open(sealed[start : start + SEALED_BYTES], _CHALLENGE))
    except (InvalidTag, ValueError):
        return _proof_of(b"")


def _proof_of(challenge: bytes) -> bytes:
    return hashlib.sha256(b"fedcgd keeper opened\0" + challenge).digest()


def to_bytes(agreement: Agreement, opening: Opening) -> bytes:
    """The request to open a round, or to say which seeds cannot be opened."""
    described: dict[str, Any] = {
        "agreement": agreement.to_description(),
        "kind": agreement.kind,
        "present": opening.present,
        "round": opening.round,
        "attempt": opening.attempt,
        "after": opening.after,
    }
    nodes = [ticket + sealed for ticket, sealed in zip(opening.tickets, opening.sealed, strict=True)]
    return b"".join([json.dumps(described).encode(), b"\n", *nodes])


def from_bytes(request: bytes, keepers: Keepers) -> tuple[Agreement, Opening]:
    """What is asked. Raises ValueError for bytes that are no request, and for other keepers than `keepers`."""
    line, _, nodes = request.partition(b"\n")
    described = parse_json(line, _REQUEST, "a request", most=MOST_LINE)
    if len(nodes) % _NODE_BYTES:
        raise ValueError(f"each node has {_NODE_BYTES} bytes in a request, got {len(nodes)} for all")
    parts = [nodes[start : start + _NODE_BYTES] for start in range(0, len(nodes), _NODE_BYTES)]
    agreement = Agreement.from_description(described["agreement"], keepers, kind_of(described["kind"]))
    opening = Opening(
        round=described["round"],
        attempt=described["attempt"],
        present=tuple(described["present"]),
        tickets=tuple(part[:TICKET_BYTES] for part in parts),
        sealed=tuple(part[TICKET_BYTES:] for part in parts),
        after=described["after"],
    )
    return agreement, opening


MOST_LINE = 2**20  # bytes of a request's description: a plan for keepers is a few numbers
_REQUEST = {"agreement": dict, "kind": str, "present": [str], "round": int, "attempt": int, "after": (int, None)}


def answer_to_bytes(answer: Residues | Refusal) -> bytes:
    """A keeper's answer."""
    if isinstance(answer, Refusal):
        return json.dumps({"refused": answer.reason, "unreadable": answer.unreadable}).encode() + b"\n"
    return b"{}\n" + answer.astype(answer.dtype.newbyteorder("<"), copy=False).tobytes()


def answer_from_bytes(answer: bytes, agreement: Agreement) -> Residues | Refusal | None:
    """What a keeper answered; None if it cannot be read."""
    line, _, residues = answer.partition(b"\n")
    try:
        said = parse_json(line, dict, "an answer", most=2**24)
    except MalformedError:
        return None
    if (refusal := refusal_of(said)) is not None:
        return refusal
    if said or len(residues) != agreement.size * agreement.bits // 8:
        return None
    return np.frombuffer(residues, f"<u{agreement.bits // 8}").astype(f"u{agreement.bits // 8}", copy=False)


def refusal_of(said: Mapping[str, Any]) -> Refusal | None:
    """The refusal that an answer describes; None if it describes none."""
    reason, unreadable = said.get("refused"), said.get("unreadable")
    if not isinstance(reason, str) or not isinstance(unreadable, list):
        return None
    return Refusal(reason, tuple(i for i in unreadable if isinstance(i, int)))


def kind_of(said: object) -> Kind:
    """The kind of sums that a request names. Raises ValueError if it names none."""
    for kind in get_args(Kind):
        if said == kind:
            return cast(Kind, kind)
    raise ValueError(f"a request is for sums of one of {list(get_args(Kind))}")
