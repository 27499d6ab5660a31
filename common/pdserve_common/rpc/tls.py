"""TLS between clients, routers and workers: which files, and what gRPC and HTTP make of them."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc

from pdserve_common.config import opt
from pdserve_common.processes.followed import Followed

# A chain of certificates has some KiB, a bundle of public CAs 250.
MAX_FILE_BYTES = 4 * 2**20


# No slots: configs combine this with others by multiple inheritance.
@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """The TLS flags, which are the same everywhere."""

    tls_cert_file: str | None = opt(
        None, "Certificates (PEM) that this process shows, its own first; its servers speak TLS."
    )
    tls_key_file: str | None = opt(None, "The certificate's key (PEM), without a passphrase.")
    tls_ca_file: str | None = opt(
        None, "CAs (PEM) that have signed for those it dials, and for those who dial workers."
    )
    tls_server_name: str | None = opt(
        None, "Name in the certificates of those it dials; the host of their address if unset."
    )

    def __post_init__(self) -> None:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError(
                f"tls_cert_file is {self.tls_cert_file}, tls_key_file is {self.tls_key_file}: "
                "both must be set or neither"
            )
        if self.tls_server_name and not self.tls_ca_file:
            raise ValueError("tls_server_name is set, tls_ca_file must be set as well")

    def check_mutual(self) -> None:
        """Raise ValueError if there is a CA and no certificate, or the other way round."""
        if bool(self.tls_ca_file) != bool(self.tls_cert_file):
            raise ValueError(
                f"tls_ca_file is {self.tls_ca_file}, tls_cert_file is {self.tls_cert_file}: TLS "
                "with workers is mutual, both must be set or neither"
            )

    def load_tls(self) -> "Tls | None":
        """Read the files; None if there are none. Raises ValueError or OSError."""
        if not (self.tls_cert_file or self.tls_ca_file):
            return None
        return Tls(
            ca_file=self.tls_ca_file,
            cert_file=self.tls_cert_file,
            key_file=self.tls_key_file,
            server_name=self.tls_server_name,
        )


class _Material(NamedTuple):
    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    # What HTTP serves with; without a certificate it only proves that the CAs can be read.
    context: ssl.SSLContext


class Tls:
    """What a process shows and whom it trusts. Each new connection uses what is in the files then;
    files that do not fit together are logged, and the last that did stay in use.
    """

    def __init__(
        self,
        *,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        server_name: str | None = None,
    ) -> None:
        """`server_name` is looked for in the certificates of those that are dialled, instead of the
        host. Raises ValueError or OSError if a file cannot be read or the key is another's.
        """
        self.server_name = server_name
        self._ca_file, self._cert_file, self._key_file = ca_file, cert_file, key_file
        files = [file for file in (ca_file, cert_file, key_file) if file is not None]
        self._material = Followed(files, self._read)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one dial: a channel keeps what was in the files when it was made."""
        material = self._material.get()
        return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)

    def server_credentials(self, *, verifies_clients: bool) -> grpc.ServerCredentials:
        """`verifies_clients` refuses whoever shows no certificate that the CAs have signed."""
        last = self._material.get()

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(last.key, last.cert)], last.ca if verifies_clients else None
            )

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """What to serve a new connection with, None for what the last one had."""
            nonlocal last
            before, last = last, self._material.get()
            return None if last is before else configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, verifies_clients)

    def server_context(self) -> ssl.SSLContext:
        """For servers of HTTP; asks nobody for a certificate."""
        context = self._material.get().context

        def use_newest(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._material.get().context

        # Called for each connection, also of clients that name no server.
        context.sni_callback = use_newest
        return context

    def _read(self) -> _Material:
        material = _Material(
            ca=_read_pem(self._ca_file, "tls_ca_file"),
            cert=_read_pem(self._cert_file, "tls_cert_file"),
            key=_read_pem(self._key_file, "tls_key_file"),
            context=_new_context(),
        )
        if self._ca_file is not None:
            _check_ca(material.context, self._ca_file)
        if self._cert_file is not None and self._key_file is not None:
            _load_pair(material.context, self._cert_file, self._key_file)
        return material


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read_pem(path: str | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise OSError(f"{field} {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{field} {path} has more than {MAX_FILE_BYTES} bytes")
    return data


def _check_ca(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ValueError(f"tls_ca_file {path} holds no certificates (PEM): {error}") from error


def _load_pair(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    """Raises ValueError if the key is not the certificate's, or either is no PEM."""
    try:
        # Without a passphrase of ours OpenSSL would ask the terminal.
        context.load_cert_chain(cert_file, key_file, password=lambda: "")
    except ssl.SSLError as error:
        raise ValueError(
            f"tls_cert_file {cert_file} and tls_key_file {key_file} are not a certificate and its "
            f"unencrypted key (PEM): {error}"
        ) from error
