"""Copies of one run's ledger: which of them are one run, and which went on in two places.

A release has a nonce of 128 bits that no other release has. So two ledgers of one run tell what became of it: where the nonces of
one begin those of the other, the second is the later state of the same run; where they differ from some round on, a copy went
its own way there, and users paid for the rounds of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile

APART = "apart from round"  # in the id of a branch: what follows is not in the id of the run


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One way that a run took, as far as it is on record."""

    latest: int
    """The copy that has all of it, by its place in the list."""
    copies: tuple[int, ...]
    """All copies that are on this way."""
    shared: int
    """How many of its first rounds are those of a branch before it in the list: they are counted there."""
    name: str
    """Tells it from the others, wherever the ledgers lie; "" for the first."""


def branches(nonces: Sequence[tuple[int, ...]]) -> list[Branch]:
    """The ways that a run took, of which copy i released its rounds under `nonces[i]`.

    Returns:
        One branch, with `shared` = 0, if every copy is a state of the same run. The order does not depend on that of the copies.
    """
    ways = sorted({way for way in nonces if not any(_begins(other, way) and other != way for other in nonces)})
    found: list[Branch] = []
    for i, way in enumerate(ways):
        copies = tuple(j for j, other in enumerate(nonces) if _begins(way, other))
        shared = max((_common(way, earlier) for earlier in ways[:i]), default=0)
        digest = sha256(" ".join(f"{nonce:x}" for nonce in way).encode()).hexdigest()[:16]
        name = f"{APART} {shared}, {digest}" if i else ""
        found.append(
            Branch(latest=next(j for j in copies if nonces[j] == way), copies=copies, shared=shared, name=name)
        )
    return found


def _begins(way: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return way[: len(part)] == part


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
