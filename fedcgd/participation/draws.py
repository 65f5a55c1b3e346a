"""Draws that follow from a key and a user's name alone: uniform and independent to anyone without the key."""

import hashlib

DRAWS = 2**64
"""How many values a draw has: it is 64 bits."""


def draw(key: bytes, purpose: str, user: str) -> int:
    """64 bits, uniform and independent for each (purpose, user): keyed BLAKE2b."""
    text = f"{purpose}\0{user}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "big")


def one_of(count: int, key: bytes, purpose: str, user: str) -> int:
    """Uniform in 0 … `count` − 1."""
    return draw(key, purpose, user) * count // DRAWS


def uniform(key: bytes, purpose: str, user: str) -> float:
    """In (0, 1], with 64 bits."""
    return (draw(key, purpose, user) + 1) / DRAWS


def bin_of(user: str, bins: int, key: bytes) -> int:
    """The bin or group of `user`, in 0 … `bins` − 1."""
    return one_of(bins, key, "bin", user)
