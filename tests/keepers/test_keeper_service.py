"""Keepers as processes of their own, over TLS on the loopback interface."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from keeper_openings import agreement_of, opening_for, simulated, updates
from keeper_runs import make, two_nodes
from keeper_services import Services
from shared import record

from fedcgd.keepers import Agreement, Keepers, Opening, Refusal, Tls, mask
from fedcgd.keepers.identities import Card, KeeperKey, host_and_port
from fedcgd.keepers.record import read, record_file
from fedcgd.keepers.service import LIMITS, KeeperService, ask
from fedcgd.keepers.verification import contradictions
from fedcgd.keepers.wire import answer_from_bytes, answer_to_bytes, challenges, from_bytes, to_bytes
from fedcgd.ledger import verify
from fedcgd.noise.keys import NoiseKey
from fedcgd_flower.keepers.transport import KeeperServices
from fedcgd_flower.run_loop import IncompleteRunError


def request() -> tuple[Keepers, Agreement, Opening]:
    keepers, members = simulated()
    agreement = agreement_of(keepers)
    sent = [mask(v, agreement, round=0, attempt=0, present=keepers.names) for v in updates(2)]
    return keepers, agreement, opening_for(members[0], sent)


# Bytes.


@pytest.mark.parametrize("after", [None, 0])
def test_a_request_is_read_as_it_was_written(after: int | None) -> None:
    keepers, agreement, opening = request()
    opening = replace(opening, after=after)
    assert from_bytes(to_bytes(agreement, opening), keepers) == (agreement, opening)


def test_an_answer_is_read_as_it_was_written() -> None:
    _, agreement, _ = request()
    residues = np.random.default_rng(0).integers(0, 2**32, agreement.size, dtype=np.uint32)
    found = answer_from_bytes(answer_to_bytes(residues), agreement)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, residues)
    refusal = Refusal("no", (1, 2))
    assert answer_from_bytes(answer_to_bytes(refusal), agreement) == refusal
    for wrong in (b"", b"x", b"{}\n", answer_to_bytes(residues)[:-1], b'{"refused": 1, "unreadable": []}\n'):
        assert answer_from_bytes(wrong, agreement) is None


# Time and connections.


@pytest.fixture
def trickling(tmp_path: Path) -> Iterator[Services]:
    """A keeper at its address that answers what is right, twenty milliseconds a byte."""
    services = Services(tmp_path, 1, colluding=0)
    context = services.tls("k0").context(keeper=True)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n" + b"x" * 60

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with suppress(OSError), context.wrap_socket(connection, server_side=True) as wrapped:
                wrapped.recv(1000)
                for byte in answer:
                    wrapped.send(bytes([byte]))
                    time.sleep(0.02)

    with socket.create_server(host_and_port(services.keepers.cards[0].address)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield services
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_keeper_has_so_long_for_its_whole_answer_however_it_trickles(trickling: Services) -> None:
    """Two seconds of answer, a byte at a time: each was in time, and so the server waited for all."""
    address = trickling.keepers.cards[0].address
    with pytest.raises(TimeoutError, match="whole answer"):
        ask(address, "/who", b"", trickling.tls("server"), most=1000, timeout=0.5)
    assert ask(address, "/who", b"", trickling.tls("server"), most=1000, timeout=60.0) == b"x" * 60


@pytest.mark.parametrize(("addresses", "first_stays"), [(1, 8), (100, 64)], ids=["one address", "many"])
def test_idle_connections_do_not_keep_the_server_out(tmp_path: Path, addresses: int, first_stays: int) -> None:
    """A thread and a minute each were what it took. The oldest makes room for a new one, while nobody shows who it is."""
    services = Services(tmp_path, 1, colluding=0)
    [card] = services.keepers.cards
    with services.running(), ExitStack() as stack:
        idle = []
        for number in range(100):
            source = (f"127.0.{number % addresses}.7", 0)
            idle.append(socket.create_connection(host_and_port(card.address), timeout=60.0, source_address=source))
            stack.enter_context(idle[-1])
        proofs, sealed = challenges(services.keepers)
        assert proofs[ask(card.address, "/who", sealed, services.tls("server"), most=1000, timeout=60.0)] == card.name
        assert [one.recv(1) for one in idle[: 100 - first_stays]] == [b""] * (100 - first_stays)


@pytest.mark.parametrize(("length", "status"), [(100, "400"), (101, "413")])
def test_a_request_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch, length: int, status: str) -> None:
    monkeypatch.setattr("fedcgd.keepers.service.LIMITS", replace(LIMITS, request=100))
    services = Services(tmp_path, 1, colluding=0)
    [card] = services.keepers.cards
    with services.running(), pytest.raises(OSError, match=status):
        ask(card.address, "/none", b"x" * length, services.tls("server"), most=1000, timeout=60.0)


def test_as_much_is_read_of_a_keepers_answer_as_a_large_model_takes(tmp_path: Path, monkeypatch) -> None:
    most: list[int] = []
    monkeypatch.setattr("fedcgd.keepers.service.ask", lambda *_, **options: most.append(options["most"]))
    keepers = Services(tmp_path, 1, colluding=0).keepers
    opening = Opening(round=0, attempt=0, present=("k0",), tickets=(), sealed=(), after=None)
    KeeperServices(keepers).ask(None, agreement_of(keepers, size=10**7), {"k0": opening}, check=False, patience=0.0)
    assert 4 * 10**7 < most[0] < 5 * 10**7


# Addresses and certificates.


def test_addresses_are_in_the_file_and_not_in_what_keepers_agree_on(tmp_path: Path) -> None:
    keepers, _, _ = request()
    moved = replace(keepers, cards=tuple(replace(card, address="[::1]:9444") for card in keepers.cards))
    assert moved.digest == keepers.digest
    assert moved == keepers
    assert moved.are_services
    assert not keepers.are_services
    assert [card.address for card in Keepers.from_toml(moved.to_toml()).cards] == ["[::1]:9444"] * 3
    assert host_and_port("[::1]:9444") == ("::1", 9444)


@pytest.mark.parametrize(
    "address", ["court", "court:", ":9444", "court:x", "court:99999", "a@court:1", "https://court:1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Card("court", KeeperKey.simulation(7, 0).card("court").public_key, address)


def test_either_all_keepers_are_services_or_none() -> None:
    keepers, _, _ = request()
    with pytest.raises(ValueError, match="are services"):
        replace(keepers, cards=(replace(keepers.cards[0], address="a:1"), *keepers.cards[1:]))


def test_tls_is_for_services_and_needed_for_them(tmp_path: Path) -> None:
    services = Services(tmp_path, 1, colluding=0)
    keepers, _, _ = request()
    with pytest.raises(ValueError, match="these have"):
        replace(keepers, tls=services.tls("server"))
    key = NoiseKey.from_file(tmp_path / "cohorts.key", create=True)
    with pytest.raises(ValueError, match="Tls"):
        make(Keepers.from_file(services.file), key=key, ledger=tmp_path / "run.db")


def test_files_that_are_no_certificate_or_that_others_may_read_are_refused(tmp_path: Path) -> None:
    services = Services(tmp_path, 1, colluding=0)
    good = services.tls("server")
    with pytest.raises(ValueError, match="certificate, its"):
        replace(good, certificate=services.tls("k0").certificate)
    Path(good.private_key).chmod(0o640)
    with pytest.raises(ValueError, match="others may"):
        Tls(certificate=good.certificate, private_key=good.private_key, trusted=good.trusted)


# Runs.


def test_a_run_whose_keepers_are_services(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nodes are no keepers, and none of the keepers is a node; one is gone for a while, and the rounds wait."""
    services = Services(tmp_path, 3, colluding=1)
    key = NoiseKey.from_file(tmp_path / "cohorts.key", create=True)
    options = {"key": key, "ledger": tmp_path / "run.db", "trusted_nodes": True}
    with services.running():
        make(services.keepers, **options).start(two_nodes(services.keepers), record(np.zeros(6)), num_rounds=3)
    assert verify(tmp_path / "run.db").released == 3
    with services.running("k0", "k2"), pytest.raises(IncompleteRunError, match="missing: k1"):
        make(services.keepers, **options).start(two_nodes(services.keepers), record(np.zeros(6)))
    assert "at 127.0.0.1" in caplog.text
    assert caplog.text.count("Connection refused") == 1
    with services.running():
        make(services.keepers, **options).start(two_nodes(services.keepers), record(np.zeros(6)))
    found = verify(tmp_path / "run.db")
    assert (found.released, found.problems, found.keepers.spent) == (6, (), 0)
    records = {name: read(record_file(services.key(name))) for name in services.names}
    assert [len(one.openings) for one in records.values()] == [6, 6, 6]
    assert contradictions(records, tmp_path / "run.db") == []


def serve(services: Services, name: str) -> subprocess.Popen[bytes]:
    """`fedcgd keeper serve` in a process of its own, once it answers."""
    tls = services.tls(name)
    words = ["--keepers", services.file, "--certificate", tls.certificate, "--private-key", tls.private_key]
    # A shell that runs the tests in the background has children ignore Ctrl-C.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from fedcgd.cli import app; app()"
    )
    command = [sys.executable, "-c", program, "keeper", "serve", services.key(name), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (services.folder / "serve.log").open("ab") as log:
        process = subprocess.Popen([*command, "--server", tls.trusted], env=environment, stderr=log)
    card = services.keepers.card(name)
    proofs, sealed = challenges(services.keepers)
    while process.poll() is None:
        with suppress(OSError):
            assert proofs[ask(card.address, "/who", sealed, services.tls("server"), most=100, timeout=5.0)] == name
            return process
        time.sleep(0.05)
    raise AssertionError((services.folder / "serve.log").read_text())


def test_the_guides_unit_and_image_start_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with all the files but the last, that one is what is missing."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "keepers.md").read_text()
    unit, image = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("ini", "dockerfile"))
    services = Services(tmp_path, 1, colluding=0)
    services.key("k0").rename(tmp_path / "keeper.key")
    record_file(services.key("k0")).rename(tmp_path / "keeper.key.record")
    own = services.tls("k0")
    Path(own.certificate).rename(tmp_path / "tls.crt")
    Path(own.private_key).rename(tmp_path / "tls.key")
    (tmp_path / "server.crt").unlink()
    monkeypatch.chdir(tmp_path)
    started = re.findall(r"ExecStart=(.*)", unit)[0].split()
    image_starts = [word for words in re.findall(r"(?:ENTRYPOINT|CMD) (\[.*\])", image) for word in json.loads(words)]
    for program, *words in (started, image_starts):
        assert program.endswith("fedcgd")
        done = run(*words)
        assert done.exit_code != 0
        assert "server.crt" in done.output
        assert "such option" not in done.output


def test_a_keeper_that_is_killed_answers_the_same_when_it_is_back(tmp_path: Path) -> None:
    services = Services(tmp_path, 1, colluding=0)
    agreement = agreement_of(services.keepers)
    sent = [mask(v, agreement, round=0, attempt=0, present=("k0",)) for v in updates(2)]
    opening = Opening(
        round=0,
        attempt=0,
        present=("k0",),
        tickets=tuple(one.ticket for one in sent),
        sealed=tuple(one.sealed["k0"] for one in sent),
        after=None,
    )
    answers, ended = [], []
    for how in (signal.SIGKILL, signal.SIGINT):
        process = serve(services, "k0")
        try:
            asked = to_bytes(agreement, opening)
            address = services.keepers.cards[0].address
            answers.append(ask(address, "/open", asked, services.tls("server"), most=10**6, timeout=60.0))
        finally:
            process.send_signal(how)
            try:
                ended.append(process.wait(60))
            finally:
                process.kill()
                process.wait()
    assert ended == [-signal.SIGKILL, 0]
    assert isinstance(answer_from_bytes(answers[0], agreement), np.ndarray)
    assert answers[0] == answers[1]
    assert "12 opened" in (tmp_path / "serve.log").read_text()


def test_a_keeper_without_an_address_serves_nobody(tmp_path: Path) -> None:
    services = Services(tmp_path, 1, colluding=0)
    without = Keepers(cards=(KeeperKey.from_file(services.key("k0")).card("k0"),), colluding=0)
    with pytest.raises(ValueError, match="no address"):
        KeeperService(services.key("k0"), without, services.tls("k0"))
