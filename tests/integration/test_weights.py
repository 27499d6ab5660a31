"""A pool answers with one set of weights, whatever else is in its lists."""

import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.samples import sampled

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
BEAMS = SamplingParams(temperature=0.0, max_tokens=8, n=3, use_beam_search=True)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
# Takes longer than the update.
LONGEST = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


def copy_model(source: Path, folder: Path, *, retrained: bool) -> Path:
    """Return a copy under the same name, with the same tokenizer and perhaps other weights."""
    copy = folder / "tiny"
    shutil.copytree(source, copy)
    if retrained:
        generator = torch.Generator().manual_seed(1)
        weights = {
            name: value + 0.1 * value.abs().mean() * torch.randn(value.shape, generator=generator)
            for name, value in load_file(copy / "model.safetensors").items()
        }
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def questions() -> list[tuple[list[int], SamplingParams]]:
    """24 of one token, 8 beam searches and 8 that cross the handoff."""
    rng = random.Random(5)
    params = [GREEDY] * 24 + [BEAMS] * 8 + [LONG] * 8
    return [([rng.randrange(3, 190) for _ in range(24)], each) for each in params]


async def answers_of(client: AsyncClient) -> list[list[list[int]]]:
    """Return each question's tokens, completion by completion."""
    return [await answer_of(client, *question) for question in questions()]


async def answer_of(
    client: AsyncClient, prompt: list[int], params: SamplingParams
) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(params.n)]
    async for output in client.generate(prompt, params, timeout_s=60):
        for completion in output.outputs:
            assert not completion.HasField("error"), completion.error
            tokens[completion.index] += completion.token_ids
    return tokens


@contextlib.asynccontextmanager
async def client_of(stack: Any) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(stack.grpc_address)
    try:
        yield client
    finally:
        await client.close()


def num_wrong(found: Sequence[object], expected: Sequence[object]) -> dict[str, int]:
    wrong = [a != b for a, b in zip(found, expected, strict=True)]
    return {"one token": sum(wrong[:24]), "beams": sum(wrong[24:32]), "handoff": sum(wrong[32:])}


NONE_WRONG = {"one token": 0, "beams": 0, "handoff": 0}


@pytest.mark.parametrize("other", sampled(["retrained", "float32"], "retrained"))
async def test_other_weights_answer_nothing_until_they_take_over(
    make_served_model: Callable[..., Path],
    start_stack: Any,
    start_router: Any,
    tmp_path: Path,
    other: str,
) -> None:
    """Same name, same tokenizer; then the real update, worker by worker."""
    source = make_served_model("LlamaForCausalLM", max_position_embeddings=8192)
    models = [
        copy_model(source, tmp_path / name, retrained=name == "new" and other == "retrained")
        for name in ("old", "new")
    ]
    dtype = "float32" if other == "float32" else "bfloat16"
    names = {name: ["--engine-id", f"new-{name}"] for name in ("prefill-0", "decode-0")}
    with (
        start_stack(model=models[0], dtype="bfloat16", num_threads=1) as old,
        start_stack(model=models[1], dtype=dtype, num_threads=1, flags=names) as new,
    ):
        prompt, _ = questions()[-1]
        async with client_of(old) as client:
            expected_old = await answers_of(client)
            expected_long = await answer_of(client, prompt, LONGEST)
        async with client_of(new) as client:
            expected_new = await answers_of(client)
        assert any(num_wrong(expected_new, expected_old).values()), "they tell nothing apart"
        lists = {role: tmp_path / role for role in ("prefill", "decode")}

        def write(role: str, *stacks: Any) -> None:
            ports = [w.port for stack in stacks for w in stack.workers if w.name == f"{role}-0"]
            file = lists[role].with_suffix(".new")
            file.write_text("".join(f"127.0.0.1:{port}\n" for port in ports))
            file.replace(lists[role])

        for role in lists:
            write(role, old)
        sources = {role: f"file://{path}" for role, path in lists.items()}
        async with start_router(old, **sources) as routed:
            await routed.until(1, "pdserve_worker_pairs", state="proven")
            write("decode", old, new)
            await routed.until(1, "pdserve_workers", role="decode", state="mismatched")
            assert num_wrong(await answers_of(routed.client), expected_old) == NONE_WRONG
            write("prefill", old, new)
            await routed.until(2, "pdserve_worker_pairs", state="proven")
            assert num_wrong(await answers_of(routed.client), expected_old) == NONE_WRONG
            # An answer that has begun, while all others of its weights are sent away.
            stream = routed.client.generate(prompt, LONGEST, timeout_s=60)
            begun = [token async for token in first_tokens(stream)]
            write("decode", new)
            await routed.until(0, "pdserve_workers", role="decode", state="mismatched")
            assert num_wrong(await answers_of(routed.client), expected_new) == NONE_WRONG
            write("prefill", new)
            await routed.until(0, "pdserve_workers", role="prefill", state="mismatched")
            begun += [token async for token in all_tokens(stream)]
            assert begun == expected_long[0]
            assert num_wrong(await answers_of(routed.client), expected_new) == NONE_WRONG


async def first_tokens(stream: Any) -> Any:
    async for output in stream:
        for completion in output.outputs:
            for token in completion.token_ids:
                yield token
        if any(completion.token_ids for completion in output.outputs):
            return


async def all_tokens(stream: Any) -> Any:
    async for output in stream:
        for completion in output.outputs:
            for token in completion.token_ids:
                yield token
