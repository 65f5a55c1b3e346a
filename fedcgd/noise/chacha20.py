"""The keystream behind all noise: ChaCha20, as `cryptography` has it; blocks are numbered by 64 bits.

A block is a function of a 256-bit key and its number (Bernstein, "ChaCha, a variant of Salsa20", 2008): a state of 4 words of
constants, 8 of the key, 2 of the number and 2 of zeros goes through ten double rounds and is added once more. It is made of
additions, rotations and exclusive ors of 32-bit words alone, so that vector instructions and GPUs have it in registers where the
noise is made. AES is faster only where a processor has instructions of its own for it.
"""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

CONSTANTS = tuple(int.from_bytes(b"expand 32-byte k"[i : i + 4], "little") for i in range(0, 16, 4))

WORDS = 16


def blocks(key: bytes, first: int, count: int) -> NDArray[np.int32]:
    """The words of blocks first … first + count − 1, shape (16, count): word by word, as signed integers."""
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
