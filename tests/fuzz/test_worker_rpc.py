"""What P and D serve over gRPC, called by a router, an operator or a decode worker that is none."""

import contextlib
import queue
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from constraints import proto_constraints
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import assume, given, note
from hypothesis import strategies as st
from messages import Known, merged, messages, payloads
from rpc import ANSWER_S, GIVEN_UP, Plan, call, check, check_errors, path_of, plans
from settings_of_fuzz import examples
from system import ADAPTERS, System

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import control_service_pb2_grpc as control_grpc
from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_worker.control_service import MAX_DRAIN_TIMEOUT_MS

WORKERS = ("prefill-0", "decode-0")
ENGINE = service_pb2.DESCRIPTOR.services_by_name["EngineCoreService"]
CONTROL = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
KV_LINK = kv_pb2.DESCRIPTOR.services_by_name["KvTransferService"].methods_by_name["KvLink"]
# A request whose peer, named by the caller, is not there.
NO_PEER = (grpc.StatusCode.UNAVAILABLE,)
FUZZ_P, FUZZ_D = "fuzz-p", "fuzz-d"
# For what was sent to be read. Whether it was is not asked.
LAST_WORDS_S = 0.05
# D dials one that has refused it after a second at most.
BACKOFF_S = 1.1

PARAMS = core_pb2.SamplingParams(max_tokens=3)
REQUEST = core_pb2.EngineCoreRequest(
    request_id="a", prompt_token_ids=[5, 6, 7] * 8, sampling_params=PARAMS
)
HELLO = service_pb2.AttachHello(router_id="fuzz", router_epoch="0" * 32)


def channel_to(system: System, name: str) -> grpc.Channel:
    return grpc.insecure_channel(system.worker_address(name))


def known(info: Any) -> Known:
    """What exists for a worker: its peers, ids of requests, its own start."""
    constrained = st.builds(
        lambda params: core_pb2.EngineCoreRequest(
            sampling_params=core_pb2.SamplingParams(structured_outputs=params),
            eos_token_id=info.eos_token_ids[0],
        ),
        proto_constraints(),
    )
    return Known(
        texts=(
            *(*WORKERS, *ADAPTERS, FUZZ_P, FUZZ_D, "a", "b", "fuzz", info.epoch, info.engine_id),
            "router",
        ),
        numbers=(info.vocab_size - 1, info.vocab_size, info.max_model_len),
        parts={
            "pdserve.v1.EngineCoreRequest": merged(
                st.just(REQUEST),
                st.one_of(messages(core_pb2.EngineCoreRequest.DESCRIPTOR), constrained),
            ),
            "pdserve.v1.AttachHello": st.just(HELLO),
            "pdserve.v1.StructuredOutputsParams": proto_constraints(),
        },
    )


def info_of(channel: grpc.Channel) -> Any:
    stub = service_grpc.EngineCoreServiceStub(channel)
    return stub.GetInfo(service_pb2.GetInfoRequest(), timeout=ANSWER_S).info


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("method", [*ENGINE.methods], ids=lambda method: method.name)
def test_any_call_of_a_router_is_answered_or_refused(
    system: System, method: MethodDescriptor, name: str
) -> None:
    with channel_to(system, name) as channel:
        drawn = messages(method.input_type, known(info_of(channel)))
        hello = st.just(service_pb2.AttachRequest(hello=HELLO).SerializeToString())

        @examples(20 if method.name in ("Generate", "Attach") else 5)
        @given(plans(method, payloads(drawn), max_size=6), st.booleans(), hello)
        def target(plan: Plan, says_hello: bool, hello: bytes) -> None:
            if method.name == "Attach" and says_hello:
                plan = plan._replace(payloads=(hello, *plan.payloads))
            if not plan.half_closes:
                plan = plan._replace(timeout_s=min(plan.timeout_s, 0.3))
            with system.example():
                check(call(channel, method, plan), plan, also=NO_PEER)

        target()


# ---- operators


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("method", [*CONTROL.methods], ids=lambda method: method.name)
def test_any_verb_is_carried_out_or_refused(
    system: System, method: MethodDescriptor, name: str
) -> None:
    """All but drains that begin: a worker that has drained is done."""
    names = Known(texts=ADAPTERS)
    with channel_to(system, name) as channel:

        @examples(10 if "Lora" in method.name else 5)
        @given(plans(method, payloads(messages(method.input_type, names)), max_size=3))
        def target(plan: Plan) -> None:
            assume(method.name != "Drain" or not any(map(drains, plan.payloads)))
            try:
                check(call(channel, method, plan), plan)
            finally:
                undo(channel)
            system.stack.wait_until_whole()
            system.check()

        target()


def drains(payload: bytes) -> bool:
    try:
        request = control_pb2.DrainRequest.FromString(payload)
    except DecodeError:
        return False
    return request.timeout_ms <= MAX_DRAIN_TIMEOUT_MS


def undo(channel: grpc.Channel) -> None:
    """Leave the worker awake and at work, whatever it was asked for."""
    control = control_grpc.ControlServiceStub(channel)
    for verb, request in (
        (control.Profile, control_pb2.ProfileRequest(start=False)),
        (control.WakeUp, control_pb2.WakeUpRequest()),
        (control.Resume, control_pb2.ResumeRequest()),
    ):
        with contextlib.suppress(grpc.RpcError):  # there is nothing to undo
            verb(request, timeout=ANSWER_S)


# ---- decode workers, to P


class Link:
    """A KvLink to P of a D that says what it likes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._unsent: queue.Queue[bytes | None] = queue.Queue()
        self._received: queue.Queue[kv_pb2.KvLinkResponse | None] = queue.Queue()
        stub = channel.stream_stream(
            path_of(KV_LINK), response_deserializer=kv_pb2.KvLinkResponse.FromString
        )
        self._call = stub(iter(self._unsent.get, None), timeout=ANSWER_S)
        self._reader = futures.ThreadPoolExecutor(1)
        self._reading = self._reader.submit(self._read)

    def send(self, payload: bytes) -> None:
        self._unsent.put(payload)

    def receive(self, kind: str) -> Any:
        """Return the next message of a kind, None if there comes none before the end."""
        while (message := self._received.get(timeout=ANSWER_S)) is not None:
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)
        return None

    def close(self, *, half_closes: bool) -> grpc.StatusCode:
        """End it, politely or not, and return how it has ended."""
        self._unsent.put(None)
        if not half_closes:
            self._call.cancel()
        self._reading.result(ANSWER_S)
        self._reader.shutdown()
        return self._call.code()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in self._call:
                self._received.put(message)
        self._received.put(None)


class FakeP:
    """A prefill worker that says what it likes to those who dial."""

    def __init__(self) -> None:
        self.hellos: queue.Queue[bytes] = queue.Queue()
        self.answers: tuple[bytes, ...] = ()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        handlers = {KV_LINK.name: grpc.stream_stream_rpc_method_handler(self._serve)}
        service = KV_LINK.containing_service.full_name
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, handlers),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait(ANSWER_S)

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self.hellos.put(next(requests))
        yield from self.answers
        for _ in requests:  # until D has had enough
            pass


@pytest.fixture(scope="module")
def fake_p() -> Iterator[FakeP]:
    fake = FakeP()
    yield fake
    fake.close()


def pull_from(fake_p: FakeP, engine_id: str, request_id: str) -> core_pb2.EngineCoreRequest:
    """D's leg of a request of which a fake P has the KV."""
    request = core_pb2.EngineCoreRequest()
    request.CopyFrom(REQUEST)
    request.request_id = request_id
    request.kv_transfer_params.do_remote_prefill = True
    request.kv_transfer_params.remote_engine_id = engine_id
    request.kv_transfer_params.remote_host = "127.0.0.1"
    request.kv_transfer_params.remote_port = fake_p.port
    return request


def hand_to(engine_id: str, request_id: str) -> core_pb2.EngineCoreRequest:
    """P's leg of a request whose KV a D is to get."""
    request = core_pb2.EngineCoreRequest()
    request.CopyFrom(REQUEST)
    request.request_id = request_id
    request.kv_transfer_params.do_remote_decode = True
    request.kv_transfer_params.remote_engine_id = engine_id
    return request


def generate(channel: grpc.Channel, request: core_pb2.EngineCoreRequest) -> Any:
    stub = service_grpc.EngineCoreServiceStub(channel)
    message = service_pb2.EngineCoreServiceGenerateRequest(request=request)
    return stub.Generate(message, timeout=ANSWER_S)


def end(running: Any) -> None:
    """Give a request up and see that it had not failed before."""
    running.cancel()
    received = []
    with contextlib.suppress(grpc.RpcError):
        received += list(running)
    assert running.code() in {grpc.StatusCode.OK, *GIVEN_UP, *NO_PEER}, running.details()
    for message in received:
        check_errors(message)


@pytest.fixture
def real_hello(system: System, fake_p: FakeP) -> kv_pb2.KvLinkHello:
    """What D says to a P that it dials."""
    with channel_to(system, "decode-0") as channel:
        running = generate(channel, pull_from(fake_p, FUZZ_P, "a hello"))
        hello = fake_p.hellos.get(timeout=ANSWER_S)
        end(running)
    return kv_pb2.KvLinkRequest.FromString(hello).hello


def hello_of(real: kv_pb2.KvLinkHello, engine_id: str) -> bytes:
    """The hello of a D that is like the real one."""
    hello = kv_pb2.KvLinkHello()
    hello.CopyFrom(real)
    hello.engine_id, hello.epoch = engine_id, "0" * 32
    return kv_pb2.KvLinkRequest(hello=hello).SerializeToString()


def test_p_takes_no_harm_from_any_d(system: System, real_hello: kv_pb2.KvLinkHello) -> None:
    descriptor = kv_pb2.KvLinkRequest.DESCRIPTOR
    first = payloads(messages(descriptor, Known(parts={descriptor.full_name: st.nothing()})))

    @examples(25)
    @given(st.data(), st.integers(0, 3), st.booleans(), first, st.booleans())
    def target(data: Any, count: int, is_real: bool, first: bytes, half_closes: bool) -> None:
        with system.example(), channel_to(system, "prefill-0") as channel:
            link = Link(channel)
            link.send(hello_of(real_hello, FUZZ_D) if is_real else first)
            requests = [generate(channel, hand_to(FUZZ_D, f"{i}")) for i in range(count)]
            parts = {}
            if is_real and count and (grant := link.receive("grant_request")) is not None:
                parts = {"pdserve.v1.KvSessionId": st.just(grant.session)}
            texts = (FUZZ_D, "decode-0", *map(str, range(count)))
            drawn = messages(descriptor, Known(texts=texts, parts=parts))
            for payload in data.draw(st.lists(payloads(drawn), max_size=6)):
                note(f"sends {payload.hex()}")
                link.send(payload)
            code = link.close(half_closes=half_closes)
            for running in requests:
                end(running)
            allowed = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
            refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
            assert code in (*allowed, *refused), code

    target()


# ---- prefill workers, to D


def welcome_of(system: System, real_hello: kv_pb2.KvLinkHello) -> kv_pb2.KvLinkWelcome:
    """What the real P says to a D that it takes."""
    with channel_to(system, "prefill-0") as channel:
        link = Link(channel)
        link.send(hello_of(real_hello, FUZZ_D))
        welcome = link.receive("welcome")
        link.close(half_closes=True)
    return welcome


def test_d_takes_no_harm_from_any_p(
    system: System, real_hello: kv_pb2.KvLinkHello, fake_p: FakeP
) -> None:
    welcome = welcome_of(system, real_hello)
    welcome.engine_id = FUZZ_P
    session = kv_pb2.KvSessionId(
        p_epoch=welcome.epoch, d_epoch=real_hello.epoch, link=welcome.link, seq=1
    )
    descriptor = kv_pb2.KvLinkResponse.DESCRIPTOR
    grant = kv_pb2.GrantRequest(
        session=session, request_id="a pull", num_tokens=len(REQUEST.prompt_token_ids)
    )
    known = Known(
        texts=(FUZZ_P, "prefill-0", "a pull"),
        numbers=(len(REQUEST.prompt_token_ids),),
        parts={
            "pdserve.v1.KvSessionId": st.just(session),
            "pdserve.v1.GrantRequest": st.just(grant),
            "pdserve.v1.KvLinkWelcome": st.just(welcome),
        },
    )
    drawn = messages(descriptor, known)
    right = st.just(kv_pb2.KvLinkResponse(welcome=welcome).SerializeToString())
    first = st.one_of(right, right, payloads(merged(right.map(response_of), drawn)))

    @examples(10)
    @given(first, st.lists(payloads(drawn), max_size=6))
    def target(first: bytes, others: list[bytes]) -> None:
        note(f"answers {[payload.hex() for payload in (first, *others)]}")
        fake_p.answers = (first, *others)
        with system.example(), channel_to(system, "decode-0") as channel:
            running = generate(channel, pull_from(fake_p, FUZZ_P, "a pull"))
            with contextlib.suppress(queue.Empty):  # D waits before it dials again
                fake_p.hellos.get(timeout=BACKOFF_S)
            time.sleep(LAST_WORDS_S)
            end(running)

    target()


def response_of(payload: bytes) -> Message:
    return kv_pb2.KvLinkResponse.FromString(payload)
