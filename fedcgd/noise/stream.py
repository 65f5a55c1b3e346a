"""The keyed, seekable source of noise: AES-256 in counter mode, then Box–Muller."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedcgd.noise.box_muller import BYTES_PER_PAIR, Float32, Workspace, polar

PAIRS = 262144  # of a tile: threads that work on fewer at a time mostly wait for each other at the interpreter's lock
TILE = 2 * PAIRS  # coordinates of a tile; a part of the definition of the numbers, as PAIRS is
MAX_INDEX = 2**32 - 1
MAX_COORDINATE = 2**40

_BLOCK = 16  # bytes
_TILE_BLOCKS = BYTES_PER_PAIR * PAIRS // _BLOCK
_ANGLES = 8 * PAIRS  # byte of a tile where the directions start, after the radii
_ZEROS = bytes(32768)


@dataclass(frozen=True)
class Chunk:
    """Consecutive coordinates that use the pairs [first, last) of one tile: its first half, its second half or all."""

    tile: int
    first: int
    last: int
    halves: tuple[int, ...]  # 0: the cosines, coordinates [0, PAIRS) of the tile; 1: the sines, the others

    @property
    def begin(self) -> int:
        return self.tile * TILE + self.halves[0] * PAIRS + self.first

    @property
    def size(self) -> int:
        return len(self.halves) * (self.last - self.first)


def chunks(start: int, stop: int) -> Iterator[Chunk]:
    """Chunks that cover the coordinates [start, stop) in order; the first and the last may reach beyond."""
    for tile in range(start // TILE, -(-stop // TILE)):
        low, high = max(start - tile * TILE, 0), min(stop - tile * TILE, TILE)
        if high <= PAIRS:
            yield Chunk(tile, low, high, (0,))
        elif low >= PAIRS:
            yield Chunk(tile, low - PAIRS, high - PAIRS, (1,))
        else:
            yield Chunk(tile, 0, PAIRS, (0, 1))


class NoiseStream:
    """Z_(round, attempt)[coordinate] ~ N(0, 1): a pure function of the 32-byte `key` and the three indices.

    The numbers are the same in any chunking, in any thread order and on any machine. The keystream block behind a
    number is AES-256 of the 128-bit counter

        round (32 bits) ‖ attempt (32 bits) ‖ block within the round (64 bits).

    Guarantee: no two (round, attempt, coordinate) share keystream, except the two numbers of one pair. Different
    (round, attempt) differ in the upper 64 bits of every counter, because the lower field never carries over: 2⁴⁰
    coordinates take fewer than 2³⁹ blocks. Within a round, tiles own disjoint blocks, and pairs of a tile (coordinates
    j and j + 262144) own disjoint bytes. The numbers of a pair are the two coordinates of one random point of the plane
    and independent of each other. To whoever does not know the key they are as good as random while AES-256 is: the
    one generic defect of counter mode, that no block repeats, stays undetectable (chance below 2⁻³⁶ after 2⁴⁶ blocks,
    which is 10⁹ coordinates in 10⁵ rounds).

    The key does not show in `repr`, and a stream refuses to be pickled. Raises ValueError unless `key` has 32 bytes.
    """

    __slots__ = ("_algorithm",)

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"key must have 32 bytes (256 bits), got {len(key)}; fedcgd.keys makes one")
        self._algorithm = algorithms.AES(key)

    def __repr__(self) -> str:
        return "NoiseStream(key=<hidden>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NoiseStream holds a secret key and cannot be pickled; make it again from the key")

    def derive(self, purpose: str) -> "NoiseStream":
        """Another stream, a function of this one's key and `purpose`, independent of it."""
        return NoiseStream(hashlib.blake2b(purpose.encode(), key=self._algorithm.key, digest_size=32).digest())

    def normal(self, round: int, attempt: int, start: int, stop: int) -> Float32:
        """Z_(round, attempt)[start:stop], shape (stop − start,). Raises ValueError for an index out of range."""
        check_index("round", round)
        check_index("attempt", attempt)
        check_coordinates(start, stop)
        out = np.empty(stop - start, np.float32)
        parts = list(chunks(start, stop))
        work = workspace(parts)
        for chunk in parts:
            radius, *directions = self.polar(work, round, attempt, chunk)
            z = np.concatenate([radius * directions[half] for half in chunk.halves])
            low, high = max(start, chunk.begin), min(stop, chunk.begin + chunk.size)
            out[low - start : high - start] = z[low - chunk.begin : high - chunk.begin]
        return out

    def polar(self, work: Workspace, round: int, attempt: int, chunk: Chunk) -> tuple[Float32, Float32, Float32]:
        """(±radius, cosine, sine) of the chunk's pairs, views of `work`; Z = radius·cosine, then radius·sine."""
        skip, pairs = chunk.first % 4, chunk.last - chunk.first
        first = chunk.first - skip  # a multiple of 4: both planes of the tile start a block there
        upper = round << 96 | attempt << 64
        block = chunk.tile * _TILE_BLOCKS
        for at, size, out in ((0, 8, work.radius_bytes), (_ANGLES, 4, work.angle_bytes)):
            self._keystream(upper | block + (at + size * first) // _BLOCK, out, size * (pairs + skip))
        radius, cosine, sine = polar(work, pairs + skip)
        return radius[skip:], cosine[skip:], sine[skip:]

    def _keystream(self, counter: int, out: memoryview, size: int) -> None:
        """out[:size] = AES(counter) ‖ AES(counter + 1) ‖ …"""
        cipher = Cipher(self._algorithm, modes.CTR(counter.to_bytes(_BLOCK, "big"))).encryptor()
        for at in range(0, size, len(_ZEROS)):
            zeros = _ZEROS[: size - at]
            cipher.update_into(zeros, out[at : at + len(zeros) + _BLOCK - 1])


def workspace(parts: Sequence[Chunk]) -> Workspace:
    """Memory enough for any of the chunks."""
    return Workspace(max((part.last - part.first + 3 for part in parts), default=0))


def check_index(name: str, value: int) -> None:
    if not 0 <= value <= MAX_INDEX:
        raise ValueError(f"{name} must be between 0 and {MAX_INDEX}, got {value}")


def check_coordinates(start: int, stop: int) -> None:
    if not 0 <= start <= stop <= MAX_COORDINATE:
        raise ValueError(f"coordinates must satisfy 0 ≤ start ≤ stop ≤ 2⁴⁰, got {start} and {stop}")
