"""Keeps UCX to the network device of the address that a worker listens on.

UCX listens on a port of its own on every device that it may use: left alone, a worker on loopback
could be reached from the network.
"""

import array
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path

from pdserve_common.errors import KVTransferError
from pdserve_engine.kv_transfer.transport.rdma import RDMA_DEVICES, has_rdma_device

logger = logging.getLogger(__name__)

SETTING = "UCX_NET_DEVICES"
LOOPBACK = "lo"
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
# Linux' ioctl that lists IPv4 addresses, as entries of a name, a family, a port and the address.
SIOCGIFCONF = 0x8912
IFREQ = struct.Struct("16sHH4s16x")
MAX_IFREQS = 1024

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def keep_to_host(host: str, *, require_transport: str) -> None:
    """Set UCX_NET_DEVICES by the address that the worker listens on, unless it is set.

    Must run before UCX is loaded; a child process inherits it. Raises KVTransferError for a name
    without an address.
    """
    if SETTING in os.environ:
        return
    names = net_devices(host, require_transport=require_transport)
    if names is not None:
        os.environ[SETTING] = names
        logger.info("KV travels over %s only, as host is %s: %s is not set", names, host, SETTING)


def net_devices(host: str, *, require_transport: str) -> str | None:
    """Return what UCX_NET_DEVICES should be for a worker that listens on `host`; None: anything.

    RDMA devices listen on no address, so they stay but for loopback. Raises KVTransferError for a
    name without an address.
    """
    address = _address_of(host)
    if require_transport == "rdma" or address.is_unspecified:
        return None
    if address.is_loopback:
        return LOOPBACK
    device = device_of(address)
    if device is None:
        return None  # nobody can listen there
    uses_rdma = require_transport == "any" and has_rdma_device()
    return ",".join([device, *(_rdma_ports() if uses_rdma else ())])


def device_of(address: Address) -> str | None:
    """Return the network device that has an address; None if there is none."""
    devices = _ipv4_devices() if address.version == 4 else _ipv6_devices()
    return devices.get(address)


def _address_of(host: str) -> Address:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise KVTransferError(f"host is {host!r}, has no address: {error}") from error
    # Without the zone of a link-local address.
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def _ipv4_devices() -> dict[Address, str]:
    buffer = array.array("B", bytes(MAX_IFREQS * IFREQ.size))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        size, _ = struct.unpack("iP", fcntl.ioctl(any_socket, SIOCGIFCONF, request))
    found: dict[Address, str] = {}
    for name, _, _, address in IFREQ.iter_unpack(buffer[:size]):
        # Some addresses have labels of their own, such as eth0:1.
        label = name.partition(b"\0")[0].decode()
        found[ipaddress.IPv4Address(address)] = label.partition(":")[0]
    return found


def _ipv6_devices() -> dict[Address, str]:
    if not IPV6_ADDRESSES.exists():
        return {}
    lines = (line.split() for line in IPV6_ADDRESSES.read_text().splitlines())
    return {ipaddress.IPv6Address(bytes.fromhex(fields[0])): fields[-1] for fields in lines}


def _rdma_ports() -> list[str]:
    """Return UCX's names of them, such as mlx5_0:1."""
    ports = RDMA_DEVICES.glob("*/ports/*")
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in ports)
