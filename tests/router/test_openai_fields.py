"""Fields of clients: unknown ones, those without effect, those refused, and vLLM's own."""

import logging

import pytest
from fake_model import copy_with_template

from pdserve_router.api.openai.fields import (
    MAX_NAMES,
    MESSAGE_WITHOUT_EFFECT,
    REFUSED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGE,
    WITHOUT_EFFECT,
)
from pdserve_router.requests.records.request_metrics import RequestMetrics
from pdserve_router.text.tokenizer import Tokenizer
from support.router_stack import ANSWER_TEXT, events_of

QUESTION = {"role": "user", "content": "hello"}
CHAT = {"model": "tiny", "messages": [QUESTION]}
COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 100}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
# More than any field takes.
ODD_VALUES = (None, True, 5, 1.5, "x", "", [], ["x"], {}, {"a": "b"})

both_endpoints = pytest.mark.parametrize("path", PATHS)


STACK = {"http": True}


async def answer_to(http, path: str, **changes) -> dict:
    response = await http.post(path, json={**PATHS[path], **changes})
    assert response.status_code == 200, (changes, response.text)
    return response.json()


async def refusal_of(http, path: str, **changes) -> str:
    response = await http.post(path, json={**PATHS[path], **changes})
    assert response.status_code == 400, (changes, response.text)
    return response.json()["error"]["param"]


def text_of(answer: dict) -> str:
    (choice,) = answer["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def prompts_of(stack) -> list:
    return [request.prompt_token_ids for request in stack.decode.requests]


@both_endpoints
async def test_an_unknown_field_is_ignored_counted_and_logged_once(
    http, stack, path, caplog
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = await answer_to(http, path, temprature=1, enable_thinking=True)
            assert text_of(answer) == ANSWER_TEXT
    for name in ("temprature", "enable_thinking"):
        assert stack.metric("pdserve_http_unknown_fields_total", field=name) == 2
        assert sum(name in record.getMessage() for record in caplog.records) == 1


async def test_unknown_fields_within_others_are_named_by_their_place(http, stack) -> None:
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    await answer_to(
        http,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [part], "mood": "good"}],
        stream_options=None,
        repetition_detection={"max_pattern_size": 4, "x": 1},
    )
    for name in ("messages.mood", "messages.content.cache_control", "repetition_detection.x"):
        assert stack.metric("pdserve_http_unknown_fields_total", field=name) == 1


def counts_of(stack) -> dict[str, float]:
    (family,) = [
        each
        for each in stack.server.registry.collect()
        if each.name == "pdserve_http_unknown_fields"
    ]
    return {
        sample.labels["field"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def test_names_of_unknown_fields_are_bounded(http, stack, caplog) -> None:
    """Of one request, in length, and in all: a client makes them up."""
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            names = {f"{number}-{i}-{'x' * 1000}": 1 for i in range(50)}
            await answer_to(http, "/v1/completions", **names)
    counts = counts_of(stack)
    assert len(counts) == MAX_NAMES + 1
    assert max(map(len, counts)) <= 64
    assert counts["other"] > 0
    assert len(caplog.records) == MAX_NAMES


async def test_names_of_unknown_fields_beside_adapters_are_bounded(start_stack) -> None:
    async with start_stack(http=True, lora_updates=True) as stack:
        names = {f"{i}-{'x' * 1000}": 1 for i in range(MAX_NAMES)}
        await stack.api.post("/v1/unload_lora_adapter", json={"lora_name": "a", **names})
        counts = counts_of(stack)
    assert 1 < len(counts) < MAX_NAMES / 2
    assert max(map(len, counts)) <= 64


@both_endpoints
async def test_what_has_no_effect_is_taken_with_any_value(http, stack, path) -> None:
    for value in ODD_VALUES:
        answer = await answer_to(http, path, **dict.fromkeys(WITHOUT_EFFECT, value))
        assert text_of(answer) == ANSWER_TEXT
    assert len(set(prompts_of(stack))) == 1
    assert stack.metric("pdserve_http_unknown_fields_total", field="other") == 0


@both_endpoints
async def test_what_is_not_served_is_refused_by_name_unless_it_asks_for_nothing(
    http, stack, path
) -> None:
    own = REFUSED_IN_CHAT if path == "/v1/chat/completions" else REFUSED_IN_COMPLETIONS
    for name, nothing in {**REFUSED, **own}.items():
        for value in nothing:
            assert text_of(await answer_to(http, path, **{name: value})) == ANSWER_TEXT
        for value in ODD_VALUES:
            if not any(type(value) is type(each) and value == each for each in nothing):
                assert await refusal_of(http, path, **{name: value}) == name
    assert len(set(prompts_of(stack))) == 1


async def test_fields_of_messages(http, stack) -> None:
    """What an answer had may come back; what is not served is refused."""
    path = "/v1/chat/completions"
    turns = [QUESTION, {"role": "assistant", "content": "yes"}, QUESTION]
    plain = {**turns[1], **{name: nothing[0] for name, nothing in REFUSED_IN_MESSAGE.items()}}
    await answer_to(http, path, messages=turns)
    for value in ODD_VALUES:
        full = {**plain, **dict.fromkeys(MESSAGE_WITHOUT_EFFECT - {"annotations"}, value)}
        await answer_to(http, path, messages=[{**QUESTION, "name": "ann"}, full, QUESTION])
    assert len(set(prompts_of(stack))) == 1
    for name in REFUSED_IN_MESSAGE:
        messages = [QUESTION, {**plain, name: [{"id": 1}]}]
        assert await refusal_of(http, path, messages=messages) == f"messages[1].{name}"


async def test_an_assistants_content_may_be_missing(http, stack, tokenizer) -> None:
    for turn in ({"content": None}, {}, {"content": ""}, {"content": []}):
        messages = [QUESTION, {"role": "assistant", **turn}, QUESTION]
        await answer_to(http, "/v1/chat/completions", messages=messages)
    (prompt,) = set(prompts_of(stack))
    assert "<|im_start|>assistant\n<|im_end|>" in tokenizer.decode(prompt)


async def test_a_developer_is_the_system(http, stack) -> None:
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "be brief"}, QUESTION]
        await answer_to(http, "/v1/chat/completions", messages=messages)
    assert len(set(prompts_of(stack))) == 1


@both_endpoints
async def test_a_whole_number_may_have_a_point(http, stack, path) -> None:
    await answer_to(http, path, max_tokens=12.0, seed=5.0, top_k=1e1)
    params = stack.decode.requests[0].task.sampling_params
    assert (params.max_tokens, params.seed, params.top_k) == (12, 5, 10)
    for value in (12.5, "12", True, 1e300):
        assert await refusal_of(http, path, seed=value) == "seed"


@both_endpoints
async def test_the_model_may_be_left_out(http, path) -> None:
    for model in (None, ""):
        assert (await answer_to(http, path, model=model))["model"] == "tiny"
    body = {name: value for name, value in PATHS[path].items() if name != "model"}
    assert (await http.post(path, json=body)).json()["model"] == "tiny"


@both_endpoints
async def test_a_request_is_named_by_its_header_or_its_body(http, path) -> None:
    response = await http.post(path, json={**PATHS[path], "request_id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"].endswith("-mine")
    headers = {"x-request-id": "other"}
    response = await http.post(path, json={**PATHS[path], "request_id": "x"}, headers=headers)
    assert response.headers["x-request-id"] == "other"


@both_endpoints
async def test_the_newer_name_of_max_tokens(http, stack, path) -> None:
    await answer_to(http, path, max_tokens=None, max_completion_tokens=7)
    assert stack.decode.requests[0].task.sampling_params.max_tokens == 7
    assert await refusal_of(http, path, max_tokens=5, max_completion_tokens=6) == "max_tokens"


@both_endpoints
async def test_token_ids_are_returned_as_a_whole_and_in_a_stream(
    http, stack, tokenizer, path
) -> None:
    answer = await answer_to(http, path, return_token_ids=True)
    (choice,) = answer["choices"]
    (prompt,) = prompts_of(stack)
    place = answer if path == "/v1/chat/completions" else choice
    assert place["prompt_token_ids"] == list(prompt)
    assert tokenizer.decode(choice["token_ids"]) == ANSWER_TEXT + "<|eos|>"
    body = {**PATHS[path], "return_token_ids": True, "stream": True}
    chunks = events_of((await http.post(path, json=body)).text)
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]
    places = chunks if path == "/v1/chat/completions" else [c["choices"][0] for c in chunks]
    assert [place.get("prompt_token_ids") for place in places] == [
        list(prompt),
        *[None] * (len(chunks) - 1),
    ]


@both_endpoints
async def test_usage_in_every_chunk(http, path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**PATHS[path], "stream": True, "stream_options": options}
    *chunks, last = events_of((await http.post(path, json=body)).text)
    numbers = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert numbers == sorted(numbers)
    assert numbers[-1] == last["usage"]["completion_tokens"]
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    body["stream_options"] = {"continuous_usage_stats": True}
    assert not any("usage" in chunk for chunk in events_of((await http.post(path, json=body)).text))


@both_endpoints
@pytest.mark.parametrize("include_usage", [True, False])
async def test_metrics_in_the_last_chunk(http, path, include_usage) -> None:
    options = {"include_usage": include_usage, "include_metrics": True}
    body = {**PATHS[path], "stream": True, "stream_options": options}
    *chunks, last = events_of((await http.post(path, json=body)).text)
    assert not any("metrics" in chunk for chunk in chunks)
    assert last["choices"] == []
    assert ("usage" in last) == include_usage
    metrics = last["metrics"]
    names = {f"{name}_ms" for name, _ in RequestMetrics().milliseconds()}
    assert metrics.keys() == names | {
        "path",
        "route_reason",
        "prefill_engine_id",
        "decode_engine_id",
        "kv_transport",
        "kv_transfer_bytes",
        "determinism",
        "num_redrives",
    }
    assert (metrics["path"], metrics["decode_engine_id"]) == ("disaggregated", "decode-0")
    assert (metrics["kv_transfer_bytes"], metrics["num_redrives"]) == (4096, 0)
    assert 0 < metrics["ttft_ms"] <= metrics["e2e_ms"]


@pytest.mark.parametrize("prompt", ["the quick brown fox", [5, 6, 7, 8, 9, 10, 11, 12]])
async def test_a_prompt_is_cut_at_its_beginning(http, stack, tokenizer, prompt) -> None:
    path = "/v1/completions"
    answer = await answer_to(http, path, prompt=prompt, truncate_prompt_tokens=4, echo=True)
    whole = tokenizer.backend.encode(prompt).ids if isinstance(prompt, str) else prompt
    assert prompts_of(stack) == [tuple(whole[-4:])]
    assert answer["usage"]["prompt_tokens"] == 4
    assert text_of(answer) == tokenizer.decode(whole[-4:]) + ANSWER_TEXT


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
async def test_a_seed_is_any_int64(http, stack, seed: int) -> None:
    response = await http.post("/v1/completions", json={"prompt": "hello", "seed": seed})
    told = int(response.headers["pdserve-seed"])
    assert told == seed % 2**64
    assert {each.task.sampling_params.seed for each in stack.decode.requests} == {told}


async def test_a_prompt_is_cut_to_what_fits(http, stack) -> None:
    limit = stack.decode.info.max_model_len
    too_many = {"prompt": [5] * (limit + 10), "max_tokens": 100}
    assert await refusal_of(http, "/v1/completions", **too_many) == "prompt"
    await answer_to(http, "/v1/completions", **too_many, truncate_prompt_tokens=-1)
    text = {"messages": [{"role": "user", "content": "the " * limit}], "max_tokens": 100}
    await answer_to(http, "/v1/chat/completions", **text, truncate_prompt_tokens=-1)
    assert [len(prompt) for prompt in prompts_of(stack)] == [limit - 100] * 2


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{{ bos_token }}|{{ mood }}|{{ reasoning_effort }}|{{ items | length if items else '' }}"
)


@pytest.fixture(scope="module")
def template_tokenizer(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("template") / "tiny"
    tokenizer = Tokenizer(copy_with_template(model_dir, folder, TEMPLATE))
    yield tokenizer
    tokenizer.close()


@pytest.fixture
async def template_http(start_stack, template_tokenizer, monkeypatch):
    """A model whose chat template has variables."""
    monkeypatch.setattr("pdserve_router.server.Tokenizer", lambda path, **_: template_tokenizer)
    monkeypatch.setattr(template_tokenizer, "close", lambda: None)
    async with start_stack(http=True) as stack:
        yield stack.api


async def prompt_with(http, **fields) -> str:
    response = await http.post("/tokenize", json={"messages": [QUESTION], **fields})
    assert response.status_code == 200, response.text
    tokens = response.json()["tokens"]
    return (await http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]


async def test_variables_of_the_chat_template(template_http) -> None:
    variables = {"mood": "{{ 7 * 7 }}", "items": [1, 2], "unused": {"x": None}}
    prompt = await prompt_with(template_http, chat_template_kwargs=variables)
    # What a client sends is text to the template, never a part of it.
    assert prompt == "user:hello;|{{ 7 * 7 }}||2"
    chat = {**CHAT, "reasoning_effort": "low", "return_token_ids": True}
    answer = (await template_http.post("/v1/chat/completions", json=chat)).json()
    tokens = {"tokens": answer["prompt_token_ids"]}
    text = (await template_http.post("/detokenize", json=tokens)).json()["prompt"]
    assert text == "user:hello;||low|"


@pytest.mark.parametrize(
    "variables",
    [
        *({name: "x"} for name in ("messages", "bos_token", "eos_token", "tools", "tokenize")),
        *({name: "x"} for name in ("chat_template", "add_generation_prompt", "self")),
        *({name: "x"} for name in ("raise_exception", "range", "kwargs", "conversation")),
        dict.fromkeys(map(str, range(33)), 1),
        {"mood": "x" * (1 << 14)},
        {"items": 5},
    ],
)
async def test_variables_that_are_not_for_clients_are_refused(template_http, variables) -> None:
    body = {**CHAT, "chat_template_kwargs": variables}
    response = await template_http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "chat_template_kwargs"
