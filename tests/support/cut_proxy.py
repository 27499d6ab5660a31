"""A TCP proxy whose connections break when a test says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class CutProxy:
    """Passes bytes on to a port of this machine until it is cut; then it refuses connections."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: set[asyncio.Task[None]] = set()
        self.address = ""
        self.num_accepted = 0

    @property
    def has_connections(self) -> bool:
        return bool(self._tasks)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())

    def redirect(self, target_port: int) -> None:
        """Pass the next connections on to another port; those that are open stay where they are."""
        self._target_port = target_port

    def cut(self) -> None:
        """Reset all connections: what is under way is lost."""
        assert self._server is not None
        self._server.close()
        self.reset()

    def reset(self) -> None:
        """Reset all connections; new ones can be had."""
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self, *, only_answers: bool = False) -> None:
        """Pass nothing on any more over what is open, and tell nobody."""
        for task in list(self._answers if only_answers else self._tasks):
            task.cancel()

    async def stop(self) -> None:
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        target = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, target[1]}
        for source, sink in ((reader, target[1]), (target[0], writer)):
            task = asyncio.create_task(_pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    # Either side may be gone at any time; then so is the other.
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.transport.abort()


@contextlib.asynccontextmanager
async def cut_proxies(target_port: int, count: int) -> AsyncIterator[list[CutProxy]]:
    """Run some proxies for one port."""
    proxies = [CutProxy(target_port) for _ in range(count)]
    try:
        for proxy in proxies:
            await proxy.start()
        yield proxies
    finally:
        for proxy in proxies:
            await proxy.stop()
