"""The keyed, seekable source of noise: ChaCha20, then Box–Muller."""

import hashlib
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from fedcgd.noise import chacha20
from fedcgd.noise.box_muller import NUMBERS, Float32, Float64, add_normals

STREAM = "chacha20"
"""The name of this definition of Z: ledgers and checkpoints hold it, and a run goes on under the same one only."""

COLUMNS = 128
TILE = NUMBERS * COLUMNS  # coordinates: the first number of each of 128 blocks, then the second of each, …
_TILES_AT_ONCE = 64  # by NumPy, so that they stay in a core's cache

Term = tuple[int, int, float]
"""(round, nonce, weight): which noise, and how much of it."""


class NoiseStream:
    """Z_(round, nonce)[coordinate] ~ N(0, 1): a pure function of the 32-byte `key` and the three indices.

    The numbers are the same in any chunking, in any thread order and on any machine, GPUs included. Each (round, nonce) has a
    ChaCha20 key of its own, BLAKE2b of (round, nonce) keyed with `key`, and block b of its keystream gives twelve numbers:
    coordinates 1536·(b // 128) + b mod 128 + 128·i for i = 0 … 11.

    Guarantee: no two coordinates of a (round, nonce) share keystream, except six numbers of one block, which are
    independent of each other (see `box_muller`). Different (round, nonce) have independent keys. To whoever does not know the
    key all are as good as random while ChaCha20 and BLAKE2b are.

    The key does not show in `repr`, and a stream refuses to be pickled.

    Args:
        key: 32 bytes, secret: `NoiseKey.noise_of` gives those of a run.

    Raises:
        ValueError: unless there are 32 bytes.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"key must have 32 bytes (256 bits), got {len(key)}; fedcgd.noise.keys makes one")
        self._key = bytes(key)

    def __repr__(self) -> str:
        return "NoiseStream(key=<hidden>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NoiseStream holds a secret key and cannot be pickled; make it again from the key")

    def derive(self, purpose: str) -> "NoiseStream":
        """Another stream, a function of this one's key, independent of it.

        Args:
            purpose: names it.
        """
        return NoiseStream(hashlib.blake2b(purpose.encode(), key=self._key, digest_size=32).digest())

    def normal(self, round: int, nonce: int, start: int, stop: int) -> Float32:
        """Z_(round, nonce)[start:stop].

        Args:
            round: from 0, below 2³².
            nonce: below 2¹²⁸.
            start: the first coordinate.
            stop: the one after the last, at most 2⁴⁰.

        Returns:
            Shape (stop − start,), float32.

        Raises:
            ValueError: for an index out of range.
        """
        check_coordinates(start, stop)
        key = self.key_of(round, nonce)
        out = np.empty(stop - start, np.float32)
        for first, last, low, high in tiles(start, stop):
            total = np.zeros((last - first) * TILE)
            add_tiles(key, 1.0, first, last, total)
            out[low - start : high - start] = total[low - first * TILE : high - first * TILE]
        return out

    def words(self, round: int, nonce: int, start: int, stop: int) -> NDArray[np.int32]:
        """Uniform 32-bit integers: for each coordinate one word, of the block that is its own in `normal`.

        `normal` makes its numbers of the same keystream: take these from a stream that was derived for them alone.

        Args:
            round: from 0, below 2³².
            nonce: below 2¹²⁸.
            start: the first coordinate.
            stop: the one after the last, at most 2⁴⁰.

        Returns:
            Shape (stop − start,), int32.

        Raises:
            ValueError: for an index out of range.
        """
        check_coordinates(start, stop)
        key = self.key_of(round, nonce)
        out = np.empty(stop - start, np.int32)
        for first, last, low, high in tiles(start, stop):
            out[low - start : high - start] = words_of(key, first, last)[low - first * TILE : high - first * TILE]
        return out

    def key_of(self, round: int, nonce: int) -> bytes:
        """The secret ChaCha20 key of (round, nonce).

        Args:
            round: from 0, below 2³².
            nonce: below 2¹²⁸.

        Raises:
            ValueError: for an index out of range.
        """
        if not 0 <= round < 2**32:
            raise ValueError(f"round must be between 0 and {2**32 - 1}, got {round}")
        if not 0 <= nonce < 2**128:
            raise ValueError(f"nonce must be between 0 and 2¹²⁸ − 1, got {nonce}")
        index = round.to_bytes(4, "big") + nonce.to_bytes(16, "big")
        return hashlib.blake2b(index, key=self._key, digest_size=32, person=b"round and nonce").digest()


def key_words(key: bytes) -> NDArray[np.uint32]:
    """A key as ChaCha20 takes it, shape (8,)."""
    return np.frombuffer(key, "<u4").astype(np.uint32)


def add_tiles(key: bytes, weight: float, first: int, last: int, total: Float64) -> None:
    """total += weight·Z over the tiles [first, last), in float64, shape ((last − first)·1536,); Z of one ChaCha20 key."""
    words = chacha20.blocks(key, first * COLUMNS, (last - first) * COLUMNS)
    columns = total.reshape(-1, NUMBERS, COLUMNS).swapaxes(0, 1)
    add_normals(words.reshape(chacha20.WORDS, -1, COLUMNS), weight, columns)


def words_of(key: bytes, first: int, last: int) -> NDArray[np.int32]:
    """One word for each coordinate of the tiles [first, last), shape ((last − first)·1536,)."""
    rows = chacha20.blocks(key, first * COLUMNS, (last - first) * COLUMNS)[:NUMBERS]
    return rows.reshape(NUMBERS, -1, COLUMNS).swapaxes(0, 1).reshape(-1)


def tiles(start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """(first, last, low, high): some tiles [first, last), and the coordinates [low, high) of [start, stop) in them; in order."""
    for first in range(start // TILE, -(-stop // TILE), _TILES_AT_ONCE):
        last = min(first + _TILES_AT_ONCE, -(-stop // TILE))
        yield first, last, max(start, first * TILE), min(stop, last * TILE)


def check_coordinates(start: int, stop: int) -> None:
    if not 0 <= start <= stop <= 2**40:
        raise ValueError(f"coordinates must satisfy 0 ≤ start ≤ stop ≤ 2⁴⁰, got {start} and {stop}")
