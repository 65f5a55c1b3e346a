"""The keyed, seekable source of noise: ChaCha20, then Box–Muller; by machine code (`normals.c`) or NumPy, with the same bits.

ChaCha20 is as `cryptography` has it, with blocks numbered by 64 bits. A block is a function of a 256-bit key and its number
(Bernstein, "ChaCha, a variant of Salsa20", 2008): a state of 4 words of constants, 8 of the key, 2 of the number and 2 of zeros
goes through ten double rounds and is added once more. It is made of additions, rotations and exclusive ors of 32-bit words alone,
so that vector instructions and GPUs have it in registers where the noise is made. AES is faster only where a processor has
instructions of its own for it.
"""

import hashlib
from collections.abc import Callable, Iterator
from ctypes import c_double, c_int64
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from fedcgd.native.library import array, checked, function, library
from fedcgd.noise.box_muller import NUMBERS, Float32, Float64, add_normals

STREAM = "chacha20"
"""The name of this definition of Z: ledgers and checkpoints hold it, and a run goes on under the same one only."""

CONSTANTS = tuple(int.from_bytes(b"expand 32-byte k"[i : i + 4], "little") for i in range(0, 16, 4))
"""The first words of a block's state."""

WORDS = 16  # of a block
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
    independent of each other (see `box_muller`). Different (round, nonce) have independent keys. To anyone who does not know the
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
        out = np.empty(stop - start, np.float32)
        kernels().fill_normals(out, start, key_words(self.key_of(round, nonce)))
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
    """Keys as ChaCha20 takes them, one after the other, shape (8,) for each."""
    return np.frombuffer(key, "<u4").astype(np.uint32)


def blocks(key: bytes, first: int, count: int) -> NDArray[np.int32]:
    """The words of ChaCha20's blocks first … first + count − 1, shape (16, count): word by word, as signed integers."""
    size = 4 * WORDS
    out = np.empty(size * count, np.uint8)
    at = 0
    while at < count:
        number = first + at
        here = min(count - at, 2**32 - number % 2**32)  # where libraries differ in whether they carry
        cipher = Cipher(algorithms.ChaCha20(key, number.to_bytes(8, "little") + bytes(8)), None).encryptor()
        cipher.update_into(bytes(size * here), out[size * at : size * (at + here)].data)
        at += here
    return np.ascontiguousarray(out.view("<i4").reshape(count, WORDS).T)


def add_tiles(key: bytes, weight: float, first: int, last: int, total: Float64) -> None:
    """total += weight·Z over the tiles [first, last), in float64, shape ((last − first)·1536,); Z of one ChaCha20 key."""
    words = blocks(key, first * COLUMNS, (last - first) * COLUMNS)
    columns = total.reshape(-1, NUMBERS, COLUMNS).swapaxes(0, 1)
    add_normals(words.reshape(WORDS, -1, COLUMNS), weight, columns)


def words_of(key: bytes, first: int, last: int) -> NDArray[np.int32]:
    """One word for each coordinate of the tiles [first, last), shape ((last − first)·1536,)."""
    rows = blocks(key, first * COLUMNS, (last - first) * COLUMNS)[:NUMBERS]
    return rows.reshape(NUMBERS, -1, COLUMNS).swapaxes(0, 1).reshape(-1)


def tiles(start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """(first, last, low, high): some tiles [first, last), and the coordinates [low, high) of [start, stop) in them; in order."""
    for first in range(start // TILE, -(-stop // TILE), _TILES_AT_ONCE):
        last = min(first + _TILES_AT_ONCE, -(-stop // TILE))
        yield first, last, max(start, first * TILE), min(stop, last * TILE)


def check_coordinates(start: int, stop: int) -> None:
    if not 0 <= start <= stop <= 2**40:
        raise ValueError(f"coordinates must satisfy 0 ≤ start ≤ stop ≤ 2⁴⁰, got {start} and {stop}")


class Kernels(NamedTuple):
    """One form of each. They work on the coordinates from `start` on; machine code releases the interpreter's lock."""

    add_to_grid: Callable[..., None]
    """(total, start, keys, weights, dither, width): total += round(Σ weights[j]·Z_j + width·words).

    int64 total; `keys` (terms, 8) and `dither` (8,) are ChaCha20 keys as uint32, of the Z and of the words."""
    fill_normals: Callable[..., None]
    """(out, start, key): out = Z, float32."""


def _add_to_grid(total: Any, start: int, keys: Any, weights: Any, dither: Any, width: float) -> None:
    for first, last, low, high in tiles(start, start + len(total)):
        noise = np.zeros((last - first) * TILE)
        for key, weight in zip(keys, weights, strict=True):
            add_tiles(key.astype("<u4").tobytes(), weight, first, last, noise)
        noise += np.multiply(words_of(dither.astype("<u4").tobytes(), first, last), width, dtype=np.float64)
        total[low - start : high - start] += np.rint(noise[low - first * TILE : high - first * TILE]).astype(np.int64)


def _fill_normals(out: Any, start: int, key: Any) -> None:
    for first, last, low, high in tiles(start, start + len(out)):
        noise = np.zeros((last - first) * TILE)
        add_tiles(key.astype("<u4").tobytes(), 1.0, first, last, noise)
        out[low - start : high - start] = noise[low - first * TILE : high - first * TILE]


NUMPY = Kernels(_add_to_grid, _fill_normals)


@cache
def kernels() -> Kernels:
    """Machine code; NumPy where it was not built, or does not work or gives other bits."""
    return checked(_load, _answer, _ANSWER) or NUMPY


def _load() -> Kernels:
    code = library(Path(__file__).with_name("normals.c"))
    integers, floats, key = array(np.int64), array(np.float32), array(np.uint32, 8)
    add = function(
        code, "add_to_grid", [integers, c_int64, c_int64, array(np.uint32), array(np.float64), c_int64, key, c_double]
    )
    fill = function(code, "fill_normals", [floats, c_int64, c_int64, key])

    def add_to_grid(total: Any, start: int, keys: Any, weights: Any, dither: Any, width: float) -> None:
        if keys.shape != (len(weights), 8):  # what is behind the array would be read
            raise ValueError(f"keys must have shape ({len(weights)}, 8), got {keys.shape}")
        add(total, len(total), start, keys, weights, len(weights), dither, width)

    return Kernels(add_to_grid, lambda out, start, key: fill(out, len(out), start, key))


_ANSWER = "96276df109af2e2dc41f0a3539048ba9ae7f268d98ab18a4d79025703d2f4d5f"


def _answer(made: Kernels) -> bytes:
    """Sums and normals across the number 2³² of a block, of three keys."""
    keys = np.stack(
        [np.frombuffer(hashlib.shake_256(b"key %d" % i).digest(32), "<u4").astype(np.uint32) for i in range(3)]
    )
    start, size = 2**32 * 12 - 1001, 2003
    total, z = np.arange(size), np.empty(size, np.float32)
    made.add_to_grid(total, start, keys[:2], np.array([-0.9, 1e6]), keys[2], 1e-6)
    made.fill_normals(z, start, keys[0])
    return total.tobytes() + z.tobytes()
