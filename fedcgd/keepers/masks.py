"""Masks: what a node adds to its integers so that only all keepers of the round together can remove it.

A mask is the ChaCha20 keystream of a fresh 32-byte seed, read as residues. A seed serves one node, one keeper, one round and one
attempt, so the cipher's own nonce is zero.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from fedcgd.keepers.agreement import Agreement
from fedcgd.noise.quantisation import Integers

Residues = NDArray[np.unsignedinteger[Any]]
"""uint32 or uint64, whose arithmetic wraps."""

SEED_BYTES = 32
TICKET_BYTES = 16

_ZEROS = memoryview(bytes(2**17))  # this part of the sum stays in the cache until all masks are on it


@dataclass(frozen=True)
class Masked:
    """What a node sends: its integers under one mask for each keeper of the round, and each mask's seed, sealed to its keeper.

    To anyone who lacks one of the seeds the residues are uniformly random, whatever the integers are.

    Attributes:
        residues: the masked integers, modulo 2^bits.
        ticket: random: names this contribution to all keepers, so that their records say whether they opened the same list.
        sealed: keeper's name → sealed seed, bound to the ticket.
    """

    residues: Residues
    ticket: bytes
    sealed: dict[str, bytes]


def mask(
    values: NDArray[np.signedinteger[Any]], agreement: Agreement, *, round: int, attempt: int, present: tuple[str, ...]
) -> Masked:
    """`values` plus one fresh mask for each of the keepers `present`, modulo 2^bits.

    Args:
        values: the node's sum of clipped updates in steps, shape (agreement.size,). A node without anything to add gives zeros.
        agreement: of the run, as this node sees it.
        round: the round, from 0.
        attempt: the try of the round.
        present: the keepers of this round.

    Raises:
        ValueError: for another shape, and for a round or keepers that the agreement does not allow.
    """
    if values.shape != (agreement.size,):
        raise ValueError(f"values must have shape ({agreement.size},), got {values.shape}")
    info = agreement.info(round, attempt, present)
    residues = residues_of(values, agreement.bits)
    ticket = os.urandom(TICKET_BYTES)
    seeds = {name: os.urandom(SEED_BYTES) for name in present}
    sealed = {name: agreement.keepers.card(name).seal(seed, info + ticket) for name, seed in seeds.items()}
    add_masks(residues, list(seeds.values()))
    return Masked(residues, ticket, sealed)


def residues_of(values: NDArray[np.signedinteger[Any]], bits: int) -> Residues:
    """The residues of `values` modulo 2^bits: a copy."""
    return values.astype(np.uint32 if bits == 32 else np.uint64)


def lifted(residues: Residues) -> Integers:
    """The numbers in −2^(bits − 1) … 2^(bits − 1) − 1 with these residues.

    Args:
        residues: uint32 or uint64.

    Returns:
        int64, of the same shape.

    >>> lifted(np.array([1, 2**32 - 1], np.uint32)).tolist()
    [1, -1]
    """
    signed: NDArray[np.signedinteger[Any]] = residues.view(np.dtype(f"i{residues.itemsize}"))
    return signed.astype(np.int64)


def add(total: Residues, part: Residues) -> None:
    """total += part, modulo 2^bits, in place.

    Args:
        total: what is changed.
        part: residues of the same shape and kind.

    Raises:
        ValueError: for another shape or kind of residues.
    """
    if part.shape != total.shape or part.dtype != total.dtype:
        raise ValueError(
            f"residues must be {total.dtype} of shape {total.shape}, got {part.dtype} of shape {part.shape}"
        )
    np.add(total, part, out=total)


def add_masks(total: Residues, seeds: Iterable[bytes]) -> None:
    """total += the masks of all `seeds`, in place."""
    _each_chunk(total, seeds, np.add)


def subtract_masks(total: Residues, seeds: Iterable[bytes]) -> None:
    """total −= the masks of all `seeds`, in place."""
    _each_chunk(total, seeds, np.subtract)


def _each_chunk(total: Residues, seeds: Iterable[bytes], change: np.ufunc) -> None:
    count = len(_ZEROS) // total.itemsize
    buffer = np.empty(len(_ZEROS), np.uint8)
    streams = [Cipher(algorithms.ChaCha20(seed, bytes(16)), None).encryptor() for seed in seeds]
    for start in range(0, len(total), count):
        part = total[start : start + count]
        drawn, words = buffer[: part.nbytes].data, buffer[: part.nbytes].view(f"<u{total.itemsize}")
        for stream in streams:
            stream.update_into(_ZEROS[: part.nbytes], drawn)
            change(part, words, out=part)
