"""TLS between processes: who is let in, and what happens when the files change."""

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve_common.rpc.channels import LIVENESS_SERVICE, RpcServer, open_channel
from pdserve_common.rpc.tls import Tls, TlsConfig
from pdserve_worker.config import WorkerConfig

WORKER_NAMES = "IP:127.0.0.1,DNS:worker"


@pytest.fixture(scope="module")
def ca(make_certificate_authority: Callable[[], Any]) -> Any:
    return make_certificate_authority()


@pytest.fixture(scope="module")
def other_ca(make_certificate_authority: Callable[[], Any]) -> Any:
    return make_certificate_authority()


def tls_of(authority: Any, name: str, **fields: Any) -> Tls:
    cert, key = authority.issue(name, WORKER_NAMES)
    return Tls(**{"ca_file": authority.ca_file, "cert_file": cert, "key_file": key, **fields})


class Files:
    """What one process has mounted."""

    def __init__(self, folder: Path, authority: Any) -> None:
        self.ca, self.cert, self.key = (folder / name for name in ("ca.crt", "tls.crt", "tls.key"))
        self.write(authority, WORKER_NAMES)

    def write(self, authority: Any, names: str) -> None:
        cert, key = authority.issue("mounted", names)
        for source, target in ((authority.ca_file, self.ca), (cert, self.cert), (key, self.key)):
            shutil.copy(source, target)

    def broken_certs(self, authority: Any) -> list[bytes]:
        """What a certificate may be halfway through being replaced; the last one fits no key."""
        good = self.cert.read_bytes()
        return [b"", good[: len(good) // 2], Path(authority.ca_file).read_bytes()]

    def tls(self, **fields: Any) -> Tls:
        files = {"ca_file": self.ca, "cert_file": self.cert, "key_file": self.key}
        return Tls(**{name: str(path) for name, path in files.items()}, **fields)


@pytest.fixture
def files(tmp_path: Path, ca: Any) -> Files:
    return Files(tmp_path, ca)


@pytest.fixture
async def server(files: Files) -> AsyncIterator[RpcServer]:
    """As workers serve: whoever dials shows a certificate."""
    credentials = files.tls().server_credentials(verifies_clients=True)
    server = RpcServer("127.0.0.1", 0, credentials=credentials)
    await server.start([])
    yield server
    await server.stop(0)


async def is_let_in(server: RpcServer, tls: Tls | None) -> bool:
    check = health_pb2.HealthCheckRequest(service=LIVENESS_SERVICE)
    async with open_channel(f"127.0.0.1:{server.port}", tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(check, timeout=60)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return True


async def test_workers_let_in_who_has_a_certificate_of_their_ca(
    server: RpcServer, ca: Any, other_ca: Any
) -> None:
    assert await is_let_in(server, tls_of(ca, "router"))
    assert not await is_let_in(server, None)
    assert not await is_let_in(server, Tls(ca_file=ca.ca_file))
    assert not await is_let_in(server, tls_of(other_ca, "unknown", ca_file=ca.ca_file))


async def test_workers_prove_who_they_are(server: RpcServer, ca: Any, other_ca: Any) -> None:
    assert not await is_let_in(server, tls_of(ca, "router", ca_file=other_ca.ca_file))
    assert not await is_let_in(server, tls_of(ca, "router", server_name="another"))
    assert await is_let_in(server, tls_of(ca, "router", server_name="worker"))


async def test_both_sides_follow_their_files(
    server: RpcServer, files: Files, ca: Any, other_ca: Any
) -> None:
    dialer = files.tls(server_name="worker")
    old = tls_of(ca, "router")
    assert await is_let_in(server, dialer)
    files.write(other_ca, WORKER_NAMES)
    assert await is_let_in(server, dialer)
    assert not await is_let_in(server, old)


async def test_files_that_do_not_fit_change_nothing(
    server: RpcServer, files: Files, ca: Any, caplog: pytest.LogCaptureFixture
) -> None:
    router = tls_of(ca, "router", server_name="worker")
    for broken in files.broken_certs(ca):
        files.cert.write_bytes(broken)
        assert await is_let_in(server, router)
        assert await is_let_in(server, router)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3, "once for each"
    files.cert.unlink()
    assert await is_let_in(server, router)
    files.write(ca, "DNS:renewed")
    assert not await is_let_in(server, router)


def test_files_are_checked_at_the_start(files: Files, ca: Any, tmp_path: Path) -> None:
    _, others_key = ca.issue("another", WORKER_NAMES)
    huge = tmp_path / "huge"
    huge.write_bytes(b"#" * (4 * 2**20 + 1))
    cases = [
        ({"key_file": others_key}, "are not a certificate and its unencrypted key"),
        ({"cert_file": "/nowhere"}, "tls_cert_file /nowhere cannot be read: No such file"),
        ({"key_file": str(tmp_path)}, f"tls_key_file {tmp_path} cannot be read: Is a directory"),
        ({"ca_file": others_key}, "holds no certificates"),
        ({"ca_file": str(huge)}, "has more than 4194304 bytes"),
    ]
    paths = {"ca_file": files.ca, "cert_file": files.cert, "key_file": files.key}
    for fields, message in cases:
        with pytest.raises((OSError, ValueError), match=message):
            Tls(**{name: str(path) for name, path in paths.items()} | fields)


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(files: Files, ca: Any) -> None:
    files.key.write_text(ca.encrypted(files.key))
    with pytest.raises(ValueError, match="unencrypted key"):
        files.tls()


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (TlsConfig, {"tls_cert_file": "c"}, "tls_cert_file is c, tls_key_file is None: both"),
        (TlsConfig, {"tls_key_file": "k"}, "tls_cert_file is None, tls_key_file is k: both"),
        (TlsConfig, {"tls_server_name": "n"}, "tls_server_name is set, tls_ca_file must be"),
        (WorkerConfig, {"tls_ca_file": "a"}, "tls_ca_file is a, tls_cert_file is None: TLS with"),
        (
            WorkerConfig,
            {"tls_cert_file": "c", "tls_key_file": "k"},
            "tls_ca_file is None, tls_cert_file is c: TLS with",
        ),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(
    config: type[TlsConfig], fields: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_without_files_there_is_plain_text() -> None:
    assert TlsConfig().load_tls() is None
