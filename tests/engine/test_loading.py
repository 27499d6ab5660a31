"""Loading an engine: sizes that fit, lengths that are lowered to what fits, and clear refusals."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve_common.types.engine import KVTransferParams
from pdserve_engine.assemble import LoadedEngine
from pdserve_engine.config import NUM_PROBE_SLOTS, EngineConfig
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.kv_transfer.connectors.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.ports import PullLost
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.request.request import Request
from pdserve_engine.runner.load import kv_sizing
from pdserve_engine.runner.run.model_runner import ModelRunner
from support import engines, requests
from support.steps import batch_of

# 3 layers, 2 KV heads of 16 elements, fp32, 16 tokens.
BLOCK_BYTES = 3 * 2 * 16 * 2 * 4 * 16


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model()


def loaded(model: Path, **fields: Any) -> AbstractContextManager[LoadedEngine]:
    return engines.loaded(model, **{"num_blocks": 128, **fields})


def pool_of(engine: LoadedEngine) -> KVCache:
    assert isinstance(engine.core.executor, UniprocExecutor)
    return engine.core.executor.rank.kv_cache


def test_the_models_length_is_served_where_it_fits(model: Path) -> None:
    with loaded(model) as engine:
        assert engine.info.max_model_len == 2048
        assert engine.info.num_blocks == 128
        assert pool_of(engine).num_bytes == 128 * BLOCK_BYTES
        assert engine.core.step_seq == 0
        assert not engine.core.has_work()


def test_a_length_that_nobody_asked_for_is_lowered_to_what_fits(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), loaded(model, num_blocks=10) as engine:
        assert engine.info.max_model_len == 160
    assert (
        "a request of max_model_len (2048) may take 128 KV blocks, the pool has 10 of 16 tokens: "
        "160 tokens fit, so max_model_len is 160"
    ) in caplog.text


def test_a_length_that_was_asked_for_is_refused_if_it_does_not_fit(model: Path) -> None:
    refusal = r"max_model_len \(161\) may take 11 KV blocks, the pool has 10 .* 160 tokens fit"
    with pytest.raises(ValueError, match=refusal), loaded(model, num_blocks=10, max_model_len=161):
        pass


def test_a_pool_larger_than_memory_is_refused_with_the_numbers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sizing, "available_host_bytes", lambda: 512 << 20)
    refusal = r"KV pool of 600.0 MiB does not fit: \d+.\d MiB are left"
    with (
        pytest.raises(ValueError, match=refusal),
        loaded(model, num_blocks=None, kv_cache_memory_mib=600),
    ):
        pass


@pytest.mark.parametrize(
    ("room_mib", "expected_bytes"),
    [(4096, kv_sizing.MIN_AUTO_CPU_BYTES), (64, 16 << 20), (1 << 20, 256 << 20)],
)
def test_an_unsized_pool_takes_what_is_sensible(
    model: Path, monkeypatch: pytest.MonkeyPatch, room_mib: int, expected_bytes: int
) -> None:
    monkeypatch.setattr(kv_sizing, "available_host_bytes", lambda: room_mib << 20)
    monkeypatch.setattr("pdserve_engine.runner.rank.measure_largest_step", lambda *args: 0)
    with loaded(model, num_blocks=None) as engine:
        assert pool_of(engine).num_bytes == expected_bytes // BLOCK_BYTES * BLOCK_BYTES


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_of_a_sliding_model_is_counted_with_the_steps_in_flight(
    make_model: Callable[..., Path], async_scheduling: bool
) -> None:
    model = make_model("MistralForCausalLM", sliding_window=33)
    fields = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 64}
    with loaded(model, **fields) as engine:
        # 32 tokens are seen before those of the steps, and both may begin anywhere in a block.
        num_positions = 32 + 64 * engine.core.executor.max_concurrent_batches
        needed = engine.core.scheduler.kv.num_blocks_needed(2048)
    assert needed == num_positions // 16 + 1


def test_the_largest_step_fills_token_budget_and_batch(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    execute = ModelRunner.execute_model

    def record(self: Any, scheduled: Any) -> Any:
        steps.append((scheduled.total_num_scheduled_tokens, len(scheduled.num_scheduled_tokens)))
        return execute(self, scheduled)

    monkeypatch.setattr(ModelRunner, "execute_model", record)
    with loaded(model, max_num_batched_tokens=512, max_num_seqs=9):
        pass
    largest = 9 + NUM_PROBE_SLOTS
    assert steps[0] == (512, largest)
    assert (largest, largest) in steps, "and the largest decode step"


def test_a_model_that_cannot_be_computed_is_not_served(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine would blame the only request of the step."""

    def fail(*args: Any) -> None:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(LlamaModel, "forward", fail)
    with pytest.raises(RuntimeError, match="no kernel"), loaded(model, max_num_seqs=1):
        pass


@pytest.mark.parametrize("allocate", ["cuda", "cpu"])
def test_a_model_too_large_for_memory_is_refused_with_what_to_lower(
    model: Path, monkeypatch: pytest.MonkeyPatch, allocate: str
) -> None:
    def forward(*args: Any) -> torch.Tensor:
        if allocate == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")
        return torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    refusal = "too little memory .* allocate .*; lower --max-num-batched-tokens"
    with pytest.raises(ValueError, match=refusal), loaded(model):
        pass


def test_memory_that_is_used_up_is_refused_with_numbers_that_make_sense(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sizing, "available_host_bytes", lambda: 0)
    for fields in ({"num_blocks": None}, {"num_blocks": 1}):
        refusal = r"KV pool of 0\.0 MiB does not fit: 0\.0 MiB are left .* lower --kv-cache"
        with pytest.raises(ValueError, match=refusal), loaded(model, **fields):
            pass


def test_requests_get_rows_of_the_length_that_fits(model: Path) -> None:
    with loaded(model, num_blocks=10) as engine:
        assert batch_of(engine.core.executor).token_ids.shape[1] == 160 + 1


@pytest.mark.parametrize(
    ("size", "rank", "refusal"),
    [
        (0, 0, "data_parallel_size is 0, must be at least 1"),
        (2, 2, "data_parallel_rank is 2, must be 0 to 1, as data_parallel_size is 2"),
        (1, -1, "data_parallel_rank is -1, must be 0 to 0, as data_parallel_size is 1"),
    ],
)
def test_a_rank_outside_its_group_is_refused_at_once(size: int, rank: int, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        EngineConfig(data_parallel_size=size, data_parallel_rank=rank)


@pytest.mark.parametrize("block_size", [-1, 3, 128])
def test_block_sizes_that_kernels_cannot_do_are_refused_at_once(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}, must be one of 1, 2, 4"):
        EngineConfig(block_size=block_size)


def test_a_prompt_budget_below_the_batch_size_still_warms_up(model: Path) -> None:
    with loaded(model, max_num_batched_tokens=4, max_num_seqs=64) as engine:
        assert engine.info.max_num_seqs == 64


@pytest.mark.parametrize(
    ("limit", "num_threads", "expected"),
    [(1.5, 0, 1), (0.5, 0, 1), (8.0, 0, 2), (None, 0, 2), (1.0, 2, 2)],
)
def test_threads_are_no_more_than_a_container_has_time_for_unless_asked_for(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: float | None,
    num_threads: int,
    expected: int,
) -> None:
    threads_before = torch.get_num_threads()
    monkeypatch.setattr("pdserve_engine.runner.load.threads.cpu_limit", lambda: limit)
    torch.set_num_threads(2)
    try:
        with loaded(model, num_threads=num_threads):
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(threads_before)


def test_d_gives_up_a_session_of_which_nothing_is_heard_as_soon_as_told(model: Path) -> None:
    with loaded(model, kv_connector="nixl", kv_session_timeout_s=0.01) as engine:
        connector = engine.connector
        assert isinstance(connector, ConsumerConnector)
        connector.bind_link_pool(lambda engine_id, host, port: None)
        connector.on_tick()  # what loading took is no delay of P
        connector.on_new_request(make_ticket())
        time.sleep(0.02)
        connector.on_tick()
        (event,) = connector.take_events()
        assert isinstance(event, PullLost)
        assert event.lost.reason == "expired"


def make_ticket() -> Request:
    params = KVTransferParams(
        do_remote_prefill=True, remote_engine_id="p", remote_host="127.0.0.1", remote_port=1
    )
    return requests.held_request(kv_transfer_params=params)
