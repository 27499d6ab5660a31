"""Docker and Compose as the tests of the images use them."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from support.metrics import scrape, total

ROOT = Path(__file__).parents[2]
(VERSION,) = re.findall('^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
# Debian's release with this Python, for which pip downloads wheels here.
RELEASES = {(3, 11): "bookworm", (3, 13): "trixie"}
TEST_PYTHON = "pdserve-test-python"
TEST_BUILD_PYTHON = "pdserve-test-build-python"
TEST_PROMETHEUS = "pdserve-test-prometheus"
# Without an index builds need no network but Debian's.
PIP_CONF = "[global]\nno-index = true\nfind-links = /wheels\n"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
DAEMON_START_S = 60.0
BUILD_TIMEOUT_S = 600.0
HEALTHY_TIMEOUT_S = 120.0
POLL_S = 0.2


class Docker:
    """The docker command, for one daemon."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # Debian's own commands fit each other.
        self.environ = {**environ, "PATH": f"/usr/bin:{environ['PATH']}", "DOCKER_BUILDKIT": "1"}

    def __call__(self, *args: str, timeout_s: float = 60.0, stdin: bytes | None = None) -> str:
        """Run `docker ARGS` and return what it prints. Raises AssertionError if it fails."""
        return self.run(["docker", *args], timeout_s=timeout_s, stdin=stdin)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = 60.0,
        stdin: bytes | None = None,
        environ: Mapping[str, str] = {},
    ) -> str:
        """Run a command that speaks to the daemon. Raises AssertionError if it fails."""
        done = subprocess.run(
            command,
            env={**self.environ, **environ},
            cwd=ROOT,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        output = done.stdout.decode(errors="replace").strip()
        assert done.returncode == 0, f"{' '.join(command)}: {output[-4000:]}"
        return output

    def is_up(self) -> bool:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self("info", timeout_s=10.0)
            return True
        return False

    def has_image(self, name: str) -> bool:
        return bool(self("images", "--quiet", name))

    def inspect(self, name: str, field: str) -> str:
        """Return a field of a container or an image, by Docker's template."""
        return self("inspect", "--format", f"{{{{{field}}}}}", name)


@contextlib.contextmanager
def running_daemon(folder: Path) -> Iterator[Docker]:
    """Yield the daemon that runs on this machine, or else one of our own, which leaves nothing."""
    docker = Docker(os.environ)
    if docker.is_up():
        yield docker
        return
    folder.mkdir(parents=True)
    docker = Docker({**os.environ, "DOCKER_HOST": f"unix://{folder}/socket"})
    flags = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    was_forwarding, forward_policy = FORWARDING.read_text(), _forward_policy()
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [
                *("dockerd", "--host", docker.environ["DOCKER_HOST"]),
                *(f"--{flag}={folder / name}" for flag, name in flags.items()),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(docker.is_up, DAEMON_START_S, lambda: (folder / "log").read_text()[-2000:])
        yield docker
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(timeout=60)
        shutil.rmtree(folder)
        _remove_network(was_forwarding, forward_policy)


def _forward_policy() -> str:
    return _run("iptables", "-S", "FORWARD").split()[2]


def _remove_network(was_forwarding: str, forward_policy: str) -> None:
    """Remove what dockerd leaves of its bridge and its rules."""
    _run("ip", "link", "delete", "docker0")
    rules = _run("iptables-save").splitlines(keepends=True)
    others = "".join(line for line in rules if "docker" not in line.lower())
    _run("iptables-restore", stdin=others)
    _run("iptables", "-P", "FORWARD", forward_policy)
    FORWARDING.write_text(was_forwarding)


def _run(*command: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout


def wait_for(
    is_done: Callable[[], bool], timeout_s: float, describe: Callable[[], str] = lambda: ""
) -> None:
    """Raises AssertionError with what `describe` returns if it takes longer."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {describe()}"
        time.sleep(POLL_S)


def build_images(docker: Docker, folder: Path) -> None:
    """Make a base image from Debian, and on it the images, as `make images` does.

    Python packages are downloaded here, with this machine's settings of pip: nothing of those, such
    as the certificate of a registry, gets into an image.
    """
    if not docker.has_image(TEST_PYTHON):
        _import_debian(docker, folder / "debian")
    if not docker.has_image(TEST_BUILD_PYTHON):
        _build_on_debian(docker, folder / "build")
    flags = f"--build-arg PYTHON={TEST_PYTHON} --build-arg BUILD_PYTHON={TEST_BUILD_PYTHON}"
    docker.run(["make", "images", f"BUILD_FLAGS={flags}"], timeout_s=BUILD_TIMEOUT_S)


def build_prometheus(docker: Docker) -> None:
    """Make an image with Debian's Prometheus that is started like Prometheus' own."""
    dockerfile = (
        f"FROM {TEST_PYTHON}\n"
        "RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus"
        " && install -d -o 65534 -g 65534 /prometheus\n"
        'USER 65534\nENTRYPOINT ["prometheus"]\n'
    )
    docker(
        *("build", "--quiet", "--tag", TEST_PROMETHEUS, "-"),
        stdin=dockerfile.encode(),
        timeout_s=BUILD_TIMEOUT_S,
    )


def _import_debian(docker: Docker, folder: Path) -> None:
    release = RELEASES[sys.version_info[:2]]
    packages = "--include=python3,python3-venv,ca-certificates"
    docker.run(
        ["debootstrap", "--variant=minbase", packages, release, str(folder)],
        timeout_s=BUILD_TIMEOUT_S,
    )
    with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(
            ["docker", "import", "-", TEST_PYTHON],
            env=docker.environ,
            stdin=tar.stdout,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
    shutil.rmtree(folder)


def _build_on_debian(docker: Docker, folder: Path) -> None:
    wheels = folder / "wheels"
    download = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={wheels}"]
    what = ["-c", "constraints.txt", "torch", "hatchling", ".[router,worker]"]
    docker.run([*download, *what], timeout_s=BUILD_TIMEOUT_S)
    (folder / "pip.conf").write_text(PIP_CONF)
    (folder / "Dockerfile").write_text(
        f"FROM {TEST_PYTHON}\nCOPY pip.conf /etc/pip.conf\nCOPY wheels /wheels\n"
    )
    docker("build", "--quiet", "--tag", TEST_BUILD_PYTHON, str(folder), timeout_s=BUILD_TIMEOUT_S)
    shutil.rmtree(folder)


class Stack:
    """The services of compose.yaml."""

    def __init__(self, docker: Docker, *, project: str, environ: Mapping[str, str]) -> None:
        self.docker = docker
        self.network = f"{project}_default"
        self._project = project
        self._environ = {"COMPOSE_PROJECT_NAME": project, **environ}

    def compose(self, *args: str, timeout_s: float = 60.0) -> str:
        """Run `docker-compose ARGS` and return what it prints."""
        return self.docker.run(
            ["docker-compose", *args], timeout_s=timeout_s, environ=self._environ
        )

    def up(self, *args: str) -> None:
        """Start what is missing, and replace nothing."""
        self.compose("up", "--detach", "--no-recreate", *args, timeout_s=HEALTHY_TIMEOUT_S)

    def down(self) -> None:
        self.compose("--profile=monitoring", "down", "--volumes", timeout_s=120.0)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers, the newest first."""
        labels = {"project": self._project, "service": service}
        filters = (f"--filter=label=com.docker.compose.{k}={v}" for k, v in labels.items())
        return self.docker("ps", "--quiet", *filters).split()

    def scale(self, service: str, count: int) -> list[str]:
        """Have so many containers of a service, at least; return their ids once they are healthy,
        the newest first.
        """
        self.up("--no-deps", f"--scale={service}={count}", service)
        containers = self.containers(service)
        for container in containers:
            self.wait_until_healthy(container)
        return containers

    def wait_until_healthy(self, container: str) -> None:
        def is_healthy() -> bool:
            return self.docker.inspect(container, ".State.Health.Status") == "healthy"

        wait_for(is_healthy, HEALTHY_TIMEOUT_S, lambda: self.docker("logs", container)[-2000:])

    def remove(self, container: str) -> int:
        """Stop a container as Compose does, remove it, and return its exit status."""
        self.docker("stop", "--time=45", container)
        status = int(self.docker.inspect(container, ".State.ExitCode"))
        self.docker("rm", "--volumes", container)
        return status

    def kill(self, container: str) -> None:
        """SIGKILL by somebody else than Docker: one that Docker kills it does not restart."""
        os.kill(int(self.docker.inspect(container, ".State.Pid")), signal.SIGKILL)

    def num_restarts(self, container: str) -> int:
        return int(self.docker.inspect(container, ".RestartCount"))

    def published(self, container: str, port: int) -> str:
        """Return host:port here of a container's port."""
        return self.docker("port", container, str(port)).splitlines()[0]

    def metrics(self, container: str) -> dict[str, float]:
        """Return a process's samples, by name with labels."""
        address = self.docker.inspect(
            container, f'(index .NetworkSettings.Networks "{self.network}").IPAddress'
        )
        return scrape(f"http://{address}:9090/metrics", timeout_s=5)

    def total(self, container: str, name: str) -> float:
        """Return a metric's sum over its labels."""
        return total(self.metrics(container), name)

    def wait_for_workers(self, router: str, *, prefill: int, decode: int) -> None:
        """Wait until a router uses so many workers, and every pair of them."""
        wanted = {
            'pdserve_workers{role="prefill",state="ready"}': prefill,
            'pdserve_workers{role="decode",state="ready"}': decode,
            'pdserve_worker_pairs{state="proven"}': prefill * decode,
        }

        def found() -> dict[str, float]:
            samples = self.metrics(router)
            return {sample: samples.get(sample, 0) for sample in wanted}

        wait_for(lambda: found() == wanted, HEALTHY_TIMEOUT_S, lambda: str(found()))


@contextlib.contextmanager
def running_stack(
    docker: Docker, services: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Stack]:
    """Start services with what they depend on, on free ports; yield when the router is ready, and
    remove all of it in the end.
    """
    # Two routers at a time have two of the ports.
    first = random.randrange(20000, 30000)
    ports = {
        "PDSERVE_HTTP_PORT": f"{first}-{first + 1}",
        "PDSERVE_GRPC_PORT": f"{first + 2}-{first + 3}",
        "PROMETHEUS_PORT": str(first + 4),
    }
    stack = Stack(docker, project=f"pdserve-test-{first}", environ={**ports, **environ})
    try:
        stack.up(*services)
        stack.scale("router", 1)
        yield stack
    finally:
        stack.down()
