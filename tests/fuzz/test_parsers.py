"""What reads clients' input, by itself: many inputs in a second. They are refused, or read."""

import contextlib
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from json_bodies import bodies
from messages import merged, messages
from settings_of_fuzz import examples
from test_http import CHAT, COMPLETIONS, served_bodies

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common.engine_types import EngineCoreRequest, EngineInfo, WorkerRole
from pdserve_common.errors import AdapterNotHeldError, InvalidRequestError
from pdserve_common.validation import validate_engine_core_request
from pdserve_common.wire import (
    from_proto,
    kv_link_request_from_proto,
    kv_link_response_from_proto,
)
from pdserve_router.api.openai_parse import parse_body
from pdserve_router.api.openai_types import ChatCompletionBody, CompletionBody

SERVED = core_pb2.EngineCoreRequest(
    request_id="a", prompt_token_ids=[5, 6, 7], sampling_params=core_pb2.SamplingParams()
)
INFO = EngineInfo(
    engine_id="d",
    epoch="0" * 32,
    role=WorkerRole.DECODE,
    model="m",
    max_model_len=128,
    vocab_size=1392,
    block_size=16,
    num_blocks=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    dtype="float32",
    eos_token_ids=(2,),
    kv_compatibility_hash="",
    kv_transport="any",
    determinism="exact",
    numerics_id="",
    version="",
)


@pytest.mark.parametrize(
    ("path", "cls"), [(COMPLETIONS, CompletionBody), (CHAT, ChatCompletionBody)]
)
def test_a_body_is_read_or_refused(path: str, cls: Any) -> None:
    @examples(100)
    @given(bodies(served_bodies(path)))
    def target(raw: bytes) -> None:
        with contextlib.suppress(InvalidRequestError):
            body, _ = parse_body(cls, raw)
            body.prompt_inputs()
            body.sampling_params()

    target()


def test_a_request_of_a_router_is_read_or_refused() -> None:
    descriptor = core_pb2.EngineCoreRequest.DESCRIPTOR

    @examples(100)
    @given(merged(st.just(SERVED), messages(descriptor)))
    def target(message: core_pb2.EngineCoreRequest) -> None:
        with contextlib.suppress(InvalidRequestError, AdapterNotHeldError):
            validate_engine_core_request(from_proto(EngineCoreRequest, message), INFO)

    target()


@pytest.mark.parametrize(
    ("cls", "read"),
    [
        (kv_pb2.KvLinkRequest, kv_link_request_from_proto),
        (kv_pb2.KvLinkResponse, kv_link_response_from_proto),
    ],
    ids=["from D", "from P"],
)
def test_a_message_of_a_kv_link_is_read_or_refused(cls: Any, read: Any) -> None:
    @examples(50)
    @given(messages(cls.DESCRIPTOR))
    def target(message: Message) -> None:
        with contextlib.suppress(InvalidRequestError):
            read(message)

    target()
