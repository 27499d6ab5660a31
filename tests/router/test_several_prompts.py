"""Several prompts in one request to /v1/completions."""

import asyncio
import json

import pytest

from pdserve_common.types.engine import ErrorCode
from support.fake_worker import all_behave, decode, hang, prefill
from support.router_stack import ANSWER_TEXT
from support.waiting import until

BODY = {"prompt": ["a", "bb", [5, 6, 7]], "max_tokens": 100}


STACK = {"http": True}


def texts_of(chunks: list) -> dict[int, str]:
    """Text by choice."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def stream(http, **fields) -> list:
    response = await http.post("/v1/completions", json={**BODY, "stream": True, **fields})
    assert response.status_code == 200, response.text
    *lines, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    return list(map(json.loads, lines))


async def test_choices_count_on_from_prompt_to_prompt(http, stack) -> None:
    response = await http.post("/v1/completions", json={**BODY, "n": 2, "echo": True})
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"].removesuffix(ANSWER_TEXT) for choice in answer["choices"]]
    assert texts[:4] == ["a", "a", "bb", "bb"]
    requests = stack.decode.requests
    first = [each for each in requests if each.request_id.startswith("0_")]
    assert len(requests) == 6
    assert answer["usage"]["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in first)
    num_tokens = len(stack.decode.answer) + 1
    assert answer["usage"]["completion_tokens"] == 6 * num_tokens
    # The seed that is told is every prompt's.
    assert {each.task.sampling_params.seed for each in first} == {
        int(response.headers["pdserve-seed"])
    }


async def test_a_stream_of_several(http) -> None:
    options = {"include_usage": True, "include_metrics": True, "continuous_usage_stats": True}
    chunks = await stream(http, stream_options=options, echo=True)
    assert texts_of(chunks).keys() == {0, 1, 2}
    assert texts_of(chunks)[1] == "bb" + ANSWER_TEXT
    ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert ends == ["stop"] * 3
    last = chunks[-1]
    assert last["choices"] == []
    per_choice = {c["choices"][0]["index"]: c["usage"] for c in chunks[:-1]}
    for name in ("prompt_tokens", "completion_tokens"):
        assert last["usage"][name] == sum(usage[name] for usage in per_choice.values())
    assert last["metrics"]["e2e_ms"] > 0


async def test_each_choice_has_its_own_prompts_tokens_and_logprobs(http, tokenizer) -> None:
    body = {**BODY, "return_token_ids": True, "prompt_logprobs": 0, "logprobs": 0}
    answer = (await http.post("/v1/completions", json=body)).json()
    prompts = [tokenizer.backend.encode("a").ids, tokenizer.backend.encode("bb").ids, [5, 6, 7]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == list(
        map(len, prompts)
    )


async def test_prompts_are_scored_together(http) -> None:
    body = {**BODY, "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"][:2]] == ["a", "bb"]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize("late", [False, True])
async def test_one_that_fails_ends_all(http, stack, as_stream, late) -> None:
    """With a status as long as nothing was sent."""
    hung = asyncio.Event()

    async def fail_one(running) -> None:
        if len(running.request.prompt_token_ids) != 3:
            await (decode(running) if late else hung.wait())
            return
        if late:
            done = "pdserve_requests_total"
            await until(lambda: stack.metric(done, model="tiny", outcome="stop") == 2)
        running.fail(ErrorCode.INTERNAL)

    async def first_token(running) -> None:
        if len(running.request.prompt_token_ids) != 3:
            await (prefill(running) if late else hung.wait())

    stack.prefill.behave, stack.decode.behave = first_token, fail_one
    response = await http.post("/v1/completions", json={**BODY, "stream": as_stream})
    if as_stream and late:
        assert response.status_code == 200
        last = response.text.split("\n\n")[-2].removeprefix("data: ")
        assert json.loads(last)["error"]["message"] == "broken on purpose"
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "broken on purpose"


async def test_a_client_that_leaves_ends_all(http, stack) -> None:
    all_behave(stack.workers, hang)
    leaving = asyncio.create_task(http.post("/v1/completions", json=BODY))
    await until(lambda: stack.server.router.num_in_flight == 3)
    leaving.cancel()
    await until(lambda: stack.server.router.num_in_flight == 0)


async def test_one_that_is_wrong_refuses_all(http, stack) -> None:
    for prompts in (["a", ""], ["a", [10**6]], ["a", 5], ["a", [1.5]]):
        response = await http.post("/v1/completions", json={**BODY, "prompt": prompts})
        assert response.status_code == 400, prompts
        assert response.json()["error"]["param"] == "prompt"
    assert stack.decode.requests == []


async def test_each_takes_a_place_in_the_queue(start_stack) -> None:
    async with start_stack(http=True, max_num_queued_requests=4) as stack:
        body = {**BODY, "prompt": ["a"] * 5}
        response = await stack.api.post("/v1/completions", json=body)
        assert response.status_code == 429
        assert "4 more arrive, at most 4 may" in response.json()["error"]["message"]
        response = await stack.api.post("/v1/completions", json={**BODY, "prompt": ["a"] * 4})
        assert response.status_code == 200


async def test_the_logprobs_of_all_fit_into_one_answer(http) -> None:
    body = {**BODY, "prompt": ["a"] * 128, "logprobs": 20, "max_tokens": 4000}
    response = await http.post("/v1/completions", json=body)
    assert response.json()["error"]["param"] == "logprobs"
