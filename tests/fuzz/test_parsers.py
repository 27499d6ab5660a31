"""What reads clients' input, by itself: many inputs in a second. They are refused, or read."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from byte_mutations import mutated
from constraints import constraints
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from json_bodies import bodies
from messages import merged, messages
from prometheus_client import CollectorRegistry
from safetensors.torch import save
from settings_of_fuzz import examples
from system import ANSWER_S
from test_http import CHAT, COMPLETIONS, VECTORS, served_bodies, vector_bodies

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common.errors import AdapterNotHeldError, InvalidRequestError, OverloadedError
from pdserve_common.limits.request_validation import validate_engine_core_request
from pdserve_common.metrics.tensors import TensorMetrics
from pdserve_common.types.engine import EngineCoreRequest, EngineInfo, WorkerRole
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_common.types.tensors import tensor_ref
from pdserve_common.wire import (
    from_proto,
    kv_link_request_from_proto,
    kv_link_response_from_proto,
    to_proto,
)
from pdserve_engine.grammar.compile_queue import GrammarCompiler
from pdserve_engine.grammar.native import Matcher
from pdserve_engine.grammar.vocabulary import make_tokenizer_info
from pdserve_engine.lora.adapter import read_adapter
from pdserve_engine.lora.adapter_config import CONFIG_FILE, WEIGHTS_FILE, LoraError
from pdserve_router.api.openai.parse import check_names, json_object, parse_body, validate
from pdserve_router.api.openai.types import ChatCompletionBody, CompletionBody
from pdserve_router.text.picture_files import Resizing, rgb_pixels
from pdserve_worker.tensor_service import receive_tensor
from pdserve_worker.tensor_store import TensorStore
from support.grammars import EOS, MODEL, VOCAB_SIZE
from support.picture_files import encoded, make_picture

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
    modalities=("image",),
)
PIXELS = bytes(range(12))
PUT = service_pb2.PutTensorRequest(ref=to_proto(tensor_ref("uint8", (2, 2, 3), PIXELS)))
RESIZING = Resizing(shortest_edge=8, resample=3, crop_width=8, crop_height=8)
PICTURES = [
    encoded(make_picture(20, 30, mode=mode), kind)
    for mode, kind in (("P", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG"), ("RGBA", "WEBP"))
]
# Of what a compiled constraint lets pass.
MAX_TOKENS = 20
Q = "model.layers.0.self_attn.q_proj"
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
# What files of pictures are made of.
CHUNKS = (b"IHDR", b"IDAT", b"IEND", b"acTL", b"tRNS", b"eXIf", b"VP8X", b"ANIM", b"\xff\xd9")


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


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, (body, _) in VECTORS.items()])
def test_a_body_for_vectors_is_read_or_refused(path: str, body: Any) -> None:
    @examples(100)
    @given(bodies(vector_bodies(path)))
    def target(raw: bytes) -> None:
        with contextlib.suppress(InvalidRequestError):
            values = json_object(raw)
            check_names(body, values)
            validate(body, values)

    target()


def test_a_picture_is_read_or_refused() -> None:
    @examples(100)
    @given(mutated(st.sampled_from(PICTURES), CHUNKS))
    def target(data: bytes) -> None:
        with contextlib.suppress(InvalidRequestError):
            assert len(rgb_pixels(data, RESIZING, "field")) == 8 * 8 * 3

    target()


def test_a_tensor_is_taken_or_refused() -> None:
    drawn = messages(service_pb2.PutTensorRequest.DESCRIPTOR)
    near = st.one_of(merged(st.just(PUT), drawn), drawn, st.just(PUT))
    rest = st.lists(
        st.one_of(st.just(service_pb2.PutTensorRequest(chunk=PIXELS[:6])), drawn), max_size=3
    )

    @examples(100)
    @given(near, rest)
    def target(first: Any, others: list[Any]) -> None:
        async def arriving() -> AsyncIterator[Any]:
            for message in (first, *others):
                yield message

        store = TensorStore(1 << 26, TensorMetrics(CollectorRegistry()))
        with contextlib.suppress(InvalidRequestError):
            asyncio.run(receive_tensor(arriving(), store, client="a"))
            assert store.num_bytes

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


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    info = make_tokenizer_info(MODEL, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    compiler = GrammarCompiler(info)
    yield compiler
    compiler.close()


def test_a_constraint_is_compiled_or_refused(compiler: GrammarCompiler) -> None:
    """What is compiled lets tokens pass, of which each is accepted."""

    @examples(100)
    @given(constraints(), st.randoms(use_true_random=False))
    def target(constraint: dict[str, Any], random: Random) -> None:
        with contextlib.suppress(InvalidRequestError, OverloadedError):
            params = StructuredOutputsParams(**constraint)
            matcher = Matcher(compiler.compile(params).result(ANSWER_S))
            bitmask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
            for _ in range(MAX_TOKENS):
                matcher.fill(bitmask)
                bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
                assert matcher.accept(random.choice(np.flatnonzero(bits).tolist()))
                if matcher.is_terminated:
                    break

    target()


def test_an_adapter_is_read_or_refused(tmp_path: Path) -> None:
    saved = save({f"base_model.model.{Q}.lora_{x}.weight": torch.ones(4, 4) for x in "AB"})
    files = {CONFIG_FILE: json.dumps(ADAPTER).encode(), WEIGHTS_FILE: saved}
    words = [b'"r": 1', b"99999999", b"null", b"[", b"{", b'"F32"', b'"data_offsets":[0,']

    @examples(100)
    @given(st.sampled_from(sorted(files)), st.data())
    def target(name: str, data: st.DataObject) -> None:
        for each, content in files.items():
            (tmp_path / each).write_bytes(content)
        (tmp_path / name).write_bytes(data.draw(mutated(st.just(files[name]), words)))
        with contextlib.suppress(LoraError):
            adapter = read_adapter(tmp_path, {Q: (4, 4)}, dtype=torch.float32, max_rank=8)
            assert adapter.modules[Q].a.shape == (adapter.rank, 4)

    target()
