"""The stages of a request at which a fault may strike, as points of the production code."""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Point(NamedTuple):
    """Before or after a call of a method, on workers of one role. The method must not run under a
    lock that other threads need for their answers: a barrier may hold its thread there.
    """

    role: Literal["prefill", "decode"]
    module: str
    cls: str
    method: str
    when: Literal["before", "after"]


_SCHEDULER = ("pdserve_engine.core.scheduler", "Scheduler")
_OUTPUTS = ("pdserve_engine.request.outputs", "Outputs")
_KV_EVENTS = ("pdserve_engine.core.handoff.kv_events", "KVEvents")
_PRODUCER = ("pdserve_engine.kv_transfer.connectors.producer", "ProducerConnector")
_CONSUMER = ("pdserve_engine.kv_transfer.connectors.consumer", "ConsumerConnector")
_READS = ("pdserve_faults.reads", "FaultyNixlAgent")

# Where a request passes a stage several times, `skip` says which of them counts.
STAGES: Mapping[str, Point] = {
    # In the queue, not scheduled yet. D passes it too.
    "queued": Point("prefill", *_SCHEDULER, "add_request", "after"),
    # Blocks are reserved on D.
    "granted": Point("decode", *_CONSUMER, "grant", "after"),
    # A READ is about to be made: of the first chunk, or of a later one.
    "chunk": Point("decode", *_READS, "make_read", "before"),
    # A READ is posted, its end is not seen.
    "mid_read": Point("decode", *_READS, "on_read_posted", "before"),
    # A READ is over, nobody is told.
    "landed": Point("decode", *_CONSUMER, "_on_read_done", "before"),
    # The prompt is computed, D does not know of the last chunk.
    "last_chunk": Point("prefill", *_PRODUCER, "request_finished", "before"),
    # All blocks are here, D has computed no token. P may not have acknowledged their release.
    "first_decode": Point("decode", *_KV_EVENTS, "_queue_first_step", "after"),
    # A step has brought a token.
    "mid_stream": Point("decode", *_OUTPUTS, "emit", "after"),
}
