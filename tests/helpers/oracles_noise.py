"""The noise by its definition, one coordinate at a time in double precision. Slow; shares nothing with the library."""

import hashlib
import math
import struct


def chacha20_block(key: bytes, number: int) -> list[int]:
    """The sixteen words of a block, as in D. J. Bernstein, "ChaCha, a variant of Salsa20" (2008): a 64-bit number, no nonce."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), number % 2**32, number >> 32, 0, 0]
    x = list(start)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for to, by, mixed, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = (x[to] + x[by]) % 2**32
            mixture = x[mixed] ^ x[to]
            x[mixed] = (mixture << bits | mixture >> 32 - bits) % 2**32

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return [(a + b) % 2**32 for a, b in zip(x, start, strict=True)]


def key_of(key: bytes, round: int, nonce: int) -> bytes:
    hashed = hashlib.blake2b(key=key, digest_size=32, person=b"round and nonce")
    hashed.update(round.to_bytes(4, "big"))
    hashed.update(nonce.to_bytes(16, "big"))
    return hashed.digest()


def place(coordinate: int) -> tuple[int, int]:
    """(block, which of its numbers): 128 blocks are a tile, whose coordinates are all first numbers, all second ones, …"""
    tile, rest = divmod(coordinate, 12 * 128)
    which, column = divmod(rest, 128)
    return 128 * tile + column, which


def box_muller(words: list[int]) -> list[float]:
    """The six numbers of eight 32-bit words."""
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    k, (v1, v2), a = signed[:3], words[3:5], signed[5:]
    exponential = -sum(math.log(abs(one | 1) / 2**31) for one in k)
    cuts = sorted((v1 % 2**31 // 4 * 4 + 1, v2 % 2**31 // 4 * 4 + 2))
    shares = [cuts[0], cuts[1] - cuts[0], 2**31 - cuts[1]]
    out = []
    for one, share, angle in zip(k, shares, a, strict=True):
        radius = math.copysign(math.sqrt(2 * exponential * share / 2**31), one)
        direction = math.pi / 2 * angle / 2**31
        out += [radius * math.cos(direction), radius * math.sin(direction)]
    return out


def normal(key: bytes, round: int, nonce: int, coordinate: int) -> float:
    block, which = place(coordinate)
    words = chacha20_block(key_of(key, round, nonce), block)
    return [*box_muller(words[:8]), *box_muller(words[8:])][which]


def word(key: bytes, round: int, nonce: int, coordinate: int) -> int:
    block, which = place(coordinate)
    value = chacha20_block(key_of(key, round, nonce), block)[which]
    return value - 2**32 if value >= 2**31 else value
