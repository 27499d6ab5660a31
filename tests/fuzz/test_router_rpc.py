"""What the router serves over gRPC, called by somebody who does not mean well."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from constraints import proto_constraints
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st
from messages import Known, merged, messages, payloads
from rpc import GIVEN_UP, call, check, plans
from settings_of_fuzz import examples
from system import ADAPTERS, PoolingSystem, System

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2

MODEL = "pdserve-tiny"
INFERENCE = pb2.DESCRIPTOR.services_by_name["InferenceService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
METHODS = [*INFERENCE.methods, *HEALTH.methods, *REFLECTION.methods]
# They go on until their caller has had enough.
ENDLESS = ("Watch",)
# What is served, below what is drawn.
POOLING = core_pb2.PoolingParams(task="embed")
SAMPLING = core_pb2.SamplingParams(max_tokens=3)
SERVED: dict[str, tuple[Message, ...]] = {
    "Generate": (
        pb2.GenerateRequest(model=MODEL, text="a fox", sampling_params=SAMPLING),
        pb2.GenerateRequest(
            model=MODEL, tokens=pb2.TokenPrompt(token_ids=[5, 6, 7]), sampling_params=SAMPLING
        ),
        pb2.GenerateRequest(
            model=MODEL,
            chat=pb2.ChatPrompt(messages=[pb2.ChatMessage(role="user", content="a fox")]),
            sampling_params=SAMPLING,
        ),
    ),
    "Pool": (
        pb2.PoolRequest(model=MODEL, text="a fox", pooling_params=POOLING),
        pb2.PoolRequest(
            model=MODEL,
            pair=pb2.TextPair(text="a fox", text_pair="a dog"),
            pooling_params=POOLING,
        ),
        pb2.PoolRequest(
            model=MODEL, tokens=pb2.TokenPrompt(token_ids=[5, 6, 7]), pooling_params=POOLING
        ),
    ),
    "Tokenize": (pb2.TokenizeRequest(model=MODEL, text="a fox"),),
    "Detokenize": (pb2.DetokenizeRequest(model=MODEL, token_ids=[5, 6, 7]),),
}
KNOWN = Known(
    texts=(
        *(MODEL, *ADAPTERS, "user", "assistant", "system", INFERENCE.full_name, "liveness"),
        *("fox", " "),
    ),
    numbers=(2, 5, 125),
    parts={"pdserve.v1.StructuredOutputsParams": proto_constraints()},
)

CONSTRAINED = st.builds(
    lambda params: pb2.GenerateRequest(
        sampling_params=core_pb2.SamplingParams(structured_outputs=params)
    ),
    proto_constraints(),
)


@pytest.fixture
def channel(system: System) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(system.router_address) as channel:
        yield channel


def requests(method: MethodDescriptor) -> st.SearchStrategy[Message]:
    """Messages of a method, most of them on the way to be served."""
    drawn = messages(method.input_type, KNOWN)
    if method.name not in SERVED:
        return drawn
    served = st.sampled_from(SERVED[method.name])
    if method.name != "Generate":
        return st.one_of(drawn, merged(served, drawn))
    return st.one_of(drawn, merged(served, drawn), merged(served, CONSTRAINED))


def test_any_call_of_a_model_that_pools_is_answered_or_refused(
    pooling_system: PoolingSystem,
) -> None:
    method = INFERENCE.methods_by_name["Pool"]
    with grpc.insecure_channel(pooling_system.router_address) as channel:

        @examples(40)
        @given(plans(method, payloads(requests(method)), max_size=3))
        def target(plan: Any) -> None:
            with pooling_system.example():
                check(call(channel, method, plan), plan)

        target()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_any_call_is_answered_or_refused(
    system: System, channel: grpc.Channel, method: MethodDescriptor
) -> None:
    also: tuple[Any, ...] = tuple(GIVEN_UP) if method.name in ENDLESS else ()

    @examples(40 if method.name == "Generate" else 10)
    @given(plans(method, payloads(requests(method)), max_size=3))
    def target(plan: Any) -> None:
        if method.name in ENDLESS:
            plan = plan._replace(timeout_s=min(plan.timeout_s, 0.1))
        with system.example():
            check(call(channel, method, plan), plan, also=also)

    target()
