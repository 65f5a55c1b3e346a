"""The noise by its definition, one coordinate at a time in double precision. Slow; shares nothing with the library."""

import hashlib
import math

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


def keystream_byte_range(key: bytes, round: int, nonce: int, first: int, size: int) -> bytes:
    """Bytes [first, first + size) of AES(0) ‖ AES(1) ‖ … under the key of (round, nonce), block by block."""
    hashed = hashlib.blake2b(key=key, digest_size=32, person=b"round and nonce")
    hashed.update(round.to_bytes(4, "big"))
    hashed.update(nonce.to_bytes(16, "big"))
    cipher = Cipher(algorithms.AES(hashed.digest()), modes.ECB()).encryptor()
    out = b""
    for block in range(first // 16, (first + size - 1) // 16 + 1):
        out += cipher.update(block.to_bytes(16, "big"))
    return out[first % 16 : first % 16 + size]


def box_muller(k1: int, k2: int, v: int, a1: int, a2: int) -> list[float]:
    """The four numbers of a column, from its bits."""
    exponential = -math.log(abs(k1) * abs(k2) / 2**126) if k1 and k2 else math.nan
    share = (v % 2**31 | 1) / 2**31
    first, second = math.sqrt(2 * exponential * share), math.sqrt(2 * exponential * (1 - share))
    if a1 % 2:
        first = -first
    if a2 % 2:
        second = -second
    angles = [math.pi / 2 * a / 2**31 for a in (a1, a2)]
    return [
        first * math.cos(angles[0]),
        second * math.cos(angles[1]),
        first * math.sin(angles[0]),
        second * math.sin(angles[1]),
    ]


def normal(key: bytes, round: int, nonce: int, coordinate: int) -> float:
    columns = (
        131072  # of a tile; its keystream is all k1, then all k2, v, a1, a2; its coordinates all z1, then z2, z3, z4
    )
    tile, place = divmod(coordinate, 4 * columns)
    quarter, column = divmod(place, columns)
    base = tile * columns * 28
    bits = []
    for size in (8, 8, 4, 4, 4):
        word = keystream_byte_range(key, round, nonce, base + size * column, size)
        bits.append(int.from_bytes(word, "little", signed=True))
        base += size * columns
    return box_muller(*bits)[quarter]
