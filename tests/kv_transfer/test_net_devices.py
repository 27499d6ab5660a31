"""Which network devices UCX is kept to."""

import ipaddress
import os
import socket
from pathlib import Path

import psutil
import pytest

from pdserve_common.errors import KVTransferError
from pdserve_engine.kv_transfer.transport import net_devices
from pdserve_engine.kv_transfer.transport.net_devices import SETTING, device_of, keep_to_host

FAMILIES = (socket.AF_INET, socket.AF_INET6)


def addresses() -> set[tuple[str, str]]:
    """Devices of this machine with an address each."""
    return {
        (name, address.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in FAMILIES
    }


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody has chosen devices; what a test sets is gone after it."""
    monkeypatch.setenv(SETTING, "")
    monkeypatch.delenv(SETTING)
    monkeypatch.setattr(net_devices, "has_rdma_device", lambda: False)


def test_the_device_of_every_address_of_this_machine_is_found() -> None:
    before = addresses()
    found = {(device_of(ipaddress.ip_address(address)), address) for _, address in before}
    assert ("lo", "127.0.0.1") in found
    # Other programs' namespaces come and go.
    assert before & addresses() <= found


@pytest.mark.parametrize("host", ["127.0.0.1", "127.20.0.3", "::1", "localhost"])
@pytest.mark.parametrize("require_transport", ["any", "tcp", "shm"])
def test_a_worker_on_loopback_keeps_to_it(host: str, require_transport: str) -> None:
    keep_to_host(host, require_transport=require_transport)
    assert os.environ[SETTING] == "lo"


def test_a_worker_keeps_to_the_device_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = addresses(), set()
    for _, host in before:
        monkeypatch.delenv(SETTING, raising=False)
        keep_to_host(host, require_transport="any")
        found.add((os.environ.get(SETTING), host))
    assert before & addresses() <= found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.77"])
def test_where_all_devices_are_meant_or_none_nothing_is_set(host: str) -> None:
    keep_to_host(host, require_transport="any")
    assert SETTING not in os.environ


def test_rdma_alone_listens_on_no_address() -> None:
    keep_to_host("127.0.0.1", require_transport="rdma")
    assert SETTING not in os.environ


def test_what_an_operator_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "eth7")
    keep_to_host("127.0.0.1", require_transport="any")
    assert os.environ[SETTING] == "eth7"


def test_rdma_devices_stay_beside_the_device_of_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "mlx5_1/ports/1").mkdir(parents=True)
    monkeypatch.setattr(net_devices, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(net_devices, "has_rdma_device", lambda: True)
    monkeypatch.setattr(net_devices, "device_of", lambda address: "eth0")
    found = net_devices.net_devices("192.0.2.2", require_transport="any")
    assert found == "eth0,mlx5_0:1,mlx5_1:1"
    assert net_devices.net_devices("192.0.2.2", require_transport="tcp") == "eth0"
    assert net_devices.net_devices("127.0.0.1", require_transport="any") == "lo"


def test_a_name_without_an_address_is_refused() -> None:
    with pytest.raises(KVTransferError, match=r"host is 'no\.such\.host\.invalid', has no address"):
        keep_to_host("no.such.host.invalid", require_transport="any")
