"""A router in this process over fake workers."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as inference_grpc
from pdserve_router.api.http.server import HttpServer
from pdserve_router.server import RouterServer
from pdserve_router.workers.clients.attach_client import LinkTimings
from support.fake_worker import FakeWorker
from support.waiting import until

ANSWER_TEXT = "hello world, the quick fox"
# A busy machine is no silent worker: tests of silence have a shorter time of their own.
TIMINGS = LinkTimings(heartbeat_s=0.1, dead_after_s=20.0, min_backoff_s=0.02, max_backoff_s=0.1)


class NoMetricsServer:
    """The real one takes half a second to close; test_server has it."""

    port = 0

    def __init__(
        self, host: str, port: int, registry: object, *, probes: object, on_limit: object
    ) -> None:
        pass

    def close(self) -> None:
        pass


class WatchedHttpServer(HttpServer):
    """The real one, and what it is at."""

    @property
    def connections(self) -> set[Any]:
        """Uvicorn's protocols of open connections."""
        assert self._server is not None
        return self._server.server_state.connections

    @property
    def tasks(self) -> set[Any]:
        """Of requests that are answered."""
        assert self._server is not None
        return self._server.server_state.tasks

    def shrink_send_buffers(self) -> None:
        """The kernel would take megabytes before a writer notices anything."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


class QuickHttpServer(WatchedHttpServer):
    """Closes without uvicorn's pauses, a fifth of a second together; tests of how it closes ask for
    the real one.
    """

    async def close(self, *, grace_s: float) -> None:
        assert self._server is not None
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        for server in self._server.servers:
            server.close()
        for connection in list(self.connections):
            connection.shutdown()
        await until(lambda: not self.connections and not self.tasks)


class NoHttpServer:
    """For tests without HTTP."""

    port = 0

    def __init__(self, *args: object) -> None:
        pass

    def start(self, app: object) -> None:
        pass

    def cut(self, scope: object) -> None:
        pass

    def stop_accepting(self) -> None:
        pass

    async def close(self, *, grace_s: float) -> None:
        pass


class Stack:
    """A router and its workers."""

    def __init__(
        self,
        server: RouterServer,
        prefills: list[FakeWorker],
        decodes: list[FakeWorker],
        channel: grpc.aio.Channel,
        http: Any,
        api: httpx.AsyncClient,
    ) -> None:
        self.server = server
        self.http = http
        # A client of its HTTP port.
        self.api = api
        self.prefills = prefills
        self.decodes = decodes
        self.channel = channel
        self.stub: Any = inference_grpc.InferenceServiceStub(channel)
        self.url = f"http://127.0.0.1:{server.http_port}"

    @property
    def prefill(self) -> FakeWorker:
        return self.prefills[0]

    @property
    def decode(self) -> FakeWorker:
        return self.decodes[0]

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefills, *self.decodes]

    def metric(self, name: str, **labels: str) -> float:
        return self.server.registry.get_sample_value(name, labels) or 0.0

    async def generate(
        self, request: pb2.GenerateRequest, *, timeout: float | None = 30
    ) -> list[pb2.RequestOutput]:
        """Return a request's outputs, of which only the last is the end."""
        call = self.stub.Generate(request, timeout=timeout)
        outputs: list[pb2.RequestOutput] = [response.output async for response in call]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return outputs

    async def assert_idle(self) -> None:
        """No request is left anywhere."""
        await until(lambda: self.server.router.num_in_flight == 0)
        await until(lambda: all(worker.num_running == 0 for worker in self.workers))
        assert self.metric("pdserve_requests_in_flight") == 0
        assert self.server.router.num_queued == 0
        clients = (*self.server.pool.prefill, *self.server.pool.decode)
        await until(lambda: all(client.num_in_flight == 0 for client in clients))


# Its labels are what clients make up.
UNFORESEEN = "pdserve_http_unknown_fields_total"


def counters(server: RouterServer) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """All series that count, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in server.registry.collect()
        if family.type == "counter"
        for sample in family.samples
        if sample.name.endswith("_total") and sample.name != UNFORESEEN
    }


def parts_of(outputs: Sequence[pb2.RequestOutput], index: int = 0) -> list[pb2.CompletionOutput]:
    """What came of one completion."""
    return [part for output in outputs for part in output.outputs if part.index == index]


def tokens_of(outputs: Sequence[pb2.RequestOutput], index: int = 0) -> list[int]:
    return [token_id for part in parts_of(outputs, index) for token_id in part.token_ids]


def text_of(outputs: Sequence[pb2.RequestOutput], index: int = 0) -> str:
    return "".join(part.text for part in parts_of(outputs, index))


def events_of(text: str) -> list[Any]:
    """What the events of a stream say, which ends as it should."""
    *events, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def replace_file(path: Path, content: str | bytes) -> None:
    """Change a file as operators do: nobody reads half of it."""
    new = path.with_suffix(".new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.replace(path)


StartStack = Callable[..., "contextlib.AbstractAsyncContextManager[Stack]"]


def sources(wanted: int | Sequence[str], fakes: Sequence[FakeWorker]) -> tuple[str, ...]:
    return tuple(fake.address for fake in fakes) if isinstance(wanted, int) else tuple(wanted)
