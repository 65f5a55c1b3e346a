"""`fedcgd keeper`: a keeper's key and card, what it has opened, whether all keepers were told the same, and its end."""

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from fedcgd.cli.commands import (
    NewKeeperOptions,
    SealKeeperOptions,
    ServeOptions,
    ShowKeepersOptions,
    VerifyKeepersOptions,
)
from fedcgd.cli.printing import console, key_value_table, note, print_json, printed
from fedcgd.cli.usage import Exit
from fedcgd.keepers.agreement import EVALUATION, Kind
from fedcgd.keepers.identities import KeeperKey, Keepers, check_name, host_and_port
from fedcgd.keepers.record import read, record_file
from fedcgd.keepers.service import KeeperService
from fedcgd.keepers.tls import Tls
from fedcgd.keepers.verification import AGREED, contradictions
from fedcgd.noise.keys import delete_key_file
from fedcgd.support.untrusted import parse_json


def new(asked: NewKeeperOptions) -> None:
    """Make a keeper's key, readable by you alone, and print its card: the lines that go into everybody's keepers.toml."""
    if asked.key.exists():
        raise ValueError(f"{asked.key} is there already, and one key is for one run: give another name")
    check_name(asked.name)  # what is wrong is refused before there is a key
    if asked.address:
        host_and_port(asked.address)
    card = replace(KeeperKey.from_file(asked.key, create=True).card(asked.name), address=asked.address)
    if asked.json:
        print_json({"name": card.name, "fingerprint": card.fingerprint, "toml": card.to_toml()})
        return
    click.echo(card.to_toml(), nl=False)
    click.echo(
        f"Key in {asked.key}, fingerprint {card.fingerprint}: read it to the others over another channel. keepers.toml begins "
        "with `colluding = 1`, above the cards.",
        err=True,
    )


def serve(asked: ServeOptions) -> None:
    """Answer as a keeper until it is stopped, at the port of its address: a process of its own, without Flower."""
    tls = Tls(certificate=asked.certificate, private_key=asked.private_key, trusted=asked.server)
    service = KeeperService(asked.key, Keepers.from_file(asked.keepers), tls, host=asked.host)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with service:
        click.echo(f"keeper {service.card.name} ({service.card.fingerprint}) answers at {service.card.address}")
        with suppress(KeyboardInterrupt):
            service.serve_forever()


def show(asked: ShowKeepersOptions) -> None:
    """Show who the keepers in a keepers.toml are, or what the keeper of a key has opened."""
    values = _of_keepers(asked.path) if asked.path.suffix == ".toml" else _of_key(asked.path)
    if asked.json:
        print_json(values)
    else:
        rows = [(name.replace("_", " "), _in_words(value)) for name, value in values.items()]
        console.print(key_value_table(str(asked.path), rows))


def verify(asked: VerifyKeepersOptions) -> int:
    """Compare what several keepers opened, with each other and with the run's ledger; exit code 1 if they contradict."""
    found = {}
    for word in asked.records:
        name, _, path = word.partition("=")
        if not path or name in found:
            raise ValueError(f"each record is NAME=FILE, each name once; got {word!r}")
        check_name(name)
        found[name] = read(Path(path))
    problems = contradictions(found, asked.ledger)
    if asked.json:
        print_json({"problems": problems, "rounds": {name: len(one.openings) for name, one in found.items()}})
    else:
        for problem in problems:
            note("Problem", problem)
        if not problems:
            rounds = ", ".join(f"{name} {len(one.openings)}" for name, one in found.items())
            kinds = {opened.kind for one in found.values() for opened in one.openings}
            also = ", those of evaluations included" if EVALUATION in kinds else ""
            console.print(f"no contradiction; rounds opened{also}: {rounds}", soft_wrap=True)
    return Exit.CONTRADICTED if problems else 0


def seal(asked: SealKeeperOptions) -> None:
    """End a keeper's part in a run: delete its key, so that its share of the noise can never be removed, and keep its record."""
    if not asked.key.is_file():
        raise ValueError(f"there is no key file {asked.key}: nothing is deleted")
    KeeperKey.from_file(asked.key)  # it is a key, and not some other file
    delete_key_file(asked.key)
    record = record_file(asked.key)
    printed(
        asked.json,
        {"deleted": str(asked.key), "record": str(record)},
        f"{asked.key} is deleted, and its copies and backups are yours to delete; the record stays in {record}",
    )


def _of_keepers(path: Path) -> dict[str, Any]:
    """Who the keepers are, and what they allow."""
    keepers = Keepers.from_file(path)
    return {
        "keepers": {card.name: card.fingerprint for card in keepers.cards},
        "addresses": {card.name: card.address for card in keepers.cards if card.address},
        "colluding": keepers.colluding,
        "away": keepers.away,
        "nodes": keepers.nodes,
        "noise_factor": keepers.shares.louder,
        "digest": keepers.digest,
        "epsilon": keepers.epsilon,
        "delta": keepers.delta,
        "epsilon_is_of": "a run and its evaluations (zero out one user; sampling: none; exact Gaussian mechanism)",
    }


def _of_key(path: Path) -> dict[str, Any]:
    """What the keeper of this key has agreed to and opened."""
    record = record_file(path)
    if not path.is_file() and not record.is_file():
        raise ValueError(f"there is neither a key file {path} nor a record {record}")
    found = read(record) if record.is_file() else None
    every = () if found is None else found.openings
    openings, evaluations = ([opened.round for opened in every if opened.kind == kind] for kind in get_args(Kind))
    agreed = found and found.agreement and parse_json(found.agreement, AGREED, "the agreement on record")
    return {
        "fingerprint": KeeperKey.from_file(path).card("any").fingerprint if path.is_file() else "deleted",
        "rounds_opened": openings,
        "evaluations_opened": evaluations,
        "agreement": agreed,
        "record": str(record),
    }


def _in_words(value: Any) -> str:
    """A value as people read it: of rounds how many, and the last."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return f"{len(value)}, the last is {value[-1]}" if value else "none"
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
