"""Which decode worker P reads the start of a prompt from."""

from dataclasses import replace
from typing import Any

import pytest

from pdserve_common.types.engine import (
    EngineCoreRequest,
    EngineInfo,
    Generate,
    KVPrefixSource,
    WorkerRole,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.clients.legs import make_legs
from pdserve_router.workers.routing.prefix_source import find_prefix_source, may_lend
from support.fake_worker import engine_info
from support.stub_worker import StubWorker

INFO = engine_info(WorkerRole.DECODE, vocab_size=300, has_prefix_pulls=True)


def stub(info: EngineInfo | None = INFO, **fields: Any) -> StubWorker:
    return StubWorker(info=info, **fields)


def source(engine_id: str, num_tokens: int) -> KVPrefixSource:
    return KVPrefixSource(engine_id=engine_id, host="h", port=1, num_tokens=num_tokens)


def test_the_one_that_has_most_is_read_from_and_among_equals_the_requests_own() -> None:
    one: Any = stub(engine_id="d1")
    two: Any = stub(engine_id="d2")
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
    borrower: Any = stub()
    lender: Any = stub(replace(INFO, **changes))
    assert may_lend(lender, borrower) is expected


def test_consistent_workers_need_not_compute_with_the_same_numerics() -> None:
    info = replace(INFO, determinism="consistent")
    borrower: Any = stub(info)
    lender: Any = stub(replace(info, numerics_id="other"))
    assert may_lend(lender, borrower)


def test_who_is_not_there_lends_nothing() -> None:
    borrower: Any = stub()
    away: Any = stub(is_ready=False)
    unknown: Any = stub(info=None)
    assert not may_lend(away, borrower)
    assert not may_lend(unknown, borrower)


def test_only_the_prefill_leg_names_the_source() -> None:
    request = EngineCoreRequest(
        request_id="r0", prompt_token_ids=(1, 2), task=Generate(SamplingParams())
    )
    worker: Any = stub()
    legs = make_legs(request, prefill=worker, decode=worker, prefix_source=source("d1", 32))
    sources = [leg.kv_transfer_params and leg.kv_transfer_params.prefix_source for leg in legs]
    assert sources == [source("d1", 32), None]
