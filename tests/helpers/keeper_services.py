"""Keepers as services on the loopback interface, with certificates and keys made for a test."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from fedcgd.keepers import KeeperKey, Keepers, Tls
from fedcgd.keepers.service import KeeperService
from fedcgd_simulations.flower_runs import free_port


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """(certificate, private key): signed by itself, for the loopback interface."""
    files = folder / f"{name}.crt", folder / f"{name}.tls"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -addext subjectAltName=IP:127.0.0.1"
    words = [*command.split(), "-subj", f"/CN={name}", "-out", files[0], "-keyout", files[1]]
    subprocess.run(words, check=True, capture_output=True)
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
