"""The secret that all noise and all secret choices come from: made, stored and loaded so that it does not leak."""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from fedcgd.support.files import check_private, sync_folder
from fedcgd.support.records import make_record, record_name

NONCE_BYTES = 16

_BYTES = 32
_WITH_RECORD = "# made together with record {}, in a file next to it: keep the two together"
# Keys of earlier versions say that they have a register, and not which.
_NAMED = re.compile(r"^# made together with (?:record ([0-9a-f]{32})|a register of its runs),", re.MULTILINE)


class NoiseKey:
    """A 256-bit root key. Its parts, for noise and for choices, are derived by HKDF-SHA256 and independent of each other.

    Make one with `generate`, `from_file`, `from_environment` or `from_callback`. `simulation` is something else: a key that
    anybody can guess, for runs that shall be repeatable and keep nothing secret; `simulated` says so for ever.

    The key never shows in `repr`, and refuses to be pickled or copied into messages.

    Args:
        root: the key, 32 bytes.
        runs: the file that remembers the key's runs, its register; None for none.

    Raises:
        ValueError: unless there are 32 bytes.

    >>> NoiseKey.simulation(1)
    NoiseKey(simulation, fingerprint 82a16206cc07a2b1)
    """

    __slots__ = ("_made", "_record", "_root", "_runs", "_simulated")

    def __init__(self, root: bytes, *, runs: Path | None = None) -> None:
        if len(root) != _BYTES:
            raise ValueError(f"a key has {_BYTES} bytes (256 bits), got {len(root)}; NoiseKey.generate() makes one")
        self._root = bytes(root)
        self._runs = runs
        self._record: str | None = None  # the name of the one that it was made with; "" if it does not say which
        self._made: tuple[Path, str] | None = None  # the file that was made for it, and when
        self._simulated = False

    @staticmethod
    def generate() -> "NoiseKey":
        """A fresh key from the operating system's random source."""
        return NoiseKey(os.urandom(_BYTES))

    @staticmethod
    def simulation(simulation_seed: int) -> "NoiseKey":
        """The key of a simulation seed: repeatable, guessable, and therefore without any privacy.

        Args:
            simulation_seed: the same number gives the same key, on every machine.
        """
        key = NoiseKey(hashlib.sha256(f"fedcgd simulation seed {simulation_seed}".encode()).digest())
        key._simulated = True
        return key

    @staticmethod
    def from_file(path: Path | str, *, create: bool = False, runs: Path | None = None) -> "NoiseKey":
        """The key in a file: 64 hexadecimal digits.

        Args:
            path: the file, which only its owner may read.
            create: whether a key is made there (mode 0600) if there is none.
            runs: the file that remembers the key's runs, its register; by default next to the key, noise.key.runs for noise.key.
                Keep the two together: a key that was made here with its register begins and continues no run without it, nor
                with another or an emptied one.

        Raises:
            ValueError: if others may read the file, if it does not hold a key, and if one would be made with an emptied register.
            FileNotFoundError: if there is none, and `create` is False.
        """
        path = Path(path)
        runs = runs_file(path) if runs is None else runs
        made = None
        if create and not path.exists():
            if _create(path, runs):
                made = path, datetime.now(UTC).isoformat(timespec="milliseconds")
        elif not path.exists():
            raise FileNotFoundError(
                f"there is no key file {path.absolute()}; create=True makes one, for a run that has not begun"
            )
        with path.open(encoding="ascii", errors="replace") as file:
            check_private(path, "key file", os.fstat(file.fileno()).st_mode)
            text = file.read()
        key = NoiseKey(_from_hex(text, f"key file {path}"), runs=runs)
        named = _NAMED.search(text)
        key._record = named and (named[1] or "")
        key._made = made
        return key

    @staticmethod
    def from_environment(variable: str, *, runs: Path | None = None) -> "NoiseKey":
        """The key in an environment variable, which is taken out of it, so that no child process inherits it.

        Args:
            variable: the name of the variable, which holds 64 hexadecimal digits.
            runs: a file that remembers the key's runs; without one, nothing notices that a run begins again with its ledger lost.

        Raises:
            ValueError: if the variable is not set, or holds no key.
        """
        return NoiseKey(_from_hex(os.environ.pop(variable, ""), f"environment variable {variable}"), runs=runs)

    @staticmethod
    def from_callback(fetch: Callable[[], bytes], *, runs: Path | None = None) -> "NoiseKey":
        """The key that a function of yours returns, for example from a key management service.

        Args:
            fetch: returns the key, 32 bytes.
            runs: a file that remembers the key's runs; without one, nothing notices that a run begins again with its ledger lost.

        Raises:
            ValueError: if it returns another number of bytes.
        """
        return NoiseKey(fetch(), runs=runs)

    @property
    def runs(self) -> Path | None:
        """The file that remembers which runs the key has begun, or None if nothing does."""
        return self._runs

    @property
    def record(self) -> str | None:
        """The name in the first line of the record that the key was made together with; None if it does not say."""
        return self._record

    def record_problem(self, what: str) -> str | None:
        """What is wrong with the file that remembers what the key was used for, or None: it is lost, emptied or another.

        Args:
            what: what the file is, in words.
        """
        if self._runs is None:
            return None
        if not self._runs.exists():
            return None if self._record is None else f"{self._runs}, {what}, is not there"
        try:
            name = record_name(self._runs)
        except ValueError as error:
            return f"{self._runs}, {what}, {error}"
        if self._record and name != self._record:
            return f"{self._runs} is not {what}: it is that of another key, or was made anew"
        return None

    @property
    def made(self) -> tuple[Path, str] | None:
        """The key's file and when it was made (ISO 8601, UTC), if that was for this very object and no run has begun with it."""
        return self._made

    def keep_file(self) -> None:
        """The key has a run: from here on its file stays, whatever is refused."""
        self._made = None

    def discard_file(self) -> None:
        """Delete the file that was made for this very object: what it was made for is refused, and it has no run."""
        if self._made is not None:
            delete_key_file(self._made[0])
            self._made = None

    @property
    def simulated(self) -> bool:
        """Whether the key comes from a simulation seed: nothing that it protects is private."""
        return self._simulated

    @property
    def noise(self) -> bytes:
        """32 bytes for the noise of a run that has no ledger."""
        return self.noise_of("")

    @property
    def choices(self) -> bytes:
        """32 bytes for the secret choices (bins, cohorts, Poisson draws) of a run that has no ledger."""
        return self.choices_of("")

    @property
    def sealing(self) -> bytes:
        """32 bytes that a keeper's private key is made of (`fedcgd.keepers.identities`)."""
        return self._derive("sealing", "")

    def noise_of(self, stream_id: str) -> bytes:
        """32 bytes for the noise of one run: no two runs with different streams share any, even under one key.

        Args:
            stream_id: what tells the run from others under this key, as its ledger has it.
        """
        return self._derive("noise", stream_id)

    def choices_of(self, stream_id: str) -> bytes:
        """32 bytes for the secret choices (bins, cohorts, Poisson draws) of one run.

        Args:
            stream_id: what tells the run from others under this key, as its ledger has it.
        """
        return self._derive("choices", stream_id)

    def nonce_of(self, stream_id: str, total: NDArray[Any], *, earlier: Sequence[int], attempt: int) -> int:
        """The nonce under which a round gets its noise (`synthetic_nonce`).

        Args:
            stream_id: what tells the run from others under this key, as its ledger has it.
            total: the sum of the round before its noise, on the lattice.
            earlier: the nonces of the rounds before, oldest first.
            attempt: how often the round was tried before.

        Returns:
            A number below 2¹²⁸; of a simulation key `attempt` itself, so that the run is repeatable.
        """
        return attempt if self.simulated else synthetic_nonce(self._derive("nonces", stream_id), earlier, total)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that tell keys apart and say nothing else about them."""
        return self._derive("fingerprint", "")[:8].hex()

    def _derive(self, purpose: str, stream_id: str) -> bytes:
        info = f"fedcgd {purpose}\0{stream_id}".encode()
        return hmac.digest(self._root, info + b"\1", "sha256")  # the first block of HKDF-Expand (RFC 5869)

    def __repr__(self) -> str:
        return f"NoiseKey({'simulation, ' if self.simulated else ''}fingerprint {self.fingerprint})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a key is not pickled: it would end up in messages, caches or checkpoints; load it where it is used"
        )


def synthetic_nonce(key: bytes, nonces: Sequence[int], total: NDArray[Any]) -> int:
    """128 bits of a keyed hash of (round, nonces of the rounds before, `total`, fresh randomness); round = len(nonces).

    Guarantee: anyone who asks twice for the same round, with another sum or after other rounds, gets another nonce, also when
    the random numbers are the same both times (a copy of the process, a virtual machine that is resumed twice). Chance of
    the contrary: 2⁻⁸⁰ for each two questions about sums of 2⁴⁰ coordinates, less for smaller ones, as long as HMAC-SHA256
    and AES-256 are pseudorandom. To anyone who does not know the key a nonce is a random number: it tells nothing of the sum.

    Args:
        key: 32 bytes, used for nothing else.
        nonces: of the rounds before.
        total: the round's sum before its noise, contiguous.

    Raises:
        ValueError: for a key of another length.
    """
    if len(key) != 32:
        raise ValueError(f"key must have 32 bytes (256 bits), got {len(key)}")
    together = map(int.to_bytes, nonces, repeat(NONCE_BYTES))  # the most significant first; as fast as joining them
    hashes = _universal_hashes(key, b"".join(together), total.reshape(-1))
    message = len(nonces).to_bytes(8, "big") + hashes + os.urandom(32)
    return int.from_bytes(hmac.digest(key, b"nonce" + message, "sha256")[:NONCE_BYTES], "big")


def _universal_hashes(key: bytes, *values: Any, at_once: int = 2**30) -> bytes:
    """GHASH of each stretch of the bytes of `values` under a key of its own, masked.

    Two stretches of n blocks collide with chance n·2⁻¹²⁸. That holds for inputs which do not depend on the key, and nothing of
    the output leaves this file but through HMAC: so that the one mask (GCM's fixed initial value) does no harm. Ten times as
    fast as HMAC-SHA256 over the sum.
    """
    cipher = AESGCM(hmac.digest(key, b"sum", "sha256"))
    found = b""
    for value in values:
        data = memoryview(value).cast("B")
        for at in range(0, len(data), at_once):
            found += cipher.encrypt(bytes(12), b"", data[at : at + at_once])
    return found


def runs_file(path: Path) -> Path:
    """Where the runs of a key file are remembered: next to the file itself, whichever links lead to it.

    Args:
        path: the key file.
    """
    path = path.resolve()
    return path.with_name(f"{path.name}.runs")


def delete_key_file(path: Path) -> None:
    """Overwrite and remove a key file; nothing happens if there is none.

    File systems that keep old blocks, and backups, may still hold the key: those are the operator's to clear.

    Args:
        path: the key file; of a link, what it leads to.
    """
    path = path.resolve()  # the key itself, and not a link to it
    if not path.exists():
        return
    with path.open("r+b") as file:
        file.write(b"0" * os.fstat(file.fileno()).st_size)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    sync_folder(path.parent)


def _create(path: Path, runs: Path) -> bool:
    """Make a key file in one step: a reader sees no file or a whole one, and of two makers the first wins, who gets True.

    The record of what it is used for is made before it, and named in it: then a key whose record was lost, emptied or made anew,
    or that was copied alone, can be told from one that was never used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    make_record(runs)
    try:
        name = record_name(runs)  # an earlier key's, perhaps, whose runs it remembers
    except ValueError as error:
        raise ValueError(
            f"{runs}, which remembers what keys were used for, {error}; put it back, or delete it if no key was used with it"
        ) from error
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{os.urandom(_BYTES).hex()}\n{_WITH_RECORD.format(name)}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(part)
        except FileExistsError:
            return False
    finally:
        part.unlink()
    sync_folder(path.parent)
    return True


def _from_hex(text: str, source: str) -> bytes:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    try:
        key = bytes.fromhex("\n".join(lines).strip())
    except ValueError:
        key = b""  # the message below must not repeat what was read
    if len(key) != _BYTES:
        raise ValueError(f"{source} does not hold a key: 64 hexadecimal digits are expected")
    return key
