"""Every way in which a scheduler gives blocks back: the connector hears of it first, so that it can
fence the session (rule K3). What it does then is tests/kv_transfer/test_producer.py's.
"""

import ast
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.errors import RequestFailedError
from pdserve_engine.core import scheduler
from pdserve_engine.request.request import Request
from pdserve_engine.runner.operate.control import EngineControl
from support.scripted_engine import ON_P, Engine, ScriptedConsumer, ScriptedProducer

# Who gives blocks to the pool, but for D's own, and those that the connector says are free.
FREEING = {
    "RequestContainers.preempt",
    "RequestContainers.finish",
    "InFlight.free",
    "InFlight.free_deferred",
}
FREE = (".kv.free", "_kv.free", "_in_flight.free", ".free_block_ids", ".remove_skipped_blocks")
HARMLESS = {
    # Of sliding windows, what the token after the prompt does not see: P announces none of it.
    "Results._settle_blocks",
    "Results.apply_token",
    # The session is over already, or D has taken its own blocks back: nothing was announced.
    "Planner._admit",
    # What the connector has kept, of sessions that it has ended.
    "KVEvents._apply",
    # D's, after BlocksReturned or `reclaim`.
    "RemotePrefills._free",
    # The request waits for a prefix and has announced nothing; its READs have landed.
    "PrefixPulls._apply",
    "PrefixPulls._stop_waiting",
    # Holds on cached blocks whose sessions are over, or never began.
    "PrefixLoans._give_back",
    # Holds on blocks that were to be copied.
    "Scheduler.cancel_stores",
}


class Witness(ScriptedProducer):
    """Writes down what it is told, and when blocks of the pool are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def watch(self, engine: Engine) -> None:
        free_blocks = engine.pool.free_blocks

        def free(blocks: Iterator[Any]) -> None:
            freed = list(blocks)
            self.events += ["free"] * bool(freed)
            free_blocks(freed)

        engine.pool.free_blocks = free  # type: ignore[method-assign, assignment]
        self.events.clear()

    def on_preempted(self, request: Request) -> None:
        self.events.append("on_preempted")
        super().on_preempted(request)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        self.events.append("request_finished")
        return super().request_finished(request, block_ids)

    def abort_session(self, request_id: str) -> None:
        super().abort_session(request_id)
        if request_id in self.held:
            self.events.append("abort_session")
            self.release(request_id)

    def fence_all(self, reason: str) -> None:
        self.events.append("fence_all")
        super().fence_all(reason)


Drive = Callable[[Engine], object]


def make_running() -> Engine:
    """A request whose first chunk is computed and announced."""
    engine = Engine(producer=Witness(), max_num_batched_tokens=8)
    engine.add("a", [1] * 12, kv_transfer_params=ON_P, deadline=time.monotonic() + 60)
    while not engine.scheduler.running:
        engine.step()
    assert producer_of(engine).announced == {"a": 8}
    return engine


def make_handed_off() -> Engine:
    """A request that is over here but for its session, which keeps its blocks."""
    engine = make_running()
    engine.run()
    assert list(producer_of(engine).held) == ["a"]
    return engine


def producer_of(engine: Engine) -> Witness:
    producer = engine.producer
    assert isinstance(producer, Witness)
    return producer


def fail_a_step(engine: Engine) -> None:
    """The next one that computes anything."""
    num_steps = len(engine.rank.steps)

    def fail(step: object) -> None:
        engine.rank.on_step = lambda step: None
        raise RuntimeError("a passing fault")

    engine.rank.on_step = fail
    while len(engine.rank.steps) == num_steps:
        engine.step()


def supersede(engine: Engine) -> None:
    engine.add("a", [1] * 12, kv_transfer_params=ON_P, attempt=1)


def decode_alone(engine: Engine) -> None:
    """The next attempt needs no D."""
    engine.add("a", [1] * 12, attempt=1, kv_transfer_params=None)


def fail_request(engine: Engine) -> None:
    error = RequestFailedError("cannot be sampled")
    engine.rank.errors["a"] = error.to_engine_error()
    engine.step()


def put_to_sleep(engine: Engine) -> None:
    EngineControl(engine.core).end_sessions()


RUNNING: dict[str, tuple[Drive, str]] = {
    "preempt": (
        lambda e: e.scheduler.containers.preempt(e.scheduler.requests["a"]),
        "on_preempted",
    ),
    "abort": (lambda e: e.core.abort_requests(["a"]), "request_finished"),
    "error": (fail_request, "request_finished"),
    "deadline": (lambda e: e.scheduler.expire_deadlines(math.inf), "request_finished"),
    "failed step": (fail_a_step, "on_preempted"),
    "hand back": (lambda e: e.core.hand_back(), "request_finished"),
    "supersede": (supersede, "request_finished"),
    "supersede, no handoff": (decode_alone, "request_finished"),
}
HANDED_OFF: dict[str, tuple[Drive, str]] = {
    "abort": (lambda e: e.core.abort_requests(["a"]), "abort_session"),
    "hand back": (lambda e: e.core.hand_back(), "fence_all"),
    "sleep": (put_to_sleep, "fence_all"),
}


@pytest.mark.parametrize("path", RUNNING)
def test_a_running_request_is_fenced_before_its_blocks_are_free(path: str) -> None:
    engine = make_running()
    check_order(engine, *RUNNING[path])


@pytest.mark.parametrize("path", HANDED_OFF)
def test_what_was_handed_off_is_fenced_before_its_blocks_are_free(path: str) -> None:
    engine = make_handed_off()
    check_order(engine, *HANDED_OFF[path])
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


def check_order(engine: Engine, path: Drive, told: str) -> None:
    producer = producer_of(engine)
    producer.watch(engine)
    assert engine.pool.num_free_blocks < engine.pool.num_blocks
    path(engine)
    engine.step()
    assert producer.events[0] == told
    assert "free" in producer.events, "this path frees"


def test_a_failed_step_fences_each_request_of_it_before_it_frees_any_block_of_that() -> None:
    producer = Witness()
    engine = Engine(producer=producer, max_num_batched_tokens=32)
    for name in ("a", "b"):
        engine.add(name, [ord(name)] * 12, kv_transfer_params=ON_P)
    producer.watch(engine)
    fail_a_step(engine)
    assert engine.rank.steps[-1].num_scheduled_tokens == {"a": 12, "b": 12}
    assert producer.events == ["on_preempted", "free"] * 2


def test_blocks_under_a_step_in_flight_are_fenced_at_once_and_free_when_it_is_over() -> None:
    engine = make_running()
    producer = producer_of(engine)
    producer.watch(engine)

    def abort(step: object) -> None:
        engine.rank.on_step = lambda step: None
        engine.core.abort_requests(["a"])
        assert producer.events == ["request_finished"]

    engine.rank.on_step = abort
    engine.step()
    assert producer.events == ["request_finished", "free"]


def test_requests_without_a_handoff_are_no_business_of_the_ports() -> None:
    producer, consumer = Witness(), ScriptedConsumer()
    engine = Engine(producer=producer, consumer=consumer, max_num_batched_tokens=8)
    producer.watch(engine)
    engine.add("a", [1] * 12)
    engine.step()
    engine.scheduler.containers.preempt(engine.scheduler.requests["a"])
    engine.run()
    assert set(producer.events) == {"free"}
    assert (consumer.tickets, producer.asked, producer.announced) == ({}, {}, {})


def test_the_paths_above_are_all() -> None:
    """A function of the core that frees blocks and is new here belongs into a test above."""
    found = set()
    for path in Path(scheduler.__file__).parent.rglob("*.py"):
        if path.name in ("block_pool.py", "kv_cache_manager.py"):
            continue
        for owner in ast.walk(ast.parse(path.read_text())):
            if isinstance(owner, ast.ClassDef):
                found |= {
                    f"{owner.name}.{function.name}"
                    for function in owner.body
                    if isinstance(function, ast.FunctionDef) and _frees(function)
                }
    assert found == FREEING | HARMLESS


def _frees(function: ast.FunctionDef) -> bool:
    """Does it call something that gives blocks to the pool?"""
    calls = (n.func for n in ast.walk(function) if isinstance(n, ast.Call))
    names = [ast.unparse(call) for call in calls]
    return any(name.endswith(FREE) for name in names)
