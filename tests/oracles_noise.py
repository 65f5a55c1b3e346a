"""The noise by its definition, one coordinate at a time in double precision. Slow; shares nothing with the library."""

import math

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


def keystream_byte_range(key: bytes, round: int, attempt: int, first: int, size: int) -> bytes:
    """Bytes [first, first + size) of AES(round ‖ attempt ‖ 0) ‖ AES(round ‖ attempt ‖ 1) ‖ …, block by block."""
    out = b""
    for block in range(first // 16, (first + size - 1) // 16 + 1):
        counter = round.to_bytes(4, "big") + attempt.to_bytes(4, "big") + block.to_bytes(8, "big")
        out += Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counter)
    return out[first % 16 : first % 16 + size]


def box_muller(k: int, a: int) -> tuple[float, float]:
    u = k / 2**64 if k >= 0 else None
    squared = -2 * math.log(u) if u else -2 * math.log1p(k / 2**64)
    radius = math.sqrt(squared) * (-1 if a % 2 else 1)
    angle = math.pi / 2 * a / 2**31
    return radius * math.cos(angle), radius * math.sin(angle)


def normal(key: bytes, round: int, attempt: int, coordinate: int) -> float:
    pairs = 262144  # of a tile: first all radii (8 bytes each), then all directions (4 bytes each)
    tile, place = divmod(coordinate, 2 * pairs)
    second, pair = divmod(place, pairs)
    base = tile * pairs * 12
    k = int.from_bytes(keystream_byte_range(key, round, attempt, base + 8 * pair, 8), "little", signed=True)
    a = int.from_bytes(keystream_byte_range(key, round, attempt, base + 8 * pairs + 4 * pair, 4), "little", signed=True)
    return box_muller(k, a)[second]
