"""Keepers as services on the loopback interface, with certificates and keys made for a test."""

import ipaddress
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedcgd.keepers import KeeperKey, Keepers, Tls
from fedcgd.keepers.service import KeeperService
from fedcgd_simulations.flower_runs import free_port


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """(certificate, private key): signed by itself, for the loopback interface."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(addresses, critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / f"{name}.crt", folder / f"{name}.tls"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].touch(mode=0o600)
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


class Services:
    """Keys, cards and certificates of `count` keepers in `folder`, and a server's certificate."""

    def __init__(self, folder: Path, count: int, *, colluding: int) -> None:
        self.folder = folder
        self.names = [f"k{i}" for i in range(count)]
        self._tls = {name: certificate(folder, name) for name in [*self.names, "server"]}
        (folder / "keepers.crt").write_text("".join(self._tls[name][0].read_text() for name in self.names))
        cards = [
            replace(KeeperKey.from_file(self.key(name), create=True).card(name), address=f"127.0.0.1:{free_port()}")
            for name in self.names
        ]
        self.file = folder / "keepers.toml"
        # Of two nodes, one may host a whole cohort.
        self.file.write_text(Keepers(cards=tuple(cards), colluding=colluding, nodes=1).to_toml())
        self.keepers = Keepers.from_file(self.file, tls=self.tls("server"))

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def tls(self, name: str) -> Tls:
        """Of a keeper, or of the server."""
        own, private_key = self._tls[name]
        trusted = self.folder / ("keepers.crt" if name == "server" else "server.crt")
        return Tls(certificate=own, private_key=private_key, trusted=trusted)

    @contextmanager
    def running(self, *names: str) -> Iterator[None]:
        """The keepers of these names answer, or all, in threads of this process."""
        with ExitStack() as stack:
            for name in names or self.names:
                service = KeeperService(self.key(name), self.keepers, self.tls(name), host="127.0.0.1")
                stack.callback(service.server_close)
                thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
                thread.start()
                stack.callback(thread.join)
                stack.callback(service.shutdown)
            yield
