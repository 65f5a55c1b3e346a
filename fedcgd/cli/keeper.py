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
from fedcgd.keepers.cards import KeeperKey, Keepers, check_name, host_and_port
from fedcgd.keepers.record import read, record_file
from fedcgd.keepers.service import KeeperService
from fedcgd.keepers.tls import Tls
from fedcgd.keepers.verification import AGREED, contradictions
from fedcgd.noise.keys import delete_key_file
from fedcgd.support.numbers import plural
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
    rows, values = _of_keepers(asked.path) if asked.path.suffix == ".toml" else _of_key(asked.path)
    if asked.json:
        print_json(values)
    else:
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


def _of_keepers(path: Path) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    keepers = Keepers.from_file(path)
    shares = keepers.shares
    rows = [
        (card.name, f"fingerprint {card.fingerprint}" + (f", at {card.address}" if card.address else ""))
        for card in keepers.cards
    ]
    rows += [
        (
            "may collude",
            f"{keepers.colluding} of {shares.keepers}: against so many, with the server, the plan's ε holds",
        ),
        ("may be away", f"{keepers.away} in a round"),
        ("a sum", f"of at least {plural(keepers.nodes, 'node', 'nodes')}; of fewer none is opened"),
        ("noise", f"{shares.louder:.3f} times a trusted server's"),
        ("digest", f"{keepers.digest[:16]}: the same for all parties"),
        (
            "a run may cost",
            "any ε"
            if keepers.epsilon is None
            else f"ε = {keepers.epsilon:g} at δ = {keepers.delta:g}, its evaluations on users' data included (zero out one "
            "user; sampling: none; exact Gaussian mechanism); plans of more are refused",
        ),
    ]
    values = {
        "keepers": {card.name: card.fingerprint for card in keepers.cards},
        "colluding": keepers.colluding,
        "away": keepers.away,
        "nodes": keepers.nodes,
        "noise_factor": shares.louder,
        "digest": keepers.digest,
        "epsilon": keepers.epsilon,
        "delta": keepers.delta,
    }
    return rows, values


def _of_key(path: Path) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    record = record_file(path)
    if not path.is_file() and not record.is_file():
        raise ValueError(f"there is neither a key file {path} nor a record {record}")
    fingerprint = KeeperKey.from_file(path).card("any").fingerprint if path.is_file() else None
    found = read(record) if record.is_file() else None
    every = () if found is None else found.openings
    openings, evaluations = ([opened.round for opened in every if opened.kind == kind] for kind in get_args(Kind))
    agreed = (
        None
        if found is None or found.agreement is None
        else parse_json(found.agreement, AGREED, "the agreement on record")
    )
    rows = [
        ("key", "deleted" if fingerprint is None else f"fingerprint {fingerprint}"),
        ("rounds opened", f"{len(openings)}" + (f", the last is {openings[-1]}" if openings else "")),
    ]
    if agreed is not None:
        plan = agreed["plan"]
        mechanism = plan["mechanism"]["name"]
        rows += [
            ("run", agreed["run"] or "a simulation"),
            ("plan", f"{mechanism}, {plan['participation']['rounds']} rounds, σ = {plan['noise_multiplier']:.4g}"),
            ("coordinates", str(agreed["size"])),
            ("keepers.toml", agreed["keepers"][:16]),
        ]
        if (other := agreed.get(EVALUATION)) is not None:
            planned, sigma = other["plan"]["participation"]["rounds"], other["plan"]["noise_multiplier"]
            rows.append(("evaluations opened", f"{len(evaluations)} of {planned}, σ = {sigma:.4g}"))
    values = {
        "fingerprint": fingerprint,
        "rounds_opened": openings,
        "evaluations_opened": evaluations,
        "agreement": agreed,
        "record": str(record),
    }
    return rows, values
