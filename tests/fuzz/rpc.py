"""Calls of gRPC methods with whatever bytes, and what may come back."""

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import note
from hypothesis import strategies as st

# Of a call that ends by itself, however busy the machine is.
ANSWER_S = 60.0
# After so long some callers have had enough.
IMPATIENT_S = (0.01, 0.1, 0.3)

Metadata = tuple[tuple[str, str | bytes], ...]

# What a call may end with, whatever was sent. INTERNAL and UNKNOWN would say that the service has
# failed, UNAVAILABLE that it is not there.
CLIENTS_FAULT = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
# What an impatient caller makes of it.
GIVEN_UP = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED})


class Plan(NamedTuple):
    """What a caller sends, and how long it waits. Without half-closing it says never that this is
    all.
    """

    payloads: tuple[bytes, ...]
    metadata: Metadata
    half_closes: bool
    timeout_s: float


class Outcome(NamedTuple):
    """How a call ended, and the messages before."""

    code: grpc.StatusCode
    details: str
    messages: tuple[Message, ...]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def metadata() -> st.SearchStrategy[Metadata]:
    """What clients of gRPC can send at all: keys and values beyond it they refuse themselves."""
    names = st.sampled_from(
        ["traceparent", "tracestate", "authorization", "x-request-id", "a", "x" * 200, "te2", "-"]
    )
    visible = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)
    texts = st.tuples(names, st.one_of(visible, visible.map(lambda text: text * 30)))
    binary = st.tuples(names.map(lambda name: f"{name}-bin"), st.binary(max_size=100))
    return st.lists(st.one_of(texts, binary), max_size=3).map(tuple)


def plans(
    method: MethodDescriptor, payload: st.SearchStrategy[bytes], *, max_size: int
) -> st.SearchStrategy[Plan]:
    """One message for a method that takes one, and now and then none or two; up to `max_size` for
    one that takes a stream.
    """
    one = st.tuples(payload)
    stream = st.lists(payload, max_size=max_size).map(tuple)
    sent = stream if method.client_streaming else st.one_of(one, one, one, one, stream)
    patient, impatient = st.just((True, ANSWER_S)), st.sampled_from(IMPATIENT_S)
    ends = st.one_of(patient, patient, patient, st.tuples(st.booleans(), impatient))
    return st.tuples(sent, metadata(), ends).map(lambda p: Plan(p[0], p[1], *p[2]))


def call(channel: grpc.Channel, method: MethodDescriptor, plan: Plan) -> Outcome:
    """Carry out a plan. Whatever the method is, the bytes go out as a stream: on the wire there is
    no difference.
    """
    done = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from plan.payloads
        if not plan.half_closes:
            done.wait()

    note(f"{path_of(method)}: {[payload.hex() for payload in plan.payloads]}")
    answers = GetMessageClass(method.output_type)
    stub = channel.stream_stream(path_of(method), response_deserializer=answers.FromString)
    received = []
    running = stub(requests(), timeout=plan.timeout_s, metadata=plan.metadata)
    try:
        for message in running:
            received.append(message)
    except grpc.RpcError:
        pass
    finally:
        running.cancel()
        done.set()
    return Outcome(running.code(), running.details() or "", tuple(received))


def check(outcome: Outcome, plan: Plan, *, also: Sequence[grpc.StatusCode] = ()) -> None:
    """The call ended as it may, `also` with what the target says."""
    may_give_up = plan.timeout_s < ANSWER_S
    allowed = CLIENTS_FAULT | frozenset(also) | (GIVEN_UP if may_give_up else frozenset())
    assert outcome.code in allowed, outcome
    for message in outcome.messages:
        check_errors(message)


def check_errors(message: Message) -> None:
    """No error in an answer says that the service has failed."""
    if message.DESCRIPTOR.full_name == "pdserve.v1.EngineError":
        code = message.DESCRIPTOR.fields_by_name["code"].enum_type.values_by_number[message.code]
        assert code.name not in FAILURES, message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            check_errors(part)


FAILURES = ("ERROR_CODE_UNSPECIFIED", "ERROR_CODE_INTERNAL", "ERROR_CODE_ENGINE_DEAD")
