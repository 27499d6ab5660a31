"""One trace of a request through router, prefill, the transfer of its KV and decode."""

import json
import random
import secrets
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_client.client import build_request
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.records.request_metrics import FIRST_ITL_STAGES, TTFT_STAGES
from support.cluster import HTTP_PORT, Cluster
from support.otlp import CollectedSpan, Collector
from support.waiting import wait_until

# Several chunks of P.
NUM_PROMPT_TOKENS = 300
NUM_TOKENS = 6
# Of two processes' clocks, each of which reads two clocks of the machine one after the other.
CLOCKS_NS = 1_000_000
# Times travel in ns, of seconds that are floats.
ROUNDING_NS = 2_000
CLIENTS_SPAN = "00f067aa0ba902b7"
OF_PREFILL = {"prefill_queue", "decode_queue", "prefill"}
OF_TRANSFER = {"kv_transfer", "kv_transfer_exposed"}
OF_DECODE = {*OF_TRANSFER, "decode_admit", "first_decode_step", "release_ack"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(
    collector: Collector, make_served_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    flags = {"otlp-traces-endpoint": collector.endpoint}
    with Cluster(
        model=make_served_model("LlamaForCausalLM"),
        log_dir=tmp_path_factory.mktemp("logs"),
        prefill=1,
        decode=2,
        flags=flags,
        router_flags=flags,
        env={
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-scope=pdserve",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        },
    ) as cluster:
        wait_until(lambda: num_proven(cluster) == 2, "both pairs are proven")
        yield cluster


def num_proven(cluster: Cluster) -> float:
    return cluster.metrics("router-0").get('pdserve_worker_pairs{state="proven"}', 0)


def new_trace() -> tuple[str, dict[str, str]]:
    """Return a trace's id and what a client in it sends."""
    trace_id = secrets.token_hex(16)
    return trace_id, {"traceparent": f"00-{trace_id}-{CLIENTS_SPAN}-01"}


def new_prompt() -> list[int]:
    return [random.randrange(3, 250) for _ in range(NUM_PROMPT_TOKENS)]


def ask_http(cluster: Cluster, headers: dict[str, str], **fields: object) -> dict[str, int]:
    """Return the stages of an answer in ns, by name."""
    body = {"prompt": new_prompt(), "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
    host = cluster.members["router-0"].host
    request = urllib.request.Request(
        f"http://{host}:{HTTP_PORT}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()
        times = {k: v for k, v in response.headers.items() if k.endswith("-ms")}
    return {
        name.removeprefix("pdserve-").removesuffix("-ms").replace("-", "_"): round(float(ms) * 1e6)
        for name, ms in times.items()
    }


def ask_grpc(cluster: Cluster, headers: dict[str, str]) -> dict[str, int]:
    """The same over gRPC."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with grpc.insecure_channel(cluster.addresses[0]) as channel:
        stub: Any = pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(
            build_request(new_prompt(), params), metadata=tuple(headers.items()), timeout=60
        )
        *_, last = call
    metrics: pb2.RequestMetrics = last.output.metrics
    return {
        field.name.removesuffix("_ns"): getattr(metrics, field.name)
        for field in metrics.DESCRIPTOR.fields
        if field.name.endswith("_ns")
    }


def is_whole(spans: Sequence[CollectedSpan]) -> bool:
    """All three processes have told of the request: parents are exported behind their children."""
    return Counter(span.service for span in spans if span.kind == "server") == {
        "pdserve-router": 1, "pdserve-prefill": 1, "pdserve-decode": 1
    }  # fmt: skip


class Tree:
    """Spans by their place."""

    def __init__(self, spans: Sequence[CollectedSpan], parent_id: str = CLIENTS_SPAN) -> None:
        self.spans = spans
        (self.root,) = (span for span in spans if span.parent_id == parent_id)

    def below(self, parent: CollectedSpan) -> list[CollectedSpan]:
        """Its children, in their order."""
        children = (span for span in self.spans if span.parent_id == parent.span_id)
        return sorted(children, key=lambda span: (span.start_ns, span.end_ns))

    def one(self, parent: CollectedSpan, name: str, service: str = "") -> CollectedSpan:
        (found,) = (
            span
            for span in self.below(parent)
            if span.name == name and service in ("", span.service)
        )
        return found

    def names(self, parent: CollectedSpan) -> set[str]:
        return {span.name for span in self.below(parent)}


def check_nesting(tree: Tree) -> None:
    """All hang below the root, and none begins or ends outside its parent."""
    by_id = {span.span_id: span for span in tree.spans}
    assert len(by_id) == len(tree.spans)
    for span in tree.spans:
        assert span.start_ns <= span.end_ns, span
        if span is tree.root:
            continue
        parent = by_id[span.parent_id]
        assert parent.start_ns - CLOCKS_NS <= span.start_ns, (parent, span)
        assert span.end_ns <= parent.end_ns + CLOCKS_NS, (parent, span)


def check_stages(spans: Sequence[CollectedSpan], stages: dict[str, int]) -> None:
    """Spans last as long as the waterfall says, and with what only the router knows sum to its
    times. If they overlap, as it measures them, it has cut some and leaves no rest.
    """
    durations = {span.name: span.duration_ns for span in spans}
    for names, whole in ((TTFT_STAGES, "ttft"), (FIRST_ITL_STAGES, "first_itl")):
        *known, rest = names
        tolerance_ns = len(known) * ROUNDING_NS
        total_ns = sum(durations.get(name, 0) for name in known) + stages[rest]
        if not stages[rest]:
            assert total_ns >= stages[whole] - tolerance_ns
            continue
        assert abs(total_ns - stages[whole]) <= tolerance_ns
        for name in known:
            assert abs(durations.get(name, 0) - stages[name]) <= ROUNDING_NS, name


@pytest.mark.parametrize("api", ["http", "grpc"])
def test_one_tree_shows_where_a_request_went_and_what_it_took(
    cluster: Cluster, collector: Collector, api: str
) -> None:
    trace_id, headers = new_trace()
    stages = (ask_http if api == "http" else ask_grpc)(cluster, headers)
    tree = Tree(collector.trace(trace_id, is_whole))
    root = tree.root
    assert (root.service, root.kind) == ("pdserve-router", "server")
    assert tree.names(root) == {"router_queue", "tokenize", "dispatch", "attempt"}
    attempt = tree.one(root, "attempt")
    prefill = tree.one(attempt, "llm_request", "pdserve-prefill")
    decode = tree.one(attempt, "llm_request", "pdserve-decode")
    assert len(tree.below(attempt)) == 2
    assert tree.names(prefill) <= OF_PREFILL
    assert tree.names(decode) == {"grant_wait", "decode", *OF_DECODE} - {"kv_transfer_exposed"}
    assert tree.names(tree.one(decode, "kv_transfer")) == {"kv_transfer_exposed"}
    check_nesting(tree)
    check_stages(tree.spans, stages)

    if api == "http":
        assert root.name == "POST /v1/completions"
        assert root.attributes["http.response.status_code"] == 200
    else:
        assert root.name == "pdserve.v1.InferenceService/Generate"
        assert root.attributes["rpc.response.status_code"] == "OK"
    assert root.attributes["gen_ai.usage.input_tokens"] == NUM_PROMPT_TOKENS
    assert root.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(
        stages["ttft"] / 1e9, abs=1e-5
    )
    assert root.attributes["pdserve.path"] == "disaggregated"
    transfer = tree.one(decode, "kv_transfer").attributes
    assert transfer["pdserve.kv_transfer.transport"] == "shm"
    assert transfer["pdserve.kv_transfer.blocks"] > 0
    assert transfer["pdserve.kv_transfer.bytes"] > 0
    # A chunk is 64 tokens; READs are of chunks, too.
    num_chunks = tree.one(prefill, "prefill").attributes["pdserve.num_chunks"]
    assert num_chunks == -(-NUM_PROMPT_TOKENS // 64)
    for span in tree.spans:
        assert not span.is_error
        assert span.resource["deployment.environment.name"] == "test"
        assert span.resource["service.instance.id"] in cluster.members
    assert all(metadata["x-scope"] == "pdserve" for metadata in collector.metadata)


def test_a_request_without_a_parent_begins_a_trace(cluster: Cluster, collector: Collector) -> None:
    ask_http(cluster, {"x-request-id": "no-parent"})

    def root() -> list[CollectedSpan]:
        return [
            span
            for span in collector.spans
            if span.attributes.get("gen_ai.request.id") == "no-parent" and not span.parent_id
        ]

    wait_until(root, "the root is exported")
    tree = Tree(collector.trace(root()[0].trace_id, is_whole), parent_id="")
    check_nesting(tree)


def test_a_killed_worker_shows_as_an_attempt_that_failed(
    cluster: Cluster, collector: Collector
) -> None:
    trace_id, headers = new_trace()
    for name in cluster.workers:
        cluster.controls(name).slow_down(0.05)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with grpc.insecure_channel(cluster.addresses[0]) as channel:
        stub: Any = pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(
            build_request(new_prompt(), params), metadata=tuple(headers.items()), timeout=60
        )
        outputs = iter(call)
        num_tokens = 0
        while num_tokens < 3:
            num_tokens += len(next(outputs).output.outputs[0].token_ids)
        killed = wait_until(lambda: who_runs(cluster), "a decode worker runs the request")
        cluster.kill(killed)
        last = [response.output for response in outputs][-1]
    assert last.metrics.num_redrives == 1

    def has_ended(spans: Sequence[CollectedSpan]) -> bool:
        return {"pdserve-router", "pdserve-decode"} <= {
            span.service for span in spans if span.kind == "server"
        }

    tree = Tree(collector.trace(trace_id, has_ended))
    first, second = (span for span in tree.below(tree.root) if span.name == "attempt")
    assert (first.attributes["pdserve.attempt"], second.attributes["pdserve.attempt"]) == (0, 1)
    assert first.attributes["pdserve.decode.engine_id"] == killed
    assert first.is_error
    assert first.attributes["error.type"] == first.attributes["pdserve.redrive_reason"]
    assert first.end_ns <= second.start_ns
    assert second.attributes["pdserve.num_tokens_before"] >= 3
    assert second.attributes["pdserve.decode.engine_id"] != killed
    assert not second.is_error
    assert not tree.root.is_error
    assert tree.root.attributes["pdserve.num_redrives"] == 1
    tree.one(second, "llm_request", "pdserve-decode")
    cluster.restore()


def who_runs(cluster: Cluster) -> str:
    """Return a decode worker with a request in its batch, or ""."""
    for name in cluster.of_role("decode"):
        if cluster.metrics(name)["pdserve_requests_running"]:
            return name
    return ""
