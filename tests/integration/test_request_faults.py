"""Requests that fail by their own fault, between honest ones: nobody else notices."""

import asyncio
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams

# Of the served model's tokenizer, a byte each.
EOS = 1
# Several blocks, so that it crosses the handoff.
PROMPT = "honest " * 12
HONEST = {
    "prompt": PROMPT,
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}
# Ban every token of the first step.
BANNING = (
    {"allowed_token_ids": [EOS], "min_tokens": 2},
    {"allowed_token_ids": [EOS, 70], "stop_token_ids": [70], "min_tokens": 1},
    {"bad_words": ["a"], "min_tokens": 2, "allowed_token_ids": "a"},
)


@pytest.fixture
async def http(stack: Any) -> Any:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{stack.http_port}", timeout=120
    ) as client:
        yield client


@pytest.fixture
def a(stack: Any) -> int:
    """The token of "a"."""
    tokenizer = Tokenizer.from_file(f"{stack.config.model}/tokenizer.json")
    (token_id,) = tokenizer.encode("a", add_special_tokens=False).ids
    return token_id


async def complete(http: httpx.AsyncClient, **fields: object) -> httpx.Response:
    (model,) = (await http.get("/v1/models")).json()["data"]
    return await http.post("/v1/completions", json=HONEST | {"model": model["id"]} | fields)


def assert_nobody_was_blamed(stack: Any, num_redrives: float) -> None:
    samples = stack.metrics("router")
    failing = [samples[f'pdserve_workers_failing{{role="{r}"}}'] for r in ("prefill", "decode")]
    assert failing == [0, 0]
    assert samples['pdserve_worker_pairs{state="failed"}'] == 0
    assert num_redrives_of(stack) == num_redrives


def num_redrives_of(stack: Any) -> float:
    samples = stack.metrics("router")
    return sum(v for name, v in samples.items() if name.startswith("pdserve_redrives_total"))


@pytest.mark.parametrize("fields", BANNING, ids=str)
@pytest.mark.parametrize("prompt", ["a", PROMPT], ids=["decode alone", "prefill and decode"])
async def test_parameters_that_ban_every_token_are_refused_by_name(
    stack: Any, http: httpx.AsyncClient, a: int, prompt: str, fields: dict[str, Any]
) -> None:
    fields = fields | ({"allowed_token_ids": [a]} if fields["allowed_token_ids"] == "a" else {})
    num_redrives = num_redrives_of(stack)
    first = await complete(http)
    assert first.status_code == 200, first.text
    honest = first.json()["choices"][0]["text"]
    for _ in range(3):
        # Three in a row, then a few at once beside honest ones.
        for _ in range(3):
            answer = await complete(http, **fields, prompt=prompt, ignore_eos=False, max_tokens=2)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "allowed_token_ids" in error["message"]
            assert error["param"] == "allowed_token_ids"
        answers = await asyncio.gather(*(complete(http) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {honest}
    assert_nobody_was_blamed(stack, num_redrives)
    assert (await http.get("/health")).status_code == 200


async def test_a_ban_at_run_time_ends_only_its_request(
    stack: Any, http: httpx.AsyncClient, a: int
) -> None:
    """Only "a" is allowed, and "aa" is a bad word: behind the first token nothing is left."""
    fields = {"allowed_token_ids": [a], "bad_words": ["aa"], "max_tokens": 8}
    num_redrives = num_redrives_of(stack)
    first = await complete(http)
    assert first.status_code == 200, first.text
    honest = first.json()["choices"][0]["text"]
    for _ in range(3):
        answers = await asyncio.gather(
            *(complete(http, **fields) for _ in range(3)), *(complete(http) for _ in range(4))
        )
        assert [answer.status_code for answer in answers] == [400] * 3 + [200] * 4
        for answer in answers[:3]:
            assert "no token is left to choose" in answer.json()["error"]["message"]
        assert {answer.json()["choices"][0]["text"] for answer in answers[3:]} == {honest}
        assert_nobody_was_blamed(stack, num_redrives)
    for name in stack.worker_names():
        assert "a step failed" not in stack.log(name)


async def test_a_stream_that_bans_itself_keeps_the_tokens_it_had(stack: Any, a: int) -> None:
    params = SamplingParams(
        allowed_token_ids=(a,), bad_words=("aaa",), max_tokens=8, temperature=0.0
    )
    client = AsyncClient(stack.grpc_address)
    try:
        outputs = [o async for o in client.generate(PROMPT, params, timeout_s=60)]
    finally:
        await client.close()
    completions = [completion for output in outputs for completion in output.outputs]
    assert [token for c in completions for token in c.token_ids] == [a, a]
    error = completions[-1].error
    assert (error.code, error.fault) == (2, 1), error  # INVALID_ARGUMENT, REQUEST
    assert not error.retryable
