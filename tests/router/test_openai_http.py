"""The OpenAI-compatible API as bytes on a socket."""

import asyncio
import json
import math
import re

import pytest

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.engine import ErrorCode, FinishReason, LogprobsLists
from pdserve_common.types.sampling_params import RepetitionDetectionParams
from pdserve_router.api.openai.parse import parse_body
from pdserve_router.api.openai.types import ChatCompletionBody, CompletionBody
from support.fake_worker import EOS, fails_with, hang
from support.router_stack import ANSWER_TEXT, events_of
from support.waiting import until

MANY = 1000
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 100}
NINETY_WRONG = dict.fromkeys(map(str, range(90)))
MANY_ENTRIES = dict.fromkeys(map(str, range(MANY)))


STACK = {"http": True}


async def test_a_completion(http) -> None:
    response = await http.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["text"] == ANSWER_TEXT
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert response.headers["pdserve-path"] == "disaggregated"
    assert float(response.headers["pdserve-ttft-ms"]) > 0


async def test_a_chat_completion(http) -> None:
    answer = (await http.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER_TEXT, "refusal": None}


async def test_a_stream_of_a_chat(http) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert text == ANSWER_TEXT
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_completion_has_sixteen_tokens_unless_told_otherwise(http, stack) -> None:
    await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
    await http.post("/v1/chat/completions", json=CHAT)
    limits = [request.task.sampling_params.max_tokens for request in stack.decode.requests]
    assert limits[0] == 16
    assert limits[1] > 4000


async def test_every_served_parameter_reaches_the_engine(http, stack) -> None:
    body = {
        **CHAT,
        "max_completion_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "n": 1,
        "best_of": 1,
        "stop": ["a", "b"],
        "seed": 5,
        "user": "u",
        "logprobs": True,
        "top_logprobs": 3,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -100, "6": 1.5},
        "response_format": {"type": "text"},
        "tools": None,
        "repetition_penalty": 1.25,
        "prompt_logprobs": 2,
        "bad_words": ["the"],
        "allowed_token_ids": [5, 6, 7],
        "logits_processors": [],
        "use_beam_search": False,
        "length_penalty": 1,
        "early_stopping": False,
        "repetition_detection": {"max_pattern_size": 8, "min_count": 3},
        "spaces_between_special_tokens": False,
        "top_k": 10**12,
        "min_p": 0.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "priority": 4,
        "cache_salt": "salt",
    }
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    request = stack.decode.requests[0]
    params = request.task.sampling_params
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.0, 0.5)
    assert (params.stop, params.seed, params.min_tokens) == (("a", "b"), 5, 2)
    assert (params.ignore_eos, params.stop_token_ids) == (True, (7,))
    assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
    assert params.top_k == stack.decode.info.vocab_size
    assert (params.logprobs, params.prompt_logprobs) == (3, 2)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (1.0, -0.5, 1.25)
    assert (params.logit_bias, params.allowed_token_ids) == ({5: -100.0, 6: 1.5}, (5, 6, 7))
    assert (params.bad_words, len(params.bad_words_token_ids)) == (("the",), 2)
    assert params.repetition_detection == RepetitionDetectionParams(max_pattern_size=8, min_count=3)
    assert not params.spaces_between_special_tokens
    assert (request.priority, request.cache_salt) == (4, "salt")


async def test_the_forms_of_a_message(http, stack, tokenizer) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "d"},
    ]
    response = await http.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert response.status_code == 200, response.text
    text = tokenizer.decode(stack.prefill.requests[0].prompt_token_ids)
    assert "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nc<|im_end|>" in text


PROMPT = "the café"


async def test_an_echo_begins_with_the_prompt(http, tokenizer) -> None:
    for prompt in (PROMPT, tokenizer.backend.encode(PROMPT).ids):
        for stream in (False, True):
            body = {**COMPLETION, "prompt": prompt, "echo": True, "stream": stream}
            response = await http.post("/v1/completions", json=body)
            answers = events_of(response.text) if stream else [response.json()]
            choices = [answer["choices"][0] for answer in answers]
            assert "".join(choice["text"] for choice in choices) == PROMPT + ANSWER_TEXT
            assert all(choice["logprobs"] is None for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_logprobs_has_those_of_the_prompt(http, tokenizer, stream) -> None:
    body = {**COMPLETION, "prompt": PROMPT, "echo": True, "logprobs": 1, "stream": stream}
    response = await http.post("/v1/completions", json=body)
    answers = events_of(response.text) if stream else [response.json()]
    choices = [answer["choices"][0] for answer in answers]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    joined = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    text = "".join(choice["text"] for choice in choices)
    prompt_ids = tokenizer.backend.encode(PROMPT).ids
    token_ids = [*prompt_ids, *tokenizer.backend.encode(ANSWER_TEXT).ids, EOS]
    assert joined["tokens"] == list(map(tokenizer.token_text, token_ids))
    assert joined["token_logprobs"] == [None, *(-i / 64 for i in token_ids[1:])]
    assert joined["top_logprobs"][0] is None
    top = tokenizer.token_text(4)
    assert joined["top_logprobs"][-1] == {"<|eos|>": -EOS / 64, top: -1.0}
    # Each token stands in the text where its offset says; EOS stands behind it.
    for offset, token in zip(joined["text_offset"][:-1], joined["tokens"][:-1], strict=True):
        assert text[offset:].startswith(token)
    assert joined["text_offset"][-1] == len(text)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_without_an_answer(http, stack, tokenizer, stream) -> None:
    body = {
        **COMPLETION,
        "prompt": PROMPT,
        "echo": True,
        "logprobs": 2,
        "max_tokens": 0,
        "stream": stream,
    }
    response = await http.post("/v1/completions", json=body)
    answers = events_of(response.text) if stream else [response.json()]
    assert "".join(answer["choices"][0]["text"] for answer in answers) == PROMPT
    prompt_ids = tokenizer.backend.encode(PROMPT).ids
    logprobs = answers[0]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, *(-i / 64 for i in prompt_ids[1:])]
    assert len(logprobs["top_logprobs"][1]) == 3
    assert answers[-1]["choices"][0]["finish_reason"] == "length"
    assert stack.decode.requests[0].task.sampling_params.max_tokens == 1
    if not stream:
        assert answers[0]["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_are_alternatives_by_token_id(http, tokenizer) -> None:
    prompt_ids = tokenizer.backend.encode(PROMPT).ids
    body = {**COMPLETION, "prompt": PROMPT, "prompt_logprobs": 2}
    answer = (await http.post("/v1/completions", json=body)).json()
    first, second, *_ = positions = answer["choices"][0]["prompt_logprobs"]
    assert (len(positions), first) == (len(prompt_ids), None)
    token_id = prompt_ids[1]
    assert second == {
        str(token_id): {
            "logprob": -token_id / 64,
            "rank": token_id,
            "decoded_token": tokenizer.token_text(token_id),
        },
        "4": {"logprob": -1.0, "rank": 1, "decoded_token": tokenizer.token_text(4)},
        "5": {"logprob": -2.0, "rank": 2, "decoded_token": tokenizer.token_text(5)},
    }
    assert answer["choices"][0]["logprobs"] is None
    answer = (await http.post("/v1/chat/completions", json={**CHAT, "prompt_logprobs": 0})).json()
    assert answer["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_a_loop_is_a_stop_with_its_own_reason(http, stack) -> None:
    async def loop(running) -> None:
        running.emit(5, at=0, finish=FinishReason.REPETITION)

    stack.decode.behave = loop
    answer = (await http.post("/v1/completions", json={**COMPLETION, "max_tokens": 1})).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")


async def test_impossible_tokens_have_a_finite_logprob(http, stack) -> None:
    """JSON has no infinity."""

    async def certain(running) -> None:
        logprobs = LogprobsLists(
            logprob_token_ids=((5, 6),), logprobs=((-math.inf, 0.0),), sampled_token_ranks=(2,)
        )
        running.emit(5, at=0, finish=FinishReason.LENGTH, new_logprobs=logprobs)

    stack.decode.behave = certain
    body = {**COMPLETION, "max_tokens": 1, "logprobs": 1}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]


# Of ranges one: others are in tests/common/test_validation.py.
BAD_COMPLETIONS = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ["a"] * 129}, 400, "prompt"),
    ({"prompt": ["a", 5]}, 400, "prompt"),
    ({"prompt": ["a", ""]}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": [5] * 5000}, 400, "prompt"),
    ({"prompt": [10**30]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"model": "other"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": 10**400}, 400, "temperature"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"stop": 5}, 400, "stop"),
    ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ({"bad_words": "x"}, 400, "bad_words"),
    ({"use_beam_search": 1}, 400, "use_beam_search"),
    ({"early_stopping": "always"}, 400, "early_stopping"),
    ({"repetition_detection": {}}, 400, "repetition_detection.max_pattern_size"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"top_logprobs": 1}, 400, "top_logprobs"),
    ({"echo": 1}, 400, "echo"),
    ({"n": 64, "max_tokens": 4000, "logprobs": 20}, 400, "logprobs"),
    ({"suffix": "s"}, 400, "suffix"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias[5]"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, 400, "logit_bias.5"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    ({"messages": []}, 400, "messages"),
    ({"max_tokens": 12.5}, 400, "max_tokens"),
    ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 4096}, 400, "truncate_prompt_tokens"),
    ({"seed": -(2**63) - 1}, 400, "seed"),
    ({"request_id": "x" * 300}, 400, "request_id"),
]
BAD_CHATS = [
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "content": 5}]}, 400, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        400,
        "messages[0].tool_calls[0].function",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0].image_url",
    ),
    ({"messages": [{"role": "user", "content": "forbidden"}]}, 400, "messages"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
    ({"logprobs": 1}, 400, "logprobs"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"echo": True}, 400, "echo"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"prompt": "x"}, 400, "prompt"),
    ({"add_special_tokens": True}, 400, "add_special_tokens"),
]


async def test_bad_bodies_are_refused_and_the_field_is_named(http, stack) -> None:
    cases = [("/v1/completions", COMPLETION, case) for case in BAD_COMPLETIONS]
    cases += [("/v1/chat/completions", CHAT, case) for case in BAD_CHATS]
    for path, good, (change, status, param) in cases:
        response = await http.post(path, json={**good, **change})
        assert response.status_code == status, (change, response.text)
        error = response.json()["error"]
        assert error["param"] == param, (change, error)
        assert error["type"] == "invalid_request_error"
        assert param.split("[")[0].split(".")[-1] in error["message"]
        assert error["code"] == ("model_not_found" if status == 404 else "invalid_argument")
    assert stack.prefill.requests == stack.decode.requests == []


@pytest.mark.parametrize(
    ("body", "change", "problem"),
    [
        (CompletionBody, {"stop": [1] * 16}, "stop: input should be a valid string"),
        (CompletionBody, {"stop_token_ids": ["x"] * 256}, "stop_token_ids[0]: input should be"),
        (CompletionBody, {"logit_bias": MANY_ENTRIES}, "logit_bias has 1000"),
        (CompletionBody, dict.fromkeys(map(str, range(MANY)), 0), "body has 1003 fields, at most"),
        (ChatCompletionBody, {"messages": [{}] * MANY}, "messages[0].role is missing"),
        (ChatCompletionBody, {"messages": [MANY_ENTRIES]}, "messages[0].role is missing"),
    ],
)
def test_of_many_mistakes_none_or_the_first_is_described(body, change, problem) -> None:
    """Nobody else is served meanwhile, and a body has room for millions."""
    good = COMPLETION if body is CompletionBody else CHAT
    with pytest.raises(InvalidRequestError, match=re.escape(problem)) as caught:
        parse_body(body, json.dumps({**good, **change}).encode())
    assert (caught.value.field or "body") == re.match(r"[\w.\[\]]+", problem)[0]
    found = caught.value.__cause__
    assert found is None or "many" in caught.value.message or found.error_count() <= 2


def test_of_many_wrong_fields_none_is_described() -> None:
    wrong = {name: {} for name in CompletionBody.model_fields} | {"logit_bias": NINETY_WRONG}
    with pytest.raises(InvalidRequestError, match=r"body has \d+ wrong fields, too many"):
        parse_body(CompletionBody, json.dumps(wrong).encode())


async def test_a_request_that_a_defect_keeps_from_its_workers_does_not_stay(
    http, stack, monkeypatch
) -> None:
    def broken(*args: object) -> None:
        raise ValueError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(
            "pdserve_router.workers.clients.worker_client.WorkerClient.add_request", broken
        )
        response = await http.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500
    await stack.assert_idle()
    assert stack.metric("pdserve_requests_total", model="tiny", outcome="error") == 1
    assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_body_that_does_not_come_ends_the_connection(start_stack) -> None:
    async with start_stack(http=True, body_timeout_s=0.05) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.server.http_port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
        )
        answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not come within 0.05 s" in answer
    writer.close()


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b'{"model": NaN}',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"model":"tiny","prompt":"\\ud800"}',
    b'{"temperature": Infinity}',
]


async def test_malformed_json_is_refused(http) -> None:
    for body in MALFORMED:
        response = await http.post("/v1/completions", content=body)
        assert response.status_code == 400, body
        assert response.json()["error"]["message"].startswith("body "), body


async def test_a_missing_field_is_named(http) -> None:
    for path, param in (("completions", "prompt"), ("chat/completions", "messages")):
        error = (await http.post(f"/v1/{path}", json={"model": "tiny"})).json()["error"]
        assert (error["param"], error["message"]) == (param, f"{param} is missing")


async def test_a_body_above_the_limit_is_refused(start_stack) -> None:
    async with start_stack(http=True, max_body_bytes=1000) as stack:
        big = {**COMPLETION, "prompt": "x" * 2000}
        response = await stack.api.post("/v1/completions", json=big)
        assert response.status_code == 413
        assert "at most 1000" in response.json()["error"]["message"]

        async def chunks():
            for _ in range(10):
                yield b"x" * 500

        response = await stack.api.post("/v1/completions", content=chunks())
        assert response.status_code == 413


async def test_unknown_paths_and_methods_are_errors_of_the_same_shape(http) -> None:
    response = await http.get("/v1/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"
    response = await http.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"] == "Method Not Allowed"


async def test_a_bad_request_id_is_refused_and_a_good_one_returned(http) -> None:
    headers = {"x-request-id": "mine"}
    response = await http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "cmpl-mine"
    headers = {"x-request-id": "x" * 300}
    response = await http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert response.json()["error"]["param"] == "request_id"


async def test_a_model_of_the_hub_keeps_its_name_with_a_slash(start_stack) -> None:
    name = "some-owner/Tiny.Model-1"
    async with start_stack(http=True, served_model_name=name, info={"model": name}) as stack:
        response = await stack.api.post("/v1/completions", json={**COMPLETION, "model": name})
        assert (response.status_code, response.json()["model"]) == (200, name)
        (model,) = (await stack.api.get("/v1/models")).json()["data"]
        assert model["id"] == name
        for path in (name, name.replace("/", "%2F")):
            assert (await stack.api.get(f"/v1/models/{path}")).json() == model
        metrics = {"model": name, "outcome": "stop"}
        await until(lambda: stack.metric("pdserve_requests_total", **metrics) == 1)


async def test_models_and_health(http, stack) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 4096)
    assert (await http.get("/v1/models/tiny")).json() == model
    assert (await http.get("/v1/models/other")).status_code == 404
    assert (await http.get("/health")).status_code == 200
    await stack.decode.stop()
    await until(lambda: not stack.server.router.is_ready)
    assert (await http.get("/health")).status_code == 503
    response = await http.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.OVERLOADED, 429, "rate_limit_error"),
        (ErrorCode.KV_TRANSFER_FAILED, 503, "server_error"),
        (ErrorCode.DEADLINE_EXCEEDED, 504, "server_error"),
        (ErrorCode.INTERNAL, 500, "server_error"),
    ],
)
async def test_a_failure_before_the_first_token_is_a_status(
    http, stack, stream, code, status, kind
) -> None:
    fail = fails_with(code, "broken", retry_after_ms=1500)
    stack.prefill.behave, stack.decode.behave = fail, hang
    response = await http.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": "broken",
        "type": kind,
        "param": None,
        "code": code.name.lower(),
    }
    assert response.headers["retry-after"] == "2"


async def test_a_failure_in_mid_stream_is_the_last_event(http, stack) -> None:
    async def fail(running) -> None:
        await until(lambda: stack.metric("pdserve_generation_tokens_total", model="tiny") == 1)
        running.fail(ErrorCode.KV_EXPIRED, "gone")

    stack.decode.behave = fail
    response = await http.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert response.status_code == 200
    first, last = [line for line in response.text.split("\n\n") if line]
    assert json.loads(first.removeprefix("data: "))["choices"][0]["finish_reason"] is None
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "kv_expired"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_aborts_both_legs(stack, stream) -> None:
    stack.decode.behave = hang
    if not stream:
        stack.prefill.behave = hang
    body = json.dumps({**COMPLETION, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.server.http_port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    await until(lambda: stack.decode.num_running == 1)
    if stream:
        assert await reader.readuntil(b"data: ")
    writer.close()
    await until(lambda: stack.prefill.aborted and stack.decode.aborted)


async def test_a_client_that_disconnects_in_its_body_is_no_error(stack, caplog) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", stack.server.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{")
    await until(lambda: stack.http.tasks)
    writer.close()
    await until(lambda: not stack.http.tasks and not stack.http.connections)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_hundred_streams_at_once(http) -> None:
    body = {**COMPLETION, "stream": True}

    async def one() -> str:
        response = await http.post("/v1/completions", json=body, timeout=60)
        return "".join(chunk["choices"][0]["text"] for chunk in events_of(response.text))

    assert set(await asyncio.gather(*(one() for _ in range(100)))) == {ANSWER_TEXT}
