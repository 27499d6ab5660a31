"""A router in this process over fake workers, a small tokenizer, and a check that no task leaks."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_model import make_model_dir

from pdserve.v1 import inference_service_pb2_grpc as inference_grpc
from pdserve_common.engine_types import WorkerRole
from pdserve_router.api.http_server import HttpServer
from pdserve_router.config import RouterConfig
from pdserve_router.server import RouterServer
from pdserve_router.text.tokenizer import Tokenizer
from pdserve_router.workers.attach_client import LinkTimings
from support.crew import Crew
from support.fake_worker import EOS, FakeWorker

ANSWER_TEXT = "hello world, the quick fox"
# A busy machine is no silent worker: tests of silence have a shorter time of their own.
TIMINGS = LinkTimings(heartbeat_s=0.1, dead_after_s=20.0, min_backoff_s=0.02, max_backoff_s=0.1)


@pytest.fixture(autouse=True)
async def no_task_leaks() -> AsyncIterator[None]:
    """Every test must leave the event loop as empty as it found it."""
    before = asyncio.all_tasks()
    yield

    def left() -> set[asyncio.Task[object]]:
        return asyncio.all_tasks() - before - {asyncio.current_task()}

    try:
        await until(lambda: not left())
    except AssertionError:
        raise AssertionError(f"tasks left: {left()}") from None


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model_dir(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(str(model_dir))
    assert tokenizer.backend.token_to_id("<|eos|>") == EOS
    yield tokenizer
    tokenizer.close()


class Stack:
    """A router and its workers."""

    def __init__(self, server: RouterServer, prefills: list, decodes: list, channel) -> None:
        self.server = server
        self.prefills: list[FakeWorker] = prefills
        self.decodes: list[FakeWorker] = decodes
        self.channel = channel
        self.stub = inference_grpc.InferenceServiceStub(channel)
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


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for something that is about to become true, on a machine however busy."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "timed out"
        await asyncio.sleep(0.005)


def replace_file(path: Path, content: str | bytes) -> None:
    """Change a file as operators do: nobody reads half of it."""
    new = path.with_suffix(".new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.replace(path)


StartStack = Callable[..., "contextlib.AbstractAsyncContextManager[Stack]"]


def _sources(wanted: int | Sequence[str], fakes: Sequence[FakeWorker]) -> tuple[str, ...]:
    return tuple(fake.address for fake in fakes) if isinstance(wanted, int) else tuple(wanted)


class NoMetricsServer:
    """The real one takes half a second to close; test_server has it."""

    port = 0

    def __init__(
        self, host: str, port: int, registry: object, *, probes: object, on_limit: object
    ) -> None:
        pass

    def close(self) -> None:
        pass


class QuickHttpServer(HttpServer):
    """Closes without uvicorn's pauses, a fifth of a second together; tests of how it closes ask for
    the real one.
    """

    async def close(self, *, grace_s: float) -> None:
        assert self._server is not None
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        state = self._server.server_state
        for server in self._server.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        await until(lambda: not state.connections and not state.tasks)


class NoHttpServer:
    """For tests without HTTP."""

    port = 0

    def __init__(self, host: str, port: int, context: object, connections: object) -> None:
        pass

    def start(self, app: object) -> None:
        pass

    def cut(self, scope: object) -> None:
        pass

    def stop_accepting(self) -> None:
        pass

    async def close(self, *, grace_s: float) -> None:
        pass


@pytest.fixture
def start_stack(
    model_dir: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> StartStack:
    """async with start_stack(prefill=1, decode=1, answer="text", **config) as stack; instead of
    how many there are, `prefill` and `decode` may be where a router finds those of the test.
    """
    monkeypatch.setattr("pdserve_router.server.MetricsServer", NoMetricsServer)

    @contextlib.asynccontextmanager
    async def start(
        *,
        prefill: int | Sequence[str] = 1,
        decode: int | Sequence[str] = 1,
        answer: str | Sequence[int] = ANSWER_TEXT,
        wait: bool = True,
        http: bool | type[HttpServer] = False,
        info: dict[str, object] | None = None,
        channel_options: Sequence[tuple[str, object]] = (),
        **config: object,
    ) -> AsyncIterator[Stack]:
        if isinstance(http, bool):
            http = QuickHttpServer if http else NoHttpServer
        monkeypatch.setattr("pdserve_router.server.HttpServer", http)
        tokens = tokenizer.backend.encode(answer).ids if isinstance(answer, str) else answer

        def worker(role: WorkerRole, number: int) -> FakeWorker:
            fields = {"engine_id": f"{role.name.lower()}-{number}", **(info or {})}
            size = tokenizer.vocab_size
            return FakeWorker(role, vocab_size=size, answer=tokens, **fields)

        def workers(role: WorkerRole, wanted: int | Sequence[str]) -> list[FakeWorker]:
            return [worker(role, i) for i in range(wanted)] if isinstance(wanted, int) else []

        prefills, decodes = workers(WorkerRole.PREFILL, prefill), workers(WorkerRole.DECODE, decode)
        async with contextlib.AsyncExitStack() as stack:
            for fake in (*prefills, *decodes):
                await fake.start()
                stack.push_async_callback(fake.close)
            defaults: dict[str, object] = {
                "host": "127.0.0.1",
                "grpc_port": 0,
                "http_port": 0,
                "metrics_port": 0,
            }
            server = RouterServer(
                RouterConfig(
                    model=str(model_dir),
                    prefill=_sources(prefill, prefills),
                    decode=_sources(decode, decodes),
                    **{**defaults, **config},
                ),
                timings=TIMINGS,
            )
            stack.push_async_callback(server.stop, 0.2)
            await server.start()
            channel = grpc.aio.insecure_channel(
                f"127.0.0.1:{server.grpc_port}", options=list(channel_options)
            )
            stack.push_async_callback(channel.close)
            if wait:
                clients = (*server.pool.prefill, *server.pool.decode)
                await until(lambda: all(client.is_ready for client in clients))
                await until(lambda: server.pool.is_ready)
                unproven = ("pdserve_worker_pairs", {"state": "unproven"})
                await until(lambda: server.registry.get_sample_value(*unproven) == 0)
            begun = counters(server)
            yield Stack(server, prefills, decodes, channel)
            born = counters(server) - begun
            assert not born, f"rates miss the first sample of {born}: `begin` them"

    return start


@pytest.fixture
async def stack(start_stack: StartStack) -> AsyncIterator[Stack]:
    """One router, one prefill and one decode worker; idle again at the end."""
    async with start_stack() as stack:
        yield stack
        await stack.assert_idle()


@pytest.fixture
async def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crew]:
    """Fake workers that join and leave: `start_stack(wait=False, **crew.sources)`."""
    monkeypatch.setattr("pdserve_router.workers.discovery.FileSource.interval_s", 0.02)
    crew = Crew(tmp_path)
    yield crew
    for worker in crew.workers:
        await worker.close()
