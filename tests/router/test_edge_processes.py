"""Large requests in processes of their own: what goes on there, and what goes wrong."""

import asyncio
import os
import sys
from pathlib import Path

import edge_jobs
import psutil
import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    PdserveError,
)
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.processes import child
from pdserve_common.processes.child import spawn as spawn_anew
from pdserve_router.api.large_requests import processes as edge_processes
from pdserve_router.api.large_requests.processes import NUM_PER_CLIENT, EdgeProcesses, EdgeSettings
from pdserve_router.requests.input.input_processor import InputProcessor
from support.waiting import until

HERE = Path(__file__).parent
TIMEOUT_S = 180


@pytest.fixture(autouse=True)
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other suites fork these processes."""
    monkeypatch.setattr(child, "spawn", spawn_anew)


def settings(model_dir: Path) -> EdgeSettings:
    return EdgeSettings(
        model=str(model_dir),
        router_id="router",
        log_level="error",
        model_name="tiny",
        default_deadline_s=60,
        max_deadline_s=90,
        chat_format="auto",
        share_prefixes=False,
        max_images_per_prompt=8,
    )


class Edge:
    def __init__(self, tokenizer, model_dir: Path, **options: float) -> None:
        processor = InputProcessor(
            tokenizer, model_name="tiny", default_deadline_s=60, max_deadline_s=90
        )
        self.registry = CollectorRegistry()
        metrics = RouterMetrics(self.registry)
        self.processes = EdgeProcesses(processor, settings(model_dir), metrics, **options)

    async def run(self, job, *args, raw=b"", client="a", is_small=False):
        running = self.processes.run(job, raw, *args, client=client, is_small=is_small)
        return await asyncio.wait_for(running, TIMEOUT_S)

    def count(self, outcome: str) -> float | None:
        name = "pdserve_large_requests_total"
        return self.registry.get_sample_value(name, {"outcome": outcome})


@pytest.fixture
async def edge(tokenizer, model_dir, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    edge = Edge(tokenizer, model_dir)
    before = psutil.Process().children()
    yield edge
    await edge.processes.close()
    assert psutil.Process().children() == before


def templates() -> list[psutil.Process]:
    """What is forked, if it was started."""
    children = [child for child in psutil.Process().children() if child.is_running()]
    return [
        child
        for child in children
        if child.cmdline()[1:3] == ["-m", "pdserve_router.api.large_requests.child"]
    ]


def template() -> psutil.Process:
    (process,) = templates()
    return process


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def pid_in(file: Path) -> int:
    await until(file.exists)
    return int(await asyncio.to_thread(file.read_text))


async def test_a_small_request_is_done_here_and_a_large_one_elsewhere(edge) -> None:
    raw = b"x" * 100_000
    assert await edge.run(edge_jobs.report, raw=raw, is_small=True) == (os.getpid(), len(raw))
    assert not templates(), "nothing is started for small ones"
    raw = b"x" * (16 << 20)
    first, second = [await edge.run(edge_jobs.report, raw=raw) for _ in range(2)]
    assert first[1] == second[1] == len(raw)
    assert len({first[0], second[0], os.getpid(), template().pid}) == 4
    assert edge.count("done") == 2


@pytest.mark.parametrize("job", [edge_jobs.many, edge_jobs.many_within])
async def test_others_have_their_turns_while_many_inputs_are_taken_over(
    edge, monkeypatch, job
) -> None:
    monkeypatch.setattr(edge_jobs.SlowInput, "turns", [])

    async def count_turns() -> None:
        while True:
            edge_jobs.SlowInput.turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    answer = await edge.run(job, 5)
    counting.cancel()
    inputs = answer.inputs if job is edge_jobs.many_within else answer[0]
    assert len(inputs) == 5
    turns = edge_jobs.SlowInput.turns
    assert len(turns) == len(set(turns)) == 5, "each once, and in a turn of its own"


async def test_what_is_forked_has_one_thread(edge) -> None:
    await edge.run(edge_jobs.report)
    assert template().num_threads() == 1


async def test_a_refusal_is_the_same_in_either_place(edge) -> None:
    for is_small in (True, False):
        with pytest.raises(InvalidRequestError, match=r"^it is refused$") as caught:
            await edge.run(edge_jobs.refuse, "prompt", is_small=is_small)
        assert caught.value.field == "prompt"


async def test_a_defect_is_told_with_where_it_was(edge) -> None:
    with pytest.raises(RuntimeError, match=r"edge_jobs.py(.|\n)*KeyError: 'a defect'"):
        await edge.run(edge_jobs.fail)
    assert (await edge.run(edge_jobs.report))[0] != os.getpid()


async def test_a_crash_fails_one_request_only(edge, tmp_path) -> None:
    go_on = tmp_path / "go-on"
    beside = asyncio.create_task(edge.run(edge_jobs.wait, str(go_on)))
    with pytest.raises(PdserveError, match="ended early") as caught:
        await edge.run(edge_jobs.crash)
    assert type(caught.value) is PdserveError
    go_on.touch()
    assert await beside == "waited"
    assert (edge.count("crashed"), edge.count("done")) == (1, 1)


async def test_one_that_needs_too_much_memory_is_refused(edge) -> None:
    assert await edge.run(edge_jobs.allocate, 1 << 20) == 1 << 20
    limit = edge_processes.MAX_MEMORY_BYTES
    with pytest.raises(InvalidRequestError, match=f"of 3 bytes needs more than {limit} bytes"):
        await edge.run(edge_jobs.allocate, 2 * limit, raw=b"abc")


async def test_those_of_one_client_that_hang_end_and_do_not_hold_up_others(
    tokenizer, model_dir, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setattr(edge_processes, "JOB_TIMEOUT_S", 3.0)
    edge = Edge(tokenizer, model_dir)
    await edge.run(edge_jobs.report)
    files = [tmp_path / str(i) for i in range(NUM_PER_CLIENT + 1)]
    hanging = [asyncio.create_task(edge.run(edge_jobs.hang, str(file))) for file in files]
    pids = [await pid_in(file) for file in files[:NUM_PER_CLIENT]]
    assert not files[-1].exists(), "it has its turn when one of the others ends"
    assert (await edge.run(edge_jobs.report, client="b"))[1] == 0
    results = await asyncio.gather(*hanging, return_exceptions=True)
    assert [type(result) for result in results] == [DeadlineExceededError] * len(files)
    assert "takes more than 3 s" in str(results[0])
    assert all(map(is_gone, pids))
    assert edge.count("timeout") == len(files)
    await edge.processes.close()


async def test_one_that_gets_no_turn_is_refused(edge, monkeypatch, tmp_path) -> None:
    go_on = tmp_path / "go-on"
    waiting = [
        asyncio.create_task(edge.run(edge_jobs.wait, str(go_on))) for _ in range(NUM_PER_CLIENT)
    ]
    await until(templates)
    await until(lambda: len(template().children()) == NUM_PER_CLIENT)
    monkeypatch.setattr(edge_processes, "QUEUE_TIMEOUT_S", 0.05)
    with pytest.raises(OverloadedError, match=r"waited 0\.05 s to be tokenized") as caught:
        await edge.run(edge_jobs.report)
    assert caught.value.retry_after_ms
    assert edge.count("refused") == 1
    go_on.touch()
    assert await asyncio.gather(*waiting) == ["waited"] * NUM_PER_CLIENT


async def test_one_whose_client_has_left_ends_and_gives_its_slot_back(edge, tmp_path) -> None:
    for name in map(str, range(NUM_PER_CLIENT + 1)):
        file = tmp_path / name
        running = asyncio.create_task(edge.run(edge_jobs.hang, str(file)))
        pid = await pid_in(file)
        running.cancel()
        await asyncio.wait([running])
        await until(lambda pid=pid: is_gone(pid))
    assert edge.count("abandoned") == NUM_PER_CLIENT + 1
    assert (await edge.run(edge_jobs.report))[1] == 0


async def test_when_the_process_that_is_copied_ends_another_one_is_started(
    tokenizer, model_dir, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    edge = Edge(tokenizer, model_dir, restart_after_s=0.0)
    await edge.run(edge_jobs.report)
    first = template()
    first.kill()
    await until(lambda: is_gone(first.pid))
    assert (await edge.run(edge_jobs.report))[1] == 0
    assert template().pid != first.pid
    await edge.processes.close()


async def test_one_that_cannot_start_is_not_tried_for_every_request(edge, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(OverloadedError, match="no process can be started"):
        await edge.run(edge_jobs.report)
    with pytest.raises(OverloadedError, match="are being restarted") as caught:
        await edge.run(edge_jobs.report)
    assert caught.value.retry_after_ms


PARENT = """
import asyncio, sys
import edge_jobs
from prometheus_client import CollectorRegistry
from pdserve_common.metrics.services import RouterMetrics
from pdserve_router.api.large_requests.processes import EdgeProcesses, EdgeSettings, fork_template

settings = EdgeSettings(
    model=sys.argv[1], router_id="r", log_level="error", model_name="tiny",
    default_deadline_s=60, max_deadline_s=90, chat_format="auto",
    share_prefixes=False, max_images_per_prompt=8,
)

async def main(template):
    edge = EdgeProcesses(None, settings, RouterMetrics(CollectorRegistry()))
    if template is not None:
        edge.start(template)
    await edge.run(edge_jobs.hang, b"", sys.argv[2], client="a", is_small=False)

asyncio.run(main(fork_template(settings) if sys.argv[3] == "forked" else None))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's death")
@pytest.mark.parametrize("template", ["started", "forked"])
async def test_none_outlives_the_router(model_dir, tmp_path, template) -> None:
    file = tmp_path / "pid"
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(model_dir), str(file), template),
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    try:
        pid = await pid_in(file)
        left = [child.pid for child in psutil.Process(router.pid).children(recursive=True)]
        assert pid in left
    finally:
        router.kill()
        await router.wait()
    await until(lambda: all(map(is_gone, left)))
