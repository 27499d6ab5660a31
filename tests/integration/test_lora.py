"""Adapters through router, P, NIXL and D: the tokens of merged weights, whoever dies."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_client.client import build_request
from pdserve_common.types.sampling_params import SamplingParams
from support.adapters import merged_greedy, write_adapter

NUM_TOKENS = 120
PROMPT = random.Random(0).choices(range(3, 290), k=75)
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TIMEOUT_S = 120.0


class Served(NamedTuple):
    stack: Any
    # By the adapter's name; "" is the model alone.
    expected: dict[str, list[int]]


@pytest.fixture(scope="module")
def served(
    make_served_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    start_stack: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    model = make_served_model("Qwen3ForCausalLM", max_position_embeddings=1024)
    folder = tmp_path_factory.mktemp("adapters")
    names = {"one": {"r": 8, "lora_alpha": 8}, "other": {"r": 16, "target_modules": ["v_proj"]}}
    paths = {
        name: write_adapter(model, folder / name, seed=seed, **config)  # type: ignore[arg-type]
        for seed, (name, config) in enumerate(names.items())
    }
    expected = {"": hf_greedy(model, PROMPT, NUM_TOKENS)}
    for name, path in paths.items():
        expected[name] = merged_greedy(model, path, PROMPT, NUM_TOKENS)
    assert len(set(map(tuple, expected.values()))) == 3
    with start_stack(
        model=model,
        dtype="float32",
        num_threads=1,
        decode=2,
        max_num_batched_tokens=32,
        lora=tuple(f"{name}={path}" for name, path in paths.items()),
    ) as stack:
        yield Served(stack, expected)
        stack.restore()


async def generate(
    stub: pb2_grpc.InferenceServiceStub, name: str, begun: asyncio.Event | None = None
) -> list[int]:
    request = build_request(PROMPT, PARAMS)
    request.lora_name = name
    tokens: list[int] = []
    async for response in stub.Generate(request, timeout=TIMEOUT_S):
        for completion in response.output.outputs:
            assert not completion.HasField("error"), completion.error
            tokens.extend(completion.token_ids)
        if begun is not None and len(tokens) > 5:
            begun.set()
    return tokens


async def test_tokens_are_those_of_merged_weights_and_no_prefix_is_another_s(
    served: Served,
) -> None:
    async with grpc.aio.insecure_channel(served.stack.grpc_address) as channel:
        stub = pb2_grpc.InferenceServiceStub(channel)
        names = ["", "one", "other"] * 3
        for name in names[:3] * 2:
            assert await generate(stub, name) == served.expected[name], name
        answers = await asyncio.gather(*(generate(stub, name) for name in names))
        for name, tokens in zip(names, answers, strict=True):
            assert tokens == served.expected[name], name
    assert served.stack.metrics("prefill-0")["pdserve_prefix_cache_hits_total"] > 0
    assert served.stack.metrics("router")['pdserve_handoffs_total{outcome="completed"}'] > 0
    served.stack.assert_idle()


async def test_adapters_are_models_to_openai_s_clients(served: Served) -> None:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{served.stack.http_port}", timeout=TIMEOUT_S
    ) as client:
        models = (await client.get("/v1/models")).json()["data"]
        base = models[0]["id"]
        assert {each["id"]: each.get("parent") for each in models} == {
            base: None,
            "one": base,
            "other": base,
        }
        assert (await client.get("/v1/models/one")).json()["parent"] == base
        texts = {}
        for name in (base, "one", "other"):
            body = {"model": name, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            texts[name] = answer.json()["choices"][0]["text"]
        assert len(set(texts.values())) == 3
        for body in ({"model": "unknown", "prompt": PROMPT}, {"model": "on", "prompt": PROMPT}):
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 404
            assert answer.json()["error"]["param"] == "model"
    async with grpc.aio.insecure_channel(served.stack.grpc_address) as channel:
        stub = pb2_grpc.InferenceServiceStub(channel)
        listed = await stub.ListModels(pb2.ListModelsRequest())
        assert [(each.id, each.parent) for each in listed.models][1:] == [
            ("one", base),
            ("other", base),
        ]
        with pytest.raises(grpc.aio.AioRpcError, match="'unknown' is no adapter"):
            await generate(stub, "unknown")


async def test_adapters_of_fused_linears_on_the_transformers_backend(
    make_served_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    start_stack: Any,
    tmp_path: Path,
) -> None:
    model = make_served_model("Phi3ForCausalLM", max_position_embeddings=1024, pad_token_id=0)
    linears = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    path = write_adapter(model, tmp_path / "one", target_modules=linears)
    expected = {
        "": hf_greedy(model, PROMPT, NUM_TOKENS),
        "one": merged_greedy(model, path, PROMPT, NUM_TOKENS),
    }
    assert expected[""] != expected["one"]
    names = ["", "one"] * 2
    with start_stack(
        model=model,
        dtype="float32",
        num_threads=1,
        max_num_batched_tokens=32,
        lora=(f"one={path}",),
    ) as stack:
        async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
            stub = pb2_grpc.InferenceServiceStub(channel)
            answers = await asyncio.gather(*(generate(stub, name) for name in names))
        assert stack.metrics("router")['pdserve_handoffs_total{outcome="completed"}'] == len(names)
        stack.assert_idle()
    for name, tokens in zip(names, answers, strict=True):
        assert tokens == expected[name], name
