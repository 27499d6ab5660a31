"""A worker proves itself before it serves: with real engines, and with ones that fail."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.processes.calls import Call
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    FinishReason,
    PrefillStats,
    WorkerRole,
)
from pdserve_common.types.engine_client import NO_TENSORS, Tensors
from pdserve_common.types.verbs import ResetPrefixCache
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.config import EngineConfig
from pdserve_worker.self_check import SelfCheckError, check_engine
from support.engine_double import EngineDouble
from support.fake_worker import engine_info

INFO = engine_info(WorkerRole.DECODE, vocab_size=50, max_model_len=100, max_num_batched_tokens=512)
OUT_OF_MEMORY = EngineError(code=ErrorCode.INTERNAL, message="out of memory")


class ScriptedEngine(EngineDouble):
    """Answers at once what the test says: tokens, how many were cached, an error."""

    def __init__(self, *answers: tuple[tuple[int, ...], int, EngineError | None]) -> None:
        super().__init__(INFO)
        self.is_cache_reset = False
        self._answers = list(answers)

    def add_request(self, request: EngineCoreRequest, tensors: Tensors = NO_TENSORS) -> None:
        if not self._answers:
            return  # hangs
        token_ids, num_cached, error = self._answers.pop(0)
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=token_ids,
            finish_reason=FinishReason.LENGTH if error is None else FinishReason.ERROR,
            error=error,
            prefill_stats=PrefillStats(
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=num_cached,
                queue_s=0,
                prefill_s=0,
            ),
        )
        self.emit(output)

    async def call(self, verb: Call[Any]) -> int:
        self.is_cache_reset = verb == ResetPrefixCache(keeps_tiers=True)
        return 0


async def check(engine: Any, timeout_s: float = 60.0) -> None:
    await check_engine(engine, timeout_s=timeout_s)


GOOD = ((5, 6, 7, 8), 0, None)
CACHED = ((5, 6, 7, 8), 48, None)


async def test_the_same_tokens_twice_are_a_proof() -> None:
    engine = ScriptedEngine(GOOD, CACHED)
    await check(engine)
    assert engine.is_cache_reset
    engine = ScriptedEngine(GOOD, GOOD)
    engine.info = dataclasses.replace(INFO, has_prefix_caching=False)
    await check(engine)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([((), 0, OUT_OF_MEMORY)], "the self-check failed: out of memory"),
        ([GOOD, ((), 0, OUT_OF_MEMORY)], "the self-check failed: out of memory"),
        ([((5, 6, 7), 0, None)], r"3 tokens came instead of 4"),
        ([GOOD, ((5, 6, 7, 9), 48, None)], r"\(5, 6, 7, 8\) and then \(5, 6, 7, 9\)"),
        ([GOOD, GOOD], "not found in the prefix cache"),
    ],
)
async def test_anything_else_is_a_refusal_that_says_what_failed(
    answers: list[Any], message: str
) -> None:
    with pytest.raises(SelfCheckError, match=message):
        await check(ScriptedEngine(*answers))


@pytest.mark.parametrize("answers", [[], [GOOD]])
async def test_an_engine_that_hangs_is_a_refusal(answers: list[Any]) -> None:
    message = r"took more than 0.1 s: raise --self-check-timeout-s"
    with pytest.raises(SelfCheckError, match=message):
        await check(ScriptedEngine(*answers), timeout_s=0.1)


async def test_where_bits_depend_on_the_batch_other_tokens_are_no_proof_of_a_fault() -> None:
    engine = ScriptedEngine(GOOD, ((5, 6, 7, 9), 48, None))
    engine.info = dataclasses.replace(INFO, determinism="consistent")
    await check(engine)


@pytest.mark.parametrize(
    ("max_model_len", "has_prefix_caching"), [(2, True), (17, True), (100, True), (100, False)]
)
async def test_a_real_engine_passes_and_is_as_before(
    make_model: Callable[..., Path], max_model_len: int, has_prefix_caching: bool
) -> None:
    config = EngineConfig(
        model=str(make_model()),
        num_threads=1,
        kv_connector="none",
        num_blocks=8,
        max_model_len=max_model_len,
        enable_prefix_caching=has_prefix_caching,
        async_scheduling=has_prefix_caching,
    )
    engine = await InprocEngineClient.load(
        config, role="decode", engine_id="d", metrics=KVTransferMetrics(CollectorRegistry())
    )
    try:
        await check(engine)
        assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
        assert await engine.call(ResetPrefixCache()) == 0, "nothing is cached"
    finally:
        await engine.close()
