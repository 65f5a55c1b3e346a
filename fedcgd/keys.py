"""The secret that all noise and all secret choices come from: made, stored and loaded so that it does not leak."""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

_BYTES = 32


class NoiseKey:
    """A 256-bit root key. Its parts, for noise and for choices, are derived by HKDF-SHA256 and independent of each other.

    Make one with `generate`, `from_file`, `from_environment` or `from_callback`. `simulation(seed)` is something else: a key that
    anybody can guess, for runs that shall be repeatable and keep nothing secret; it is marked so for ever.
    """

    __slots__ = ("_root", "simulated")

    def __init__(self, root: bytes, *, simulated: bool = False) -> None:
        if len(root) != _BYTES:
            raise ValueError(f"a key has {_BYTES} bytes (256 bits), got {len(root)}; NoiseKey.generate() makes one")
        self._root = bytes(root)
        self.simulated = simulated

    @staticmethod
    def generate() -> "NoiseKey":
        """A fresh key from the operating system's random source."""
        return NoiseKey(os.urandom(_BYTES))

    @staticmethod
    def simulation(seed: int) -> "NoiseKey":
        """The key of a simulation seed: repeatable, guessable, and therefore without any privacy."""
        return NoiseKey(hashlib.sha256(f"fedcgd simulation seed {seed}".encode()).digest(), simulated=True)

    @staticmethod
    def from_file(path: Path, *, create: bool = False) -> "NoiseKey":
        """The key in `path`, 64 hexadecimal digits; with `create`, made there (mode 0600) if there is none.

        Raises ValueError if others may read the file, or if it does not hold a key; FileNotFoundError if it is missing.
        """
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(os.urandom(_BYTES).hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ValueError(f"key file {path} has mode {mode:04o}: others may read it; run chmod 600 {path}")
        return NoiseKey(_from_hex(path.read_text(), f"key file {path}"))

    @staticmethod
    def from_environment(variable: str) -> "NoiseKey":
        """The key in an environment variable, 64 hexadecimal digits. Raises ValueError if it is not there."""
        return NoiseKey(_from_hex(os.environ.get(variable, ""), f"environment variable {variable}"))

    @staticmethod
    def from_callback(fetch: Callable[[], bytes]) -> "NoiseKey":
        """The 32 bytes that `fetch` returns, for example from a key management service."""
        return NoiseKey(fetch())

    @property
    def noise(self) -> bytes:
        """32 bytes for the noise stream."""
        return self._derive("noise")

    @property
    def choices(self) -> bytes:
        """32 bytes for secret choices: bins, cohorts, Poisson draws."""
        return self._derive("choices")

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that tell keys apart and say nothing else about them."""
        return self._derive("fingerprint")[:8].hex()

    def _derive(self, purpose: str) -> bytes:
        return HKDFExpand(hashes.SHA256(), _BYTES, f"fedcgd {purpose}".encode()).derive(self._root)

    def __repr__(self) -> str:
        return f"NoiseKey({'simulation, ' if self.simulated else ''}fingerprint {self.fingerprint})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a key is not pickled: it would end up in messages, caches or checkpoints; load it where it is used"
        )


def _from_hex(text: str, source: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""  # the message below must not repeat what was read
    if len(key) != _BYTES:
        raise ValueError(f"{source} does not hold a key: 64 hexadecimal digits are expected")
    return key
