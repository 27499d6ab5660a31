"""Tensors that routers put: what is checked, what is kept, and what a request gets of them."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from pdserve.v1 import engine_core_service_pb2 as pb2
from pdserve.v1 import engine_core_service_pb2_grpc as pb2_grpc
from pdserve_common.errors import OverloadedError
from pdserve_common.limits.receive_guard import ReceiveGuard
from pdserve_common.metrics.tensors import TensorMetrics
from pdserve_common.rpc.channels import RpcServer
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    Generate,
    MultiModalFeatureSpec,
    TensorRef,
    WorkerRole,
)
from pdserve_common.types.engine_client import NO_TENSORS
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.types.tensors import MAX_CHUNK_BYTES, TensorNotHeldError, tensor_ref
from pdserve_common.wire import to_proto
from pdserve_worker import tensor_service
from pdserve_worker.attach_service import EngineCoreServicer
from pdserve_worker.tensor_store import TensorStore
from support.clock import Clock
from support.engine_double import EngineDouble
from support.fake_worker import engine_info
from support.refusals import refused

MIB = 1 << 20
TIMEOUT_S = 60.0


class Engine(EngineDouble):
    """Answers at once."""

    def add_request(self, request: EngineCoreRequest, tensors: Any = NO_TENSORS) -> None:
        super().add_request(request, dict(tensors))
        self.emit(
            EngineCoreOutput(request_id=request.request_id, finish_reason=FinishReason.LENGTH)
        )


def make_store(max_bytes: int = 64 * MIB, **kwargs: Any) -> tuple[TensorStore, CollectorRegistry]:
    registry = CollectorRegistry()
    return TensorStore(max_bytes, TensorMetrics(registry), **kwargs), registry


def puts(registry: CollectorRegistry) -> dict[str, float]:
    """How puts ended, those that there were."""
    name = "pdserve_tensor_puts_total"
    samples = (s for family in registry.collect() for s in family.samples if s.name == name)
    return {s.labels["outcome"]: s.value for s in samples if s.value}


class Served:
    """A worker, its engine and its store."""

    def __init__(self, stub: Any, engine: Engine, registry: CollectorRegistry) -> None:
        self.stub = stub
        self.engine = engine
        self.registry = registry

    async def put(self, *messages: pb2.PutTensorRequest) -> Any:
        return await self.stub.PutTensor(iter(messages), timeout=TIMEOUT_S)

    async def refusal(self, *messages: pb2.PutTensorRequest) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.put(*messages)
        return error.value.code(), error.value.details()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    engine = Engine(engine_info(WorkerRole.DECODE, vocab_size=100, modalities=("image",)))
    store, registry = make_store()
    server = RpcServer("127.0.0.1", 0, interceptors=[ReceiveGuard(lambda limit: None)])
    servicer = EngineCoreServicer(engine, tensors=store)  # type: ignore[arg-type]
    pb2_grpc.add_EngineCoreServiceServicer_to_server(servicer, server.server)
    await server.start([])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Served(pb2_grpc.EngineCoreServiceStub(channel), engine, registry)
    await server.stop(0)


PIXELS = bytes(range(48))
REF = tensor_ref("uint8", (4, 4, 3), PIXELS)


def messages(ref: TensorRef, data: bytes, size: int = MAX_CHUNK_BYTES) -> Iterator[Any]:
    """The reference, then the bytes in pieces."""
    yield pb2.PutTensorRequest(ref=to_proto(ref))
    for start in range(0, len(data), size):
        yield pb2.PutTensorRequest(chunk=data[start : start + size])


def picture(ref: TensorRef = REF, **changes: Any) -> MultiModalFeatureSpec:
    spec = MultiModalFeatureSpec(
        modality="image", identifier=ref.content_hash.hex(), position=1, length=2, data=ref
    )
    return dataclasses.replace(spec, **changes)


def generate(*features: MultiModalFeatureSpec) -> pb2.EngineCoreServiceGenerateRequest:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(5, 6, 7, 8),
        task=Generate(SamplingParams(max_tokens=1)),
        mm_features=features,
    )
    return pb2.EngineCoreServiceGenerateRequest(request=to_proto(request))


async def test_a_request_gets_what_was_put(served: Served) -> None:
    for size in (5, MAX_CHUNK_BYTES):
        answer = await served.put(*messages(REF, PIXELS, size))
        assert answer.ttl_ms == 10_000
    # The bytes of what is held need not come.
    await served.put(pb2.PutTensorRequest(ref=to_proto(REF)))
    assert puts(served.registry) == {"stored": 1, "held": 2}
    assert [_ async for _ in served.stub.Generate(generate(picture()), timeout=TIMEOUT_S)]
    ((request, tensors),) = served.engine.added
    assert tensors == {REF.content_hash: PIXELS}
    assert request.mm_features == (picture(),)


async def test_a_request_whose_tensor_is_not_held_is_refused(served: Served) -> None:
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "is not held here"):
        await served.stub.Generate(generate(picture()), timeout=TIMEOUT_S).read()
    assert not served.engine.added
    assert served.registry.get_sample_value("pdserve_tensors_missing_total") == 1


def test_its_router_puts_it_again() -> None:
    store, _ = make_store()
    with pytest.raises(TensorNotHeldError) as error:
        store.get_all([REF])
    told = error.value.to_engine_error()
    assert (told.code, told.is_retryable) == (ErrorCode.FAILED_PRECONDITION, True)


@pytest.mark.parametrize(
    ("changes", "data", "expected"),
    [
        ({"dtype": "float32"}, PIXELS, "ref.dtype is 'float32', must be uint8"),
        ({"shape": ()}, PIXELS, "ref.shape has 0 dimensions, must be 1 to 4"),
        ({"shape": (1,) * 5}, PIXELS, "ref.shape has 5 dimensions"),
        ({"shape": (4, 0, 3)}, b"", "which are 0 bytes, must be 1 to 16777216"),
        ({"shape": (2**63, 2**63, 3)}, PIXELS, "must be 1 to 16777216"),
        ({"content_hash": b"x"}, PIXELS, "ref.content_hash has 1 bytes, must be 32"),
        ({}, PIXELS[:-1], "the chunks have 47 bytes, the shape [4, 4, 3] of uint8 has 48"),
        ({}, PIXELS * 2, "the chunks have 96 bytes or more"),
        ({}, bytes(48), "that of the bytes is"),
        ({"shape": (4, 3, 4)}, PIXELS, "that of the bytes is"),
        ({"shape": (2048, 2048, 3)}, bytes(MAX_CHUNK_BYTES + 1), "at most 1048576"),
    ],
)
async def test_what_is_no_tensor_is_refused(
    served: Served, changes: dict[str, Any], data: bytes, expected: str
) -> None:
    ref = dataclasses.replace(REF, **changes)
    code, details = await served.refusal(*messages(ref, data, max(len(data), 1)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert expected in details
    assert puts(served.registry) == {"refused": 1}
    assert served.registry.get_sample_value("pdserve_tensor_cache_bytes") == 0


async def test_a_stream_without_a_reference_is_refused(served: Served) -> None:
    for sent in ((), (pb2.PutTensorRequest(chunk=b"a"),)):
        code, details = await served.refusal(*sent)
        assert (code, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the first message has no ref",
        )


async def test_a_model_of_text_takes_none(served: Served) -> None:
    served.engine.info = dataclasses.replace(served.engine.info, modalities=())
    code, details = await served.refusal(*messages(REF, PIXELS))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "it knows only text" in details


async def test_a_tensor_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store, registry = make_store()

    async def slow() -> AsyncIterator[pb2.PutTensorRequest]:
        yield pb2.PutTensorRequest(ref=to_proto(REF))
        await asyncio.Event().wait()

    with pytest.raises(Exception, match=r"did not come within 0\.01 s"):
        await tensor_service.receive_tensor(slow(), store, client="a", timeout_s=0.01)
    assert puts(registry) == {"refused": 1}
    assert store.num_bytes == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"position": 3}, r"mm_features\[0\] has the positions 3 to 5"),
        ({"length": 0}, r"mm_features\[0\] has the positions 1 to 1"),
        ({"data": None}, r"mm_features\[0\].data is missing"),
        ({"identifier": "a"}, r"identifier is 'a', must be its content_hash"),
        ({"data": dataclasses.replace(REF, shape=(4, 12))}, r"must be \[height, width, 3\]"),
        ({"data": dataclasses.replace(REF, dtype="int8")}, r"mm_features\[0\].data.dtype"),
        ({"modality": "audio"}, "mm_features is set: not served yet"),
    ],
)
async def test_a_request_is_refused_whose_pictures_make_no_sense(
    served: Served, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=expected):
        await served.stub.Generate(generate(picture(**changes)), timeout=TIMEOUT_S).read()
    with pytest.raises(grpc.aio.AioRpcError, match=r"mm_features\[1\] has the positions 1 to 3"):
        await served.stub.Generate(generate(picture(), picture()), timeout=TIMEOUT_S).read()


def fill(store: TensorStore, client: str, first: int, number: int = 1) -> list[TensorRef]:
    """Put tensors of 1 MiB, each other than all others."""
    refs = []
    for index in range(first, first + number):
        data = bytes([index]) * MIB
        refs.append(tensor_ref("uint8", (MIB,), data))
        with store.reserve(refs[-1], client) as put:
            put(data)
    return refs


def test_what_is_about_to_be_used_makes_no_room() -> None:
    clock = Clock()
    store, registry = make_store(4 * MIB, clock=clock)
    kept = fill(store, "a", 0, 2)
    # The other half is for others.
    with pytest.raises(OverloadedError, match="at most half of 4194304"):
        fill(store, "a", 2)
    fill(store, "b", 3, 2)
    with pytest.raises(OverloadedError, match="4194304 of 4194304 bytes for tensors are in use"):
        fill(store, "c", 5)
    clock.now_s += 9.0
    store.get_all(kept[:1])
    clock.now_s += 2.0
    # Of what nobody waits for the one that was used last goes last.
    fill(store, "c", 6, 2)
    store.get_all(kept[:1])
    with pytest.raises(TensorNotHeldError):
        store.get_all(kept)
    assert store.num_bytes == 4 * MIB
    assert registry.get_sample_value("pdserve_tensor_evictions_total") == 2


def test_what_arrives_has_its_room() -> None:
    store, _ = make_store(4 * MIB)
    with store.reserve(tensor_ref("uint8", (MIB,), bytes(MIB)), "a"):
        fill(store, "a", 1)
        with pytest.raises(OverloadedError, match="at most half"):
            fill(store, "a", 2)
    assert store.num_bytes == MIB
    fill(store, "a", 2)
