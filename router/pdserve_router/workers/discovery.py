"""Where a router's workers are: addresses given, behind a DNS name, or in a file."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol
from urllib.parse import urlsplit

from prometheus_client import Counter

from pdserve_common.observability import defects
from pdserve_common.rpc.addresses import join_address
from pdserve_common.types.engine import WorkerRole

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
SOURCES = "host:port, dns://name:port or file:///path"


class Source(Protocol):
    """A list of addresses that may change."""

    @property
    def interval_s(self) -> float:
        """How often to ask."""

    async def addresses(self) -> tuple[str, ...]:
        """Return host:port of each worker. Raises OSError or ValueError if that is not known."""


@dataclass(frozen=True, slots=True)
class DnsSource:
    """All addresses of a name."""

    name: str
    port: int
    interval_s: ClassVar[float] = 5.0

    async def addresses(self) -> tuple[str, ...]:
        # The system's resolver has deadlines of its own.
        found = await asyncio.get_running_loop().getaddrinfo(
            self.name, self.port, type=socket.SOCK_STREAM
        )
        return tuple(sorted(join_address(str(address[0]), self.port) for *_, address in found))

    def __str__(self) -> str:
        return f"dns://{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file with one host:port a line; empty lines and those that begin with # do not count. Write
    another file and rename it: half a list would be taken for the list.
    """

    path: Path
    interval_s: ClassVar[float] = 1.0

    async def addresses(self) -> tuple[str, ...]:
        text = await asyncio.to_thread(_read, self.path)
        lines = (line.strip() for line in text.splitlines())
        return tuple(check_address(line) for line in lines if line and not line.startswith("#"))

    def __str__(self) -> str:
        return f"file://{self.path}"


def parse_sources(entries: Sequence[str]) -> tuple[tuple[str, ...], tuple[Source, ...]]:
    """Return the addresses among `entries`, each once, and the sources to ask for more. Raises
    ValueError for an entry that is neither.
    """
    sources = {entry: _parse_source(entry) for entry in entries if "://" in entry}
    static = dict.fromkeys(check_address(entry) for entry in entries if entry not in sources)
    return tuple(static), tuple(sources.values())


def check_address(address: str) -> str:
    """Return `address`. Raises ValueError unless it is host:port."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) <= 65535):
        raise ValueError(f"worker address must be host:port, got {address!r}")
    return address


def _parse_source(entry: str) -> Source:
    parts = urlsplit(entry)
    if parts.scheme == "dns":
        check_address(parts.netloc)
        name, _, port = parts.netloc.rpartition(":")
        return DnsSource(name, int(port))
    if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1:
        return FileSource(Path(parts.path))
    raise ValueError(f"workers must be {SOURCES}, got {entry!r}")


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    return data.decode()


class Discovery:
    """Asks the sources of one role again and again, and tells when their list has changed. A source
    that cannot answer keeps its last list: losing the resolver must not lose the workers.
    """

    def __init__(
        self,
        role: WorkerRole,
        entries: Sequence[str],
        *,
        on_addresses: Callable[[WorkerRole, tuple[str, ...]], None],
        errors: Counter,
    ) -> None:
        """`on_addresses` gets all addresses of the role, each once. Raises ValueError for an entry
        that is no source.
        """
        self.static, self._sources = parse_sources(entries)
        self._role = role
        self._on_addresses = on_addresses
        self._errors = errors.labels(role=role.name.lower())
        self._found: dict[Source, tuple[str, ...]] = {}
        self._problems: dict[Source, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            defects.keep_running(
                "discovery",
                partial(self._follow, source),
                costs=f"a look at {source}",
                pause_s=source.interval_s,
            )
            for source in self._sources
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, source: Source) -> None:
        while True:
            await self._ask(source)
            await asyncio.sleep(source.interval_s)

    async def _ask(self, source: Source) -> None:
        try:
            addresses = await source.addresses()
        except (OSError, ValueError) as error:
            self._errors.inc()
            if self._problems.get(source) != str(error):
                logger.warning("%s: %s; its last list stays", source, error)
            self._problems[source] = str(error)
            return
        self._problems.pop(source, None)
        if addresses != self._found.get(source):
            logger.info("%s lists %s", source, ", ".join(addresses) or "no workers")
            found = {**self._found, source: addresses}
            every = (*self.static, *(a for each in found.values() for a in each))
            self._on_addresses(self._role, tuple(dict.fromkeys(every)))
            self._found = found  # told, or it is told again
