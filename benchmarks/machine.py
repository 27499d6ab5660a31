"""What a benchmark ran on, for the line above its table."""

import datetime
import os
import platform
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


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
