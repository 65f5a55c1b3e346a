"""The nonce that binds a round's noise to the round's sum, whatever becomes of the process and of its random numbers."""

import hmac
import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

NONCE_BYTES = 16

_RANDOM_BYTES = 32
_PART = 2**30  # bytes that one call hashes


def synthetic_nonce(key: bytes, nonces: Sequence[int], total: NDArray[Any]) -> int:
    """128 bits of a keyed hash of (round, nonces of the rounds before, `total`, fresh randomness); round = len(nonces).

    `total` is the round's sum before its noise, contiguous; `key` has 32 bytes and is used for nothing else.

    Guarantee: whoever asks twice for the same round, with another sum or after other rounds, gets another nonce, also when
    the random numbers are the same both times (a copy of the process, a virtual machine that is resumed twice). Chance of
    the contrary: 2⁻⁸⁰ for each two questions about sums of 2⁴⁰ coordinates, less for smaller ones, as long as HMAC-SHA256
    and AES-256 are pseudorandom. To whoever does not know the key a nonce is a random number: it tells nothing of the sum.
    """
    if len(key) != 32:
        raise ValueError(f"key must have 32 bytes (256 bits), got {len(key)}")
    history = blake2b(b"".join(nonce.to_bytes(NONCE_BYTES, "big") for nonce in nonces), digest_size=32).digest()
    message = len(nonces).to_bytes(8, "big") + history + _universal_hash(key, total) + os.urandom(_RANDOM_BYTES)
    return int.from_bytes(hmac.digest(key, b"nonce" + message, "sha256")[:NONCE_BYTES], "big")


def _universal_hash(key: bytes, total: NDArray[Any]) -> bytes:
    """GHASH of the bytes of `total` under a key of its own, masked: for inputs of n blocks two collide with chance n·2⁻¹²⁸.

    That holds for inputs which do not depend on the key, and nothing of the output leaves this file but through HMAC: so that
    the one mask (GCM's fixed initial value) does no harm. Ten times as fast as HMAC-SHA256 over the sum.
    """
    cipher = Cipher(algorithms.AES(hmac.digest(key, b"sum", "sha256")), modes.GCM(bytes(12))).encryptor()
    data = memoryview(total.reshape(-1)).cast("B")  # type: ignore[arg-type]
    for at in range(0, len(data), _PART):
        cipher.authenticate_additional_data(data[at : at + _PART])
    cipher.finalize()
    return cipher.tag
