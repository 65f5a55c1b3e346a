"""TLS between a server and keepers that run as services: each shows a certificate, and takes only the other's."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from fedcgd.support.files import check_private


@dataclass(frozen=True, kw_only=True)
class Tls:
    """This party's certificate and private key, and whom it takes for the other party; all files are PEM.

    Args:
        certificate: this party's own.
        private_key: of the certificate; readable by its owner only.
        trusted: the other parties' certificates, or those of authorities. Whatever an authority signs is taken: for a keeper,
            give the server's own certificate, or an authority that signs for the server alone.

    Raises:
        ValueError: if others may read the private key, or a file does not hold what it should.
        FileNotFoundError: if one is missing.
    """

    certificate: Path | str
    private_key: Path | str
    trusted: Path | str

    def __post_init__(self) -> None:
        self.context(keeper=False)

    def context(self, *, keeper: bool) -> ssl.SSLContext:
        """What connections are made with.

        Args:
            keeper: whether this party is a keeper, which accepts them, or the server, which makes them.

        Raises:
            ValueError: as for the class.
            FileNotFoundError: if a file is missing.
        """
        for path in (self.certificate, self.private_key, self.trusted):
            if not Path(path).is_file():  # ssl would not say which
                raise FileNotFoundError(
                    f"there is no file {path}, which TLS needs: a certificate or a private key, in PEM"
                )
        check_private(Path(self.private_key), "the private key of TLS")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if keeper else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.private_key)
            context.load_verify_locations(self.trusted)
        except ssl.SSLError as error:
            raise ValueError(
                f"{self.certificate}, {self.private_key} and {self.trusted} are no certificate, its private key and "
                f"certificates to trust, in PEM: {error.reason}"
            ) from error
        return context
