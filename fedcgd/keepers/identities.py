"""Who the keepers are: their keys, the cards that others know them by, and the file that all parties hold."""

import base64
import binascii
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from fedcgd.accounting.shares import NoiseShares
from fedcgd.keepers.record import Record, record_file
from fedcgd.keepers.tls import Tls
from fedcgd.ledger.store import MOST_KEEPERS
from fedcgd.noise.keys import NoiseKey

_TOO_OLD = "keepers need cryptography 50 or later, for HPKE with ML-KEM: pip install --upgrade cryptography"

try:
    from cryptography.hazmat.primitives import hpke
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey

    SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)
except (ImportError, AttributeError) as error:
    raise ImportError(_TOO_OLD) from error
SUITE_NAME = "HPKE MLKEM768-X25519 HKDF-SHA256 ChaCha20Poly1305"
"""How seeds are sealed: RFC 9180 with a hybrid key encapsulation, so that no quantum computer opens what is recorded now."""

SEALED_BYTES = 1168
"""The length of a sealed seed."""


class _Bytes:
    """Lengths of keys: ML-KEM-768's (FIPS 203) and X25519's (RFC 7748)."""

    mlkem_seed, mlkem_public, x25519 = 64, 1184, 32


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+)):([0-9]{1,5})")


@dataclass(frozen=True)
class Card:
    """What others know of a keeper, and where it answers. `KeeperKey.card` makes one.

    Args:
        name: 1 to 64 letters, digits, dots, dashes and underscores, beginning with a letter or digit.
        public_key: what seeds are sealed to, 1216 bytes.
        address: HOST:PORT of a keeper that runs as a service (`fedcgd keeper serve`); "" for one that is a Flower node. It may
            change during a run: what is opened, and for whom, depends on the key alone.

    Raises:
        ValueError: for another name, for what is no public key, and for what is no address.
    """

    name: str
    public_key: bytes
    address: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        self._parsed()
        if self.address:
            host_and_port(self.address)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits to compare over the telephone."""
        return hashlib.sha256(b"fedcgd keeper\0" + self.public_key).hexdigest()[:16]

    def seal(self, seed: bytes, info: bytes) -> bytes:
        """A seed for this keeper's eyes only.

        Args:
            seed: what is sealed.
            info: what it is bound to: only who gives the same can open it.

        Returns:
            `SEALED_BYTES` bytes.
        """
        return SUITE.encrypt(seed, self._parsed(), info)

    def to_toml(self) -> str:
        """The lines that stand for this keeper in keepers.toml."""
        encoded = base64.b64encode(self.public_key).decode()
        address = f'address = "{self.address}"\n' if self.address else ""
        return f'[[keeper]]\nname = "{self.name}"\n{address}public_key = "{encoded}"\n'

    @staticmethod
    def from_toml(table: Mapping[str, Any]) -> "Card":
        """The card that `to_toml` wrote.

        Args:
            table: one [[keeper]] of the file, as `tomllib` reads it.

        Raises:
            ValueError: for anything else.
        """
        unknown, missing = table.keys() - {"name", "public_key", "address"}, {"name", "public_key"} - table.keys()
        if unknown or missing or not all(isinstance(value, str) for value in table.values()):
            raise ValueError(
                "each [[keeper]] has a name, a public_key and perhaps an address, all texts, and nothing else"
            )
        try:
            public_key = base64.b64decode(table["public_key"], validate=True)
            return Card(table["name"], public_key, table.get("address", ""))
        except binascii.Error as error:
            raise ValueError(
                f"the public_key of keeper {table['name']!r} is not Base64: copy the whole line"
            ) from error

    def _parsed(self) -> hpke.MLKEM768X25519PublicKey:
        try:
            if len(self.public_key) != _Bytes.mlkem_public + _Bytes.x25519:
                raise ValueError
            return hpke.MLKEM768X25519PublicKey(
                MLKEM768PublicKey.from_public_bytes(self.public_key[: _Bytes.mlkem_public]),
                X25519PublicKey.from_public_bytes(self.public_key[_Bytes.mlkem_public :]),
            )
        except ValueError as error:
            raise ValueError(
                f"keeper {self.name!r} has no valid public key: {_Bytes.mlkem_public + _Bytes.x25519} bytes that "
                "fedcgd keeper new printed"
            ) from error


def check_name(name: object) -> None:
    """Raise ValueError unless a keeper may be called so."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"a keeper's name has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit; "
            f"got {name!r}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of HOST:PORT. Raises ValueError for anything else."""
    found = _ADDRESS.fullmatch(address)
    if found and 0 < int(found[3]) < 2**16:
        return found[1] or found[2], int(found[3])
    raise ValueError(f"a keeper's address is HOST:PORT, for example keeper.court.example:9444; got {address!r}")


class KeeperKey:
    """What a keeper alone holds: it opens the seeds that are sealed to its card, and makes its share of the noise.

    Both come from one `NoiseKey`, by parts that are independent of each other. Use one key for one run. It never shows in `repr`
    and refuses to be pickled.

    Args:
        key: the secret that it is made of.
    """

    __slots__ = ("_private", "_public", "noise")

    def __init__(self, key: NoiseKey) -> None:
        self.noise = key
        """Where the keeper's share of the noise comes from."""
        seed = HKDFExpand(hashes.SHA256(), _Bytes.mlkem_seed + _Bytes.x25519, b"fedcgd keeper: private key").derive(
            key.sealing
        )
        mlkem = MLKEM768PrivateKey.from_seed_bytes(seed[: _Bytes.mlkem_seed])
        x25519 = X25519PrivateKey.from_private_bytes(seed[_Bytes.mlkem_seed :])
        self._private = hpke.MLKEM768X25519PrivateKey(mlkem, x25519)
        self._public = mlkem.public_key().public_bytes_raw() + x25519.public_key().public_bytes_raw()

    @staticmethod
    def from_file(path: Path | str, *, create: bool = False) -> "KeeperKey":
        """The key in a file.

        Args:
            path: the file, which only its owner may read.
            create: whether a key is made there if there is none, with its record next to it.

        Raises:
            ValueError: if others may read the file, or if it does not hold a key.
            FileNotFoundError: if there is none, and `create` is False.
        """
        key = KeeperKey(NoiseKey.from_file(path, create=create, runs=record_file(path)))
        if key.noise.made is not None:
            Record.open(record_file(path), key.card("any").fingerprint).close()
        return key

    @staticmethod
    def simulation(simulation_seed: int, number: int) -> "KeeperKey":
        """The key of a simulated keeper: anybody can guess it.

        Args:
            simulation_seed: that of the simulation.
            number: which keeper, from 0. Number 0 makes the noise of `NoiseKey.simulation(simulation_seed)`.
        """
        if not number:
            return KeeperKey(NoiseKey.simulation(simulation_seed))
        digest = hashlib.sha256(f"fedcgd simulated keeper {number} of {simulation_seed}".encode()).digest()
        return KeeperKey(NoiseKey.simulation(int.from_bytes(digest)))

    def card(self, name: str) -> Card:
        """The card of this key.

        Args:
            name: what others shall call the keeper.

        Raises:
            ValueError: for a name that no keeper may have.
        """
        return Card(name, self._public)

    def open(self, sealed: bytes, info: bytes) -> bytes:
        """The seed that was sealed to this key's card.

        Args:
            sealed: what `Card.seal` returned.
            info: what it is bound to.

        Raises:
            cryptography.exceptions.InvalidTag: if it was sealed to another card, or with other `info`.
        """
        return SUITE.decrypt(sealed, self._private, info)

    def __repr__(self) -> str:
        return f"KeeperKey({'simulation' if self.noise.simulated else '<hidden>'})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a keeper's key is not pickled: it would end up in messages or caches; load it where it is used"
        )


@dataclass(frozen=True, kw_only=True)
class Keepers:
    """The keepers of a run: their cards, how many may work with the server, and how many may miss a round.

    ε of the plan holds against the server together with `colluding` keepers and any nodes but the user's own. The noise grows by
    √(K / (K − colluding − away)) against a trusted server's.

    Args:
        cards: of all K keepers.
        colluding: t. At least 1 unless the keepers are trusted with the sums themselves: a keeper knows its own share.
        away: d, the keepers that a round can do without.
        nodes: the fewest nodes whose sum is opened. With 1, the noised sum of a single node may be seen.
        epsilon: the most that a run may cost at `delta`, training and evaluations together; nodes and keepers refuse plans with
            a larger ε, whatever the server says. None for no limit.
        delta: δ of that ε.
        simulation_seed: of a simulation, in which anybody can guess the keepers' keys.
        tls: how the server reaches keepers that run as services. Only the server needs it.

    Raises:
        ValueError: for two cards with one name or key, more than 64 cards, for K − t − d < 1, for fewer than one node, if some
            have addresses and others not, for `tls` if none has, and for an `epsilon` without `delta` or out of range.

    >>> keepers = Keepers.simulation(1, 3, colluding=1)
    >>> keepers.names
    ('simulated-00', 'simulated-01', 'simulated-02')
    >>> keepers.shares.full  # so many shares have the planned variance
    2
    """

    cards: tuple[Card, ...]
    colluding: int
    away: int = 0
    nodes: int = 2
    epsilon: float | None = None
    delta: float | None = None
    simulation_seed: int | None = None
    tls: Tls | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.cards) <= MOST_KEEPERS:
            raise ValueError(f"there must be 1 to {MOST_KEEPERS} keepers, got {len(self.cards)}")
        for what in ("name", "public_key"):
            if len({getattr(card, what) for card in self.cards}) < len(self.cards):
                raise ValueError(f"two keepers have the same {what}: each is a party of its own")
        object.__setattr__(self, "cards", tuple(sorted(self.cards, key=lambda card: card.name)))
        if len({bool(card.address) for card in self.cards}) > 1:
            raise ValueError(
                "some keepers have an address and others not: either all are services, or all are Flower nodes"
            )
        if self.tls is not None and not self.are_services:
            raise ValueError("tls is for keepers that are services, and these have no address")
        _ = self.shares  # refuses numbers that do not fit
        if type(self.nodes) is not int or self.nodes < 1:
            raise ValueError(
                f"nodes, the fewest whose sum is opened, must be a whole number, at least 1; got {self.nodes!r}"
            )
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("epsilon and delta, the most that a run may cost, are given together or not at all")
        if self.epsilon is not None and not (_is_number(self.epsilon) and 0 < self.epsilon < math.inf):
            raise ValueError(f"epsilon must be a positive number, got {self.epsilon!r}")
        if self.delta is not None and not (_is_number(self.delta) and 0 < self.delta < 1):
            raise ValueError(f"delta must be above 0 and below 1, got {self.delta!r}")

    @staticmethod
    def from_file(path: Path | str, *, tls: Tls | None = None) -> "Keepers":
        """The keepers in a TOML file.

        Args:
            path: the file: `colluding`, `away` (0 if it is left out), `nodes` (2 if it is left out), perhaps `epsilon` and
                `delta`, and one [[keeper]] for each card.
            tls: on the server, where keepers have addresses: its certificate, and those of the keepers.

        Raises:
            ValueError: if the file does not hold keepers.
            FileNotFoundError: if it is missing.
        """
        try:
            return replace(Keepers.from_toml(Path(path).read_text(encoding="utf-8")), tls=tls)
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} does not say who the keepers are: {error}") from error

    @staticmethod
    def from_toml(text: str) -> "Keepers":
        """The keepers that `to_toml` wrote.

        Args:
            text: the content of keepers.toml.

        Raises:
            ValueError: for anything else.
        """
        content = tomllib.loads(text)
        numbers = {
            name: content[name] for name in ("colluding", "away", "nodes", "epsilon", "delta") if name in content
        }
        if unknown := content.keys() - {*numbers, "keeper"}:
            raise ValueError(
                f"unknown entries {sorted(unknown)}; there are colluding, away, nodes, epsilon, delta and [[keeper]]"
            )
        if "colluding" not in content:
            raise ValueError(
                "colluding is missing: how many keepers may work with the server (above the first [[keeper]])"
            )
        tables = content.get("keeper", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ValueError("keepers are given as [[keeper]], in double brackets")
        cards = tuple(Card.from_toml(table) for table in tables)
        return Keepers(cards=cards, **numbers)

    @staticmethod
    def simulation(simulation_seed: int, keepers: int, *, colluding: int, away: int = 0, nodes: int = 2) -> "Keepers":
        """Simulated keepers: repeatable, guessable, and therefore without any privacy.

        Args:
            simulation_seed: that of the simulation.
            keepers: K, how many.
            colluding: t, how many of them may work with the server.
            away: d, how many of them a round can do without.
            nodes: the fewest nodes whose sum is opened.

        Raises:
            ValueError: for K − t − d < 1.
        """
        cards = tuple(KeeperKey.simulation(simulation_seed, i).card(f"simulated-{i:02d}") for i in range(keepers))
        return Keepers(cards=cards, colluding=colluding, away=away, nodes=nodes, simulation_seed=simulation_seed)

    def to_toml(self) -> str:
        """The content of keepers.toml."""
        head = f"colluding = {self.colluding}\naway = {self.away}\nnodes = {self.nodes}\n"
        if self.epsilon is not None:
            head += f"epsilon = {self.epsilon!r}\ndelta = {self.delta!r}\n"
        return "\n".join([head, *(card.to_toml() for card in self.cards)])

    @property
    def simulated(self) -> bool:
        """Whether anybody can guess the keepers' keys."""
        return self.simulation_seed is not None

    @property
    def are_services(self) -> bool:
        """Whether each is a process of its own, with an address, rather than a Flower node."""
        return bool(self.cards[0].address)

    @property
    def shares(self) -> NoiseShares:
        """How the noise is divided."""
        return NoiseShares(keepers=len(self.cards), colluding=self.colluding, away=self.away)

    @property
    def names(self) -> tuple[str, ...]:
        """The keepers' names, sorted."""
        return tuple(card.name for card in self.cards)

    @property
    def digest(self) -> str:
        """SHA-256 of all that the file says, in hexadecimal digits: the same for everybody who holds the same keepers."""
        said = [self.colluding, self.away, self.nodes, [[card.name, card.public_key.hex()] for card in self.cards]]
        said += [] if self.epsilon is None else [self.epsilon, self.delta]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def card(self, name: str) -> Card:
        """The card of a keeper.

        Args:
            name: the keeper's.

        Raises:
            KeyError: if there is none of that name.
        """
        for card in self.cards:
            if card.name == name:
                return card
        raise KeyError(name)

    def card_of(self, key: KeeperKey) -> Card:
        """The card that belongs to a key.

        Args:
            key: that of one of these keepers.

        Raises:
            ValueError: if it is none of theirs.
        """
        for card in self.cards:
            if key.card(card.name) == card:
                return card
        raise ValueError("this key belongs to none of the keepers in the file: give it the card that goes with the key")

    def check_present(self, present: tuple[str, ...]) -> None:
        """Refuse keepers that may not do a round.

        Args:
            present: the names of the round's keepers.

        Raises:
            ValueError: unless these are sorted names of keepers, at least K − d of them.
        """
        unknown = set(present) - set(self.names)
        if unknown or list(present) != sorted(set(present)):
            raise ValueError(f"the keepers of a round are sorted names out of {list(self.names)}, got {list(present)}")
        if len(present) < len(self.cards) - self.away:
            raise ValueError(
                f"a round needs {len(self.cards) - self.away} of {len(self.cards)} keepers (away = {self.away}), got "
                f"{len(present)}"
            )
