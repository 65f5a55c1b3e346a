"""A keeper as a process of its own, reached over HTTPS: nothing of the server's runs where the key lies.

The caller shows a certificate that the keeper was told to trust. There are three questions, each the path of a POST: "/who" (a
sealed challenge; the proof), "/check" and "/open" (`fedcgd.keepers.wire`).
"""

import http.client
import logging
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedcgd.keepers.agreement import Agreement
from fedcgd.keepers.identities import KeeperKey, Keepers, host_and_port
from fedcgd.keepers.keeper import Keeper, Opening, Refusal
from fedcgd.keepers.masks import Residues
from fedcgd.keepers.tls import Tls
from fedcgd.keepers.wire import answer_to_bytes, from_bytes, proof


@dataclass(frozen=True)
class Limits:
    """What a service accepts from a client.

    Attributes:
        request: bytes of a request; 2³⁰ are 900,000 nodes.
        silence: seconds without a byte until a connection is closed.
        handshake: seconds in which a trusted certificate must be shown.
        strangers: connections that have not shown one yet, altogether.
        from_one: the same, from one address.
    """

    request: int = 2**30
    silence: float = 60.0
    handshake: float = 5.0
    strangers: int = 64
    from_one: int = 8


LIMITS = Limits()

log = logging.getLogger(__name__)


def answer(key_file: Path, keepers: Keepers, question: str, asked: bytes) -> bytes | None:
    """What a keeper answers.

    Args:
        key_file: the keeper's key, with its record next to it.
        keepers: all keepers of the run, as this one knows them.
        question: "/who", "/check" or "/open".
        asked: what came with it.

    Returns:
        The answer, as bytes; None to what is no question.
    """
    if question == "/who":
        return proof(KeeperKey.from_file(key_file), keepers, asked)
    if question not in ("/check", "/open"):
        return None
    try:
        agreement, opening = from_bytes(asked, keepers)
        with Keeper.open(key_file, keepers) as keeper:
            answered = keeper.reply(agreement, opening, check=question == "/check")
    except ValueError as error:
        answered = Refusal(str(error))
    else:
        _tell(question, agreement, opening, answered)
    return answer_to_bytes(answered)


def _tell(question: str, agreement: Agreement, opening: Opening, answered: Residues | Refusal) -> None:
    if isinstance(answered, Refusal) and answered.reason:
        log.warning("%s round %d is not opened: %s", agreement.kind, opening.round, answered.reason)
    elif question == "/open":
        plan, nodes = agreement.plan, len(opening.sealed)
        log.info(
            "%s round %d of %d opened for %d nodes: run %s, %s, σ = %.4g, clip norm %g, %d coordinates",
            agreement.kind, opening.round + 1, plan.participation.rounds, nodes, agreement.run, plan.mechanism,
            plan.noise_multiplier, plan.clip_norm, agreement.size,
        )  # fmt: skip


class KeeperService(ThreadingHTTPServer):
    """Answers for one keeper, one question at a time. Stop it with `shutdown`; a kill at any moment loses nothing.

    A connection without a certificate is closed after a few seconds, or sooner if others want its place: the oldest such
    connection makes room for a new one. So idle connections, however many, do not keep the run's server out.

    Args:
        key_file: the keeper's key, with its record next to it.
        keepers: all keepers of the run, as this one knows them, with their addresses.
        tls: this keeper's certificate, and the server's.
        host: the network address to listen at; "" is every one of this machine. The port is that of the keeper's address.

    Raises:
        ValueError: as `Keeper.open`, and if the keeper has no address in `keepers`.
    """

    daemon_threads = True
    request_queue_size = LIMITS.strangers  # with Python's 5, who floods the port makes the server's own connection wait

    def __init__(self, key_file: Path, keepers: Keepers, tls: Tls, *, host: str = "") -> None:
        with Keeper.open(key_file, keepers) as keeper:  # what is wrong with it is said now
            self.card = keepers.card(keeper.card.name)
        if not self.card.address:
            raise ValueError(
                f'keeper {self.card.name!r} has no address in keepers.toml: add address = "HOST:PORT" to its card'
            )
        self._key_file, self._keepers = key_file, keepers
        self._context = tls.context(keeper=True)
        self._one_at_a_time = threading.Lock()
        self._strangers: dict[
            ssl.SSLSocket, str
        ] = {}  # who has shown no certificate yet, the oldest first → its address
        self._of_strangers = threading.Lock()
        super().__init__((host, host_and_port(self.card.address)[1]), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """A connection; who is on the other side is seen in a thread of its own, so that nobody keeps others waiting."""
        connection, address = super().get_request()
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Make room for the connection, and answer it in a thread of its own."""
        with self._of_strangers:
            from_there = [one for one, address in self._strangers.items() if address == client_address[0]]
            if len(from_there) >= LIMITS.from_one:
                self._let_go(from_there[0])
            elif len(self._strangers) >= LIMITS.strangers:
                self._let_go(next(iter(self._strangers)))
            self._strangers[request] = client_address[0]
        super().process_request(request, client_address)

    def _let_go(self, stranger: ssl.SSLSocket) -> None:
        del self._strangers[stranger]
        with suppress(OSError):
            socket.socket.shutdown(stranger, socket.SHUT_RDWR)  # the system's: the thread that waits for it ends

    def finish_request(self, request: Any, client_address: Any) -> None:
        """See who it is, and answer."""
        try:
            request.settimeout(LIMITS.handshake)
            request.do_handshake()
        finally:
            with self._of_strangers:
                self._strangers.pop(request, None)
        super().finish_request(request, client_address)

    def answer(self, question: str, asked: bytes) -> bytes | None:
        """The answer, or None to what is no question.

        Args:
            question: "/who", "/check" or "/open".
            asked: what came with it.
        """
        with self._one_at_a_time:
            return answer(self._key_file, self._keepers, question, asked)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say that somebody was not let in, or went away; without what it sent."""
        log.warning("a connection from %s failed: %s", client_address[0], sys.exception() or "unknown")


class _Handler(BaseHTTPRequestHandler):
    server: KeeperService
    server_version, sys_version = "fedcgd", ""
    timeout = LIMITS.silence

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LIMITS.request:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        asked = self.rfile.read(int(length))
        answered = self.server.answer(self.path, asked) if len(asked) == int(length) else None
        if answered is None:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(len(answered)))
        self.end_headers()
        self.wfile.write(answered)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


def ask(address: str, question: str, asked: bytes, tls: Tls, *, most: int, timeout: float) -> bytes:
    """What a keeper answers.

    Args:
        address: HOST:PORT.
        question: "/who", "/check" or "/open".
        asked: what goes with it.
        tls: the server's certificate, and whom it trusts.
        most: bytes that are read of the answer.
        timeout: seconds until the whole answer must be there, however it trickles in.

    Raises:
        OSError: if nobody answers in time, one side does not trust the other, or this is no question.
    """
    host, port = host_and_port(address)
    over = threading.Event()
    began = time.monotonic()
    plain = socket.create_connection((host, port), timeout)
    with tls.context(keeper=False).wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False) as wrapped:

        def end() -> None:
            over.set()
            with suppress(OSError):
                socket.socket.shutdown(wrapped, socket.SHUT_RDWR)  # the system's: whatever waits for a byte ends

        timer = threading.Timer(timeout - (time.monotonic() - began), end)
        timer.daemon = True
        timer.start()
        connection = http.client.HTTPConnection(host, port)
        connection.sock = wrapped
        try:
            wrapped.do_handshake()
            connection.request("POST", question, asked)
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                raise OSError(f"it answers with HTTP status {response.status}")
            found = response.read(most)
            if not over.is_set():
                return found
        except http.client.HTTPException as error:
            if not over.is_set():
                raise OSError(f"what it answers is not HTTP: {error!r}") from error
        except OSError:
            if not over.is_set():
                raise
        finally:
            timer.cancel()
            connection.close()
    raise TimeoutError(f"its whole answer did not come within {timeout:g} s")
