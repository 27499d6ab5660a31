"""A router in this process over fake workers, a small tokenizer, and a check that no task leaks."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc
import httpx
import openai
import pytest

sys.path.append(str(Path(__file__).parent))  # test modules import edge_jobs and raw_http2

from fake_model import make_model_dir

from pdserve_common.types.engine import WorkerRole
from pdserve_router.api.http.body import BODY_TIMEOUT_S
from pdserve_router.api.large_requests import processes as edge_processes
from pdserve_router.config import RouterConfig
from pdserve_router.server import CLOSE_GRACE_S, RouterServer
from pdserve_router.text.tokenizer import Tokenizer
from support.crew import Crew
from support.fake_worker import EOS, FakeWorker
from support.router_stack import (
    ANSWER_TEXT,
    TIMINGS,
    NoHttpServer,
    NoMetricsServer,
    QuickHttpServer,
    Stack,
    StartStack,
    WatchedHttpServer,
    counters,
    sources,
)
from support.waiting import until

LORA_REQUESTS = "pdserve_lora_requests_total"


@pytest.fixture(autouse=True)
def patient_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tokenizes large requests starts as late as a busy machine lets it."""
    monkeypatch.setattr(edge_processes, "START_TIMEOUT_S", 600.0)


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


@pytest.fixture
def start_stack(
    model_dir: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> StartStack:
    """async with start_stack(prefill=1, decode=1, answer="text", **config) as stack; instead of
    how many there are, `prefill` and `decode` may be where a router finds those of the test.
    No request may be left at its end.
    """
    monkeypatch.setattr("pdserve_router.server.MetricsServer", NoMetricsServer)

    @contextlib.asynccontextmanager
    async def start(
        *,
        prefill: int | Sequence[str] = 1,
        decode: int | Sequence[str] = 1,
        answer: str | Sequence[int] = ANSWER_TEXT,
        wait: bool = True,
        http: bool | type[WatchedHttpServer] = False,
        info: dict[str, object] | Callable[[WorkerRole, int], dict[str, object]] | None = None,
        channel_options: Sequence[tuple[str, object]] = (),
        body_timeout_s: float = BODY_TIMEOUT_S,
        close_grace_s: float = CLOSE_GRACE_S,
        **config: object,
    ) -> AsyncIterator[Stack]:
        if isinstance(http, bool):
            http = QuickHttpServer if http else NoHttpServer
        servers = []

        def make_server(*args: object) -> object:
            servers.append(http(*args))
            return servers[-1]

        monkeypatch.setattr("pdserve_router.server.HttpServer", make_server)
        tokens = tokenizer.backend.encode(answer).ids if isinstance(answer, str) else answer

        def worker(role: WorkerRole, number: int) -> FakeWorker:
            fields: dict[str, object] = {
                "engine_id": f"{role.name.lower()}-{number}",
                "vocab_size": tokenizer.vocab_size,
                **(info(role, number) if callable(info) else info or {}),
            }
            return FakeWorker(role, answer=tokens, **fields)

        def workers(role: WorkerRole, wanted: int | Sequence[str]) -> list[FakeWorker]:
            return [worker(role, i) for i in range(wanted)] if isinstance(wanted, int) else []

        prefills, decodes = workers(WorkerRole.PREFILL, prefill), workers(WorkerRole.DECODE, decode)
        async with contextlib.AsyncExitStack() as stack:
            for fake in (*prefills, *decodes):
                await fake.start()
                stack.push_async_callback(fake.close)
            defaults: dict[str, object] = {
                "model": str(model_dir),
                "host": "127.0.0.1",
                "grpc_port": 0,
                "http_port": 0,
                "metrics_port": 0,
            }
            server = RouterServer(
                RouterConfig(
                    prefill=sources(prefill, prefills),
                    decode=sources(decode, decodes),
                    **{**defaults, **config},
                ),
                timings=TIMINGS,
                body_timeout_s=body_timeout_s,
                close_grace_s=close_grace_s,
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
            # Certificates of authorities take 30 ms to read, and nobody needs them here.
            url = f"http://127.0.0.1:{server.http_port}"
            api = httpx.AsyncClient(base_url=url, timeout=300, verify=False)
            await stack.enter_async_context(api)
            begun = counters(server)
            running = Stack(server, prefills, decodes, channel, *servers, api)
            yield running
            await running.assert_idle()
            # Those of adapters begin when workers tell of them.
            born = {each for each in counters(server) - begun if each[0] != LORA_REQUESTS}
            assert not born, f"rates miss the first sample of {born}: `begin` them"

    return start


@pytest.fixture
async def stack(request: pytest.FixtureRequest, start_stack: StartStack) -> AsyncIterator[Stack]:
    """One router, one prefill and one decode worker, or what the test's module has in STACK."""
    async with start_stack(**getattr(request.module, "STACK", {})) as stack:
        yield stack


@pytest.fixture
async def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crew]:
    """Fake workers that join and leave: `start_stack(wait=False, **crew.sources)`."""
    monkeypatch.setattr("pdserve_router.workers.discovery.FileSource.interval_s", 0.02)
    crew = Crew(tmp_path)
    yield crew
    for worker in crew.workers:
        await worker.close()


@pytest.fixture
def http(stack: Stack) -> httpx.AsyncClient:
    """A client of the stack's HTTP port."""
    return stack.api


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of the stack, which is to hide no failure."""
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1",
        api_key="unused",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    ) as client:
        yield client
