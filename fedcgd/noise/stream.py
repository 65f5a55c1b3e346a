"""The keyed, seekable source of noise: AES-256 in counter mode, then Box–Muller."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedcgd.noise.box_muller import BYTES, PLANES, Float32, Workspace

COLUMNS = 131072  # of a tile: threads that work on fewer at a time mostly wait for each other at the interpreter's lock
TILE = 4 * COLUMNS  # coordinates of a tile: z₁ of every column, then z₂, z₃, z₄. Part of the definition of the numbers
MAX_INDEX = 2**32 - 1
MAX_NONCE = 2**128 - 1
MAX_COORDINATE = 2**40

_BLOCK = 16  # bytes
_WORDS = _BLOCK // 4  # of a block
_ROUND_BYTES, _NONCE_BYTES = 4, 16
_TILE_BLOCKS = BYTES * COLUMNS // _BLOCK
_ALIGNED = 4  # columns: all planes of a tile start a block of keystream at multiples of it
_ZEROS = bytes(32768)


@dataclass(frozen=True)
class Chunk:
    """Consecutive coordinates made from the columns [first, last) of one tile: all of it, or a part of one quarter."""

    tile: int
    first: int
    last: int
    quarter: int | None
    """0 … 3; None for all of the tile."""

    @property
    def begin(self) -> int:
        """The first coordinate."""
        return self.tile * TILE + (self.quarter or 0) * COLUMNS + self.first

    @property
    def size(self) -> int:
        return (self.last - self.first) * (4 if self.quarter is None else 1)

    @property
    def padded(self) -> int:
        """The columns to work on: from the multiple of four at or below `first`."""
        return self.last - self.first // _ALIGNED * _ALIGNED


def chunks(start: int, stop: int) -> Iterator[Chunk]:
    """Chunks that cover the coordinates [start, stop) in order; the first and the last may reach beyond."""
    for tile in range(start // TILE, -(-stop // TILE)):
        low, high = max(start - tile * TILE, 0), min(stop - tile * TILE, TILE)
        quarter = low // COLUMNS
        if high <= (quarter + 1) * COLUMNS:
            yield Chunk(tile, low - quarter * COLUMNS, high - quarter * COLUMNS, quarter)
        else:
            yield Chunk(tile, 0, COLUMNS, None)


class NoiseStream:
    """Z_(round, nonce)[coordinate] ~ N(0, 1): a pure function of the 32-byte `key` and the three indices.

    The numbers are the same in any chunking, in any thread order and on any machine. Each (round, nonce) has an AES-256
    key of its own, BLAKE2b of (round, nonce) keyed with `key`, and the keystream block behind a number is AES-256 of the
    128-bit number of the block within the round.

    Guarantee: no two coordinates of a (round, nonce) share keystream, except the four numbers of one column: tiles own
    disjoint blocks, and columns of a tile (coordinates j, j + 131072, j + 262144 and j + 393216) own disjoint bytes. The
    numbers of a column are independent of each other (see `box_muller`). Different (round, nonce) have independent keys.
    To whoever does not know the key all are as good as random while AES-256 and BLAKE2b are: the one generic defect of
    counter mode, that no block repeats, stays undetectable (chance below 2⁻⁷⁰ for the 2²⁹ blocks of 10⁹ coordinates).

    The key does not show in `repr`, and a stream refuses to be pickled. Raises ValueError unless `key` has 32 bytes.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"key must have 32 bytes (256 bits), got {len(key)}; fedcgd.keys makes one")
        self._key = bytes(key)

    def __repr__(self) -> str:
        return "NoiseStream(key=<hidden>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NoiseStream holds a secret key and cannot be pickled; make it again from the key")

    def derive(self, purpose: str) -> "NoiseStream":
        """Another stream, a function of this one's key and `purpose`, independent of it."""
        return NoiseStream(hashlib.blake2b(purpose.encode(), key=self._key, digest_size=32).digest())

    def normal(self, round: int, nonce: int, start: int, stop: int) -> Float32:
        """Z_(round, nonce)[start:stop], shape (stop − start,). Raises ValueError for an index out of range."""
        check_index(round, nonce)
        check_coordinates(start, stop)
        out = np.empty(stop - start, np.float32)
        parts = list(chunks(start, stop))
        work = workspace(parts)
        for chunk in parts:
            z = np.concatenate([radius * direction for radius, direction in self.polar(work, round, nonce, chunk)])
            low, high = max(start, chunk.begin), min(stop, chunk.begin + chunk.size)
            out[low - start : high - start] = z[low - chunk.begin : high - chunk.begin]
        return out

    def polar(self, work: Workspace, round: int, nonce: int, chunk: Chunk) -> list[tuple[Float32, Float32]]:
        """Pairs of ±radius and cosine or sine, whose products in this order are Z over the chunk; views of `work`.

        The radius of the two pairs that a whole tile gives is the same array.
        """
        columns = chunk.padded
        self.fill(work, round, nonce, chunk)
        radius, *directions = work.polar(columns)
        if chunk.quarter is None:
            return [(radius, direction) for direction in directions]
        direction, pair = divmod(chunk.quarter, 2)
        part = slice((pair + 1) * columns - (chunk.last - chunk.first), (pair + 1) * columns)
        return [(radius[part], directions[direction][part])]

    def fill(self, work: Workspace, round: int, nonce: int, chunk: Chunk) -> None:
        """The keystream behind the chunk's columns, into `work`."""
        columns = chunk.padded
        block = chunk.tile * _TILE_BLOCKS
        algorithm = self._algorithm(round, nonce)
        for at, size in PLANES:  # in this order, because each call may spill into the next plane
            counter = block + (at * COLUMNS + size * (chunk.last - columns)) // _BLOCK
            _keystream(algorithm, counter, work.keystream[at * columns :], size * columns)

    def words(self, round: int, nonce: int, start: int, stop: int) -> NDArray[np.int32]:
        """Uniform 32-bit integers, shape (stop − start,): word i of the keystream of (round, nonce) for i in [start, stop).

        `normal` makes its numbers of the same keystream: take these from a stream that was derived for them alone. Raises
        ValueError for an index out of range.
        """
        check_index(round, nonce)
        check_coordinates(start, stop)
        first = start // _WORDS * _WORDS
        raw = np.empty(4 * (stop - first) + _BLOCK, np.uint8)
        _keystream(self._algorithm(round, nonce), first // _WORDS, raw.data, 4 * (stop - first))
        return raw[:-_BLOCK].view("<i4")[start - first : stop - first]

    def _algorithm(self, round: int, nonce: int) -> algorithms.AES:
        index = round.to_bytes(_ROUND_BYTES, "big") + nonce.to_bytes(_NONCE_BYTES, "big")
        return algorithms.AES(hashlib.blake2b(index, key=self._key, digest_size=32, person=b"round and nonce").digest())


def _keystream(algorithm: algorithms.AES, counter: int, out: memoryview, size: int) -> None:
    """out[:size] = AES(counter) ‖ AES(counter + 1) ‖ …"""
    cipher = Cipher(algorithm, modes.CTR(counter.to_bytes(_BLOCK, "big"))).encryptor()
    for at in range(0, size, len(_ZEROS)):
        zeros = _ZEROS[: size - at]
        cipher.update_into(zeros, out[at : at + len(zeros) + _BLOCK - 1])


def workspace(parts: Sequence[Chunk]) -> Workspace:
    """Memory enough for any of the chunks."""
    return Workspace(max((part.padded for part in parts), default=0))


def check_index(round: int, nonce: int) -> None:
    if not 0 <= round <= MAX_INDEX:
        raise ValueError(f"round must be between 0 and {MAX_INDEX}, got {round}")
    if not 0 <= nonce <= MAX_NONCE:
        raise ValueError(f"nonce must be between 0 and 2¹²⁸ − 1, got {nonce}")


def check_coordinates(start: int, stop: int) -> None:
    if not 0 <= start <= stop <= MAX_COORDINATE:
        raise ValueError(f"coordinates must satisfy 0 ≤ start ≤ stop ≤ 2⁴⁰, got {start} and {stop}")
