"""What a worker's outputs say, as spans."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.observability.tracing_config import open_tracing
from pdserve_common.types.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    FinishReason,
    Generate,
    KVLost,
    KVTransferParams,
    KVTransferStats,
    Pool,
    PrefillStats,
)
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_worker.request_spans import RequestSpans
from support.otlp import CollectedSpan, Collector

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01"}
MS = 1_000_000
TRANSFER = KVTransferStats(
    num_bytes=4096,
    num_blocks=4,
    num_reads=2,
    transport="rdma",
    transfer_s=0.020,
    exposed_s=0.005,
    decode_admit_s=0.001,
    first_decode_step_s=0.010,
    release_ack_s=0.002,
)
PREFILL = PrefillStats(
    num_prompt_tokens=3,
    num_cached_tokens=1,
    queue_s=0.030,
    decode_queue_s=0.010,
    prefill_s=0.050,
    num_chunks=2,
)


class Worker:
    """RequestSpans on a clock of the test's, in ms."""

    def __init__(self, collector: Collector) -> None:
        self.now_ms = 0.0
        tracing = open_tracing(
            collector.endpoint, CollectorRegistry(), service="worker", instance="w"
        )
        assert tracing is not None
        self._tracing = tracing
        self._collector = collector
        self.spans = RequestSpans(tracing, model="tiny", clock=lambda: self.now_ms / 1e3)

    def begin(self, headers: Mapping[str, str] = HEADERS, **fields: Any) -> None:
        fields.setdefault("task", Generate(SamplingParams()))
        self.spans.begin(
            EngineCoreRequest(
                request_id="r",
                prompt_token_ids=(1, 2, 3),
                trace_headers=headers,
                **fields,
            )
        )

    def take(self, now_ms: float, **fields: Any) -> None:
        self.now_ms = now_ms
        self.spans.take([EngineCoreOutput(request_id="r", **fields)])

    def exported(self) -> dict[str, CollectedSpan]:
        """All spans by name; nothing more can come."""
        self._tracing.close(20.0)
        return {span.name: span for span in self._collector.spans}


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Collector() as collector:
        yield Worker(collector)


def events(**times_ms: float) -> tuple[EngineCoreEvent, ...]:
    return tuple(
        EngineCoreEvent(EngineCoreEventType[name.upper()], ms / 1e3)
        for name, ms in times_ms.items()
    )


def times(spans: dict[str, CollectedSpan]) -> dict[str, tuple[float, float]]:
    """From when to when each was, in ms since the request's own began."""
    origin = spans["llm_request"].start_ns
    return {
        name: ((span.start_ns - origin) / MS, (span.end_ns - origin) / MS)
        for name, span in spans.items()
    }


def test_prefill(worker: Worker) -> None:
    worker.begin()
    worker.take(
        90,
        events=events(queued=5, scheduled=35, kv_session_opened=35),
        prefill_stats=PREFILL,
        new_token_ids=(7,),
        finish_reason=FinishReason.LENGTH,
        kv_transfer_params=KVTransferParams(do_remote_decode=True),
    )
    spans = worker.exported()
    assert times(spans) == {
        "llm_request": (0, 90),
        "prefill_queue": (5, 25),
        "decode_queue": (25, 35),
        "prefill": (35, 85),
    }
    own = spans["llm_request"]
    assert (own.trace_id, own.parent_id, own.kind) == (TRACE_ID, PARENT, "server")
    assert own.events == ("kv_session_opened",)
    assert own.attributes == {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": "r",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.latency.time_in_queue": 0.030,
        "gen_ai.latency.time_in_model_prefill": 0.050,
        "gen_ai.response.finish_reasons": ["length"],
        "pdserve.attempt": 0,
    }
    assert spans["prefill"].attributes == {"pdserve.num_chunks": 2}
    assert all(s.parent_id == own.span_id for s in spans.values() if s is not own)


def test_decode_after_a_pull(worker: Worker) -> None:
    worker.begin()
    worker.take(
        70,
        events=events(
            queued=1, kv_transfer_started=20, kv_transfer_finished=50, scheduled=51, kv_accepted=63
        ),
        kv_transfer_stats=TRANSFER,
        new_token_ids=(7, 8),
    )
    worker.take(80, new_token_ids=(9,))
    worker.take(99, new_token_ids=(9,), finish_reason=FinishReason.STOP)
    spans = worker.exported()
    assert times(spans) == {
        "llm_request": (0, 99),
        "grant_wait": (1, 20),
        "kv_transfer": (20, 50),
        "kv_transfer_exposed": (45, 50),
        "decode_admit": (50, 51),
        "first_decode_step": (51, 61),
        "release_ack": (61, 63),
        "decode": (63, 99),
    }
    assert spans["kv_transfer_exposed"].parent_id == spans["kv_transfer"].span_id
    assert spans["kv_transfer"].attributes == {
        "pdserve.kv_transfer.bytes": 4096,
        "pdserve.kv_transfer.blocks": 4,
        "pdserve.kv_transfer.reads": 2,
        "pdserve.kv_transfer.transport": "rdma",
        "pdserve.kv_transfer.busy_ms": 20.0,
        "pdserve.kv_transfer.exposed_ms": 5.0,
    }
    assert spans["llm_request"].attributes["gen_ai.usage.output_tokens"] == 4
    assert spans["llm_request"].events == ("kv_accepted",)


def test_decode_alone(worker: Worker) -> None:
    worker.begin()
    alone = PrefillStats(
        num_prompt_tokens=3, num_cached_tokens=0, queue_s=0.03, decode_queue_s=0.03, prefill_s=0.02
    )
    worker.take(60, events=events(queued=5, scheduled=35), prefill_stats=alone, new_token_ids=(7,))
    worker.take(70, events=events(preempted=65), new_token_ids=(8,))
    worker.take(80, finish_reason=FinishReason.STOP)
    spans = worker.exported()
    assert times(spans) == {
        "llm_request": (0, 80),
        "decode_queue": (5, 35),
        "prefill": (35, 55),
        "decode": (55, 80),
    }
    assert spans["llm_request"].events == ("preempted",)


def test_a_vector_is_there_when_its_prompt_is_computed(worker: Worker) -> None:
    worker.begin(task=Pool(PoolingParams(task="embed")))
    worker.take(
        90,
        events=events(queued=5, scheduled=25),
        prefill_stats=dataclasses.replace(PREFILL, queue_s=0.020, decode_queue_s=0.0),
        pooling_output=(0.5, 0.5),
        finish_reason=FinishReason.STOP,
    )
    spans = worker.exported()
    assert times(spans) == {"llm_request": (0, 90), "prefill_queue": (5, 25), "prefill": (25, 75)}
    own = spans["llm_request"].attributes
    assert (own["gen_ai.usage.input_tokens"], own["gen_ai.usage.output_tokens"]) == (3, 0)
    assert own["gen_ai.response.finish_reasons"] == ["stop"]


def test_a_transfer_that_is_lost(worker: Worker) -> None:
    worker.begin()
    lost = KVLost(num_confirmed_tokens=0, reason="read_failed", message="prefill-0 is gone")
    worker.take(40, events=events(queued=1, kv_transfer_started=10, kv_lost=40), kv_lost=lost)
    error = EngineError(code=ErrorCode.KV_TRANSFER_FAILED, message="nobody came back")
    worker.take(60, finish_reason=FinishReason.ERROR, error=error)
    spans = worker.exported()
    assert times(spans) == {
        "llm_request": (0, 60),
        "grant_wait": (1, 10),
        "kv_transfer": (10, 40),
    }
    assert spans["kv_transfer"].is_error
    assert spans["kv_transfer"].attributes["error.type"] == "read_failed"
    own = spans["llm_request"]
    assert own.is_error
    assert own.description == "nobody came back"
    assert own.attributes["error.type"] == "kv_transfer_failed"
    assert own.attributes["pdserve.kv_lost_reason"] == "read_failed"


def test_a_ticket_that_its_router_ends_is_no_error(worker: Worker) -> None:
    worker.begin()
    error = EngineError(code=ErrorCode.CANCELLED, message="the client left")
    worker.take(10, events=events(queued=1), finish_reason=FinishReason.ABORT, error=error)
    spans = worker.exported()
    assert times(spans) == {"llm_request": (0, 10)}
    assert not spans["llm_request"].is_error
    assert spans["llm_request"].attributes["error.type"] == "cancelled"


def test_what_is_given_up_refused_or_superseded_has_an_end(worker: Worker) -> None:
    worker.begin()
    worker.begin(attempt=1)  # the first one's place
    worker.take(10, attempt=0, new_token_ids=(1,), finish_reason=FinishReason.STOP)  # too late
    worker.spans.refuse("r")
    worker.begin(attempt=2)
    worker.spans.end_all()
    worker.exported()
    attempts = [
        (span.attributes.get("pdserve.attempt"), span.attributes["error.type"])
        for span in worker._collector.spans
    ]
    assert attempts == [(0, "cancelled"), (None, "refused"), (2, "cancelled")]


def test_requests_without_a_sampled_trace_have_no_span(worker: Worker) -> None:
    for headers in ({}, {"traceparent": f"00-{TRACE_ID}-{PARENT}-00"}):
        worker.begin(headers)
        worker.take(10, new_token_ids=(1,), finish_reason=FinishReason.STOP)
    assert worker.exported() == {}
