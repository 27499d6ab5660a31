"""The images, built once, and a stack of them."""

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # test modules import containers and under_load

from containers import (
    RELEASES,
    TEST_PROMETHEUS,
    Docker,
    Stack,
    build_images,
    build_prometheus,
    running_daemon,
    running_stack,
)


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """A daemon that has the images."""
    if sys.version_info[:2] not in RELEASES:
        pytest.skip(f"no Debian has Python {sys.version_info.major}.{sys.version_info.minor}")
    if missing := [c for c in ("dockerd", "docker-compose", "debootstrap") if not shutil.which(c)]:
        pytest.skip(f"{', '.join(missing)} missing: `make test-images` installs them")
    folder = tmp_path_factory.mktemp("images")
    with running_daemon(folder / "docker") as daemon:
        started = time.monotonic()
        build_images(daemon, folder)
        print(f"\nimages after {time.monotonic() - started:.0f} s")
        yield daemon


@pytest.fixture(scope="module")
def stack(docker: Docker) -> Iterator[Stack]:
    """One router, one prefill and one decode service, and Prometheus."""
    build_prometheus(docker)
    environ = {"PROMETHEUS_IMAGE": TEST_PROMETHEUS}
    with running_stack(docker, ["router", "prometheus"], environ) as running:
        yield running
