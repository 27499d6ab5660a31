"""Which decode worker P reads the start of a prompt from."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from pdserve_common.engine_types import (
    EngineCoreRequest,
    EngineInfo,
    KVPrefixSource,
    KVTransferParams,
    WorkerRole,
)
from pdserve_common.sampling_params import SamplingParams
from pdserve_router.workers.legs import make_legs
from pdserve_router.workers.prefix_source import find_prefix_source, may_lend

INFO = EngineInfo(
    engine_id="x",
    epoch="e",
    role=WorkerRole.DECODE,
    model="m",
    max_model_len=512,
    vocab_size=300,
    eos_token_ids=(2,),
    block_size=16,
    num_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    dtype="bfloat16",
    kv_compatibility_hash="same",
    kv_transport="nixl",
    determinism="exact",
    numerics_id="same",
    version="0",
    has_prefix_pulls=True,
)


@dataclass(eq=False)
class Worker:
    info: EngineInfo | None = INFO
    engine_id: str = "d0"
    is_ready: bool = True

    @property
    def kv_transfer_params(self) -> KVTransferParams:
        return KVTransferParams(remote_engine_id=self.engine_id, remote_host="h", remote_port=1)


def source(engine_id: str, num_tokens: int) -> KVPrefixSource:
    return KVPrefixSource(engine_id=engine_id, host="h", port=1, num_tokens=num_tokens)


def test_the_one_that_has_most_is_read_from_and_among_equals_the_requests_own() -> None:
    one: Any = Worker(engine_id="d1")
    two: Any = Worker(engine_id="d2")
    assert find_prefix_source(two, {one: 32, two: 16}) == source("d1", 32)
    assert find_prefix_source(two, {one: 32, two: 32}) == source("d2", 32)
    assert find_prefix_source(one, {}) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"has_prefix_pulls": False}, False),
        ({"kv_compatibility_hash": "other"}, False),
        ({"numerics_id": "other"}, False),
        ({"determinism": "consistent"}, False),
        ({"role": WorkerRole.PREFILL}, False),
    ],
)
def test_blocks_are_read_by_those_that_would_compute_the_same(
    changes: dict[str, Any], expected: bool
) -> None:
    borrower: Any = Worker()
    lender: Any = Worker(replace(INFO, **changes))
    assert may_lend(lender, borrower) is expected


def test_consistent_workers_need_not_compute_with_the_same_numerics() -> None:
    info = replace(INFO, determinism="consistent")
    borrower: Any = Worker(info)
    lender: Any = Worker(replace(info, numerics_id="other"))
    assert may_lend(lender, borrower)


def test_who_is_not_there_lends_nothing() -> None:
    borrower: Any = Worker()
    away: Any = Worker(is_ready=False)
    unknown: Any = Worker(info=None)
    assert not may_lend(away, borrower)
    assert not may_lend(unknown, borrower)


def test_only_the_prefill_leg_names_the_source() -> None:
    request = EngineCoreRequest(
        request_id="r0", prompt_token_ids=(1, 2), sampling_params=SamplingParams()
    )
    worker: Any = Worker()
    legs = make_legs(request, prefill=worker, decode=worker, prefix_source=source("d1", 32))
    sources = [leg.kv_transfer_params and leg.kv_transfer_params.prefix_source for leg in legs]
    assert sources == [source("d1", 32), None]
