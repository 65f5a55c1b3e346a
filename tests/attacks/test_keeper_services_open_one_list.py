"""A keeper that is a service, over its socket: strangers, and questions that there are not."""

import hashlib
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from keeper_openings import agreement_of, opening_for, updates
from keeper_services import Services, certificate

from fedcgd.keepers import Agreement, Masked, Opening, Tls, mask
from fedcgd.keepers.record import read, record_file
from fedcgd.keepers.service import ask
from fedcgd.keepers.wire import answer_from_bytes, challenges, to_bytes


@pytest.fixture
def services(tmp_path: Path):
    found = Services(tmp_path, 1, colluding=0)
    with found.running():
        yield found


def asked(services: Services, agreement: Agreement, opening: Opening, tls: Tls | None = None) -> bytes:
    address = services.keepers.cards[0].address
    request = to_bytes(agreement, opening)
    return ask(address, "/open", request, tls or services.tls("server"), most=10**6, timeout=30.0)


def masked(agreement: Agreement, count: int = 3) -> list[Masked]:
    return [mask(v, agreement, round=0, attempt=0, present=("k0",)) for v in updates(count)]


def test_a_stranger_gets_no_answer_and_pins_no_run(services: Services, tmp_path: Path) -> None:
    """With a certificate of its own, and that of another keeper. Else anybody could open rounds, or spend a keeper's one run."""
    agreement = agreement_of(services.keepers)
    sent = masked(agreement)
    own, key = certificate(tmp_path, "stranger")
    stranger = Tls(certificate=own, private_key=key, trusted=services.tls("server").trusted)
    keeper = replace(services.tls("k0"), trusted=services.tls("server").trusted)
    for tls in (stranger, keeper):
        with pytest.raises(OSError, match=r"(?i)alert|reset|closed|pipe|EOF"):
            asked(services, agreement, opening_for("k0", sent), tls)
    host, port = services.keepers.cards[0].address.split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"POST /open HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        assert b"200" not in plain.recv(100)
    assert read(record_file(services.key("k0"))).context is None  # nothing was recorded
    assert isinstance(answer_from_bytes(asked(services, agreement, opening_for("k0", sent)), agreement), np.ndarray)


def test_a_server_asks_nobody_but_the_keeper(services: Services, tmp_path: Path) -> None:
    """Whoever answers at a keeper's address with a certificate that the server does not trust is not there."""
    own, _ = certificate(tmp_path, "stranger")
    server = replace(services.tls("server"), trusted=own)
    agreement = agreement_of(services.keepers)
    with pytest.raises(OSError, match="certificate verify"):
        asked(services, agreement, opening_for("k0", masked(agreement)), server)


@pytest.mark.parametrize("question", ["/", "/who?", "/../open", "/opens"])
def test_there_are_three_questions(services: Services, question: str) -> None:
    tls = services.tls("server")
    with pytest.raises(OSError, match="status 400"):
        ask(services.keepers.cards[0].address, question, b"", tls, most=100, timeout=30.0)


def test_a_challenge_is_opened_and_a_seed_is_none(services: Services) -> None:
    """The proof is a hash, and seeds are sealed with other `info`: the question who a keeper is opens no seed."""
    card, tls = services.keepers.cards[0], services.tls("server")
    proofs, sealed = challenges(services.keepers)
    assert proofs[ask(card.address, "/who", sealed, tls, most=100, timeout=30.0)] == card.name
    nobodys = hashlib.sha256(b"fedcgd keeper opened\0").digest()
    [sent] = masked(agreement_of(services.keepers), 1)
    for other in (sent.sealed["k0"], b"", b"x" * 1168):
        assert ask(card.address, "/who", other, tls, most=100, timeout=30.0) == nobodys
