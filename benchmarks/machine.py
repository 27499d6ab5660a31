"""The machine that a benchmark runs on."""

import datetime
import os
import platform
import socket
from importlib.metadata import version
from pathlib import Path


def describe(*packages: str) -> str:
    """Return CPU, cores, kernel, the versions of `packages`, the time and the load average."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        f"{_cpu_model()}, {os.cpu_count()} cores, Linux {platform.release()}; "
        f"Python {platform.python_version()}, {versions}; "
        f"{now:%Y-%m-%d %H:%M} UTC, load average {load}"
    )


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
