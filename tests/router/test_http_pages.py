"""What the HTTP API has besides generation: tokens, its own description, origins of pages."""

import asyncio
import base64
import hashlib
import re

import jsonschema
import pytest
from tokenizers.processors import TemplateProcessing

from pdserve_common.version import VERSION
from pdserve_router.api.openai.fields import REFUSED_IN_COMPLETIONS, WITHOUT_EFFECT
from pdserve_router.api.openai.types import ChatCompletionBody, CompletionBody
from pdserve_router.api.pooling.types import ClassifyBody, PoolBody, RerankBody, ScoreBody
from pdserve_router.text.tokenizer import Tokenizer

QUESTION = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "now"}}
PAGE = "https://chat.example.com"


STACK = {"http": True}


async def test_the_version(http) -> None:
    assert (await http.get("/version")).json() == {"version": VERSION}


async def test_tokens_of_a_text_and_back(http, stack, tokenizer) -> None:
    body = {"model": "tiny", "prompt": "the café", "return_token_strs": True}
    answer = (await http.post("/tokenize", json=body)).json()
    ids = tokenizer.backend.encode("the café").ids
    assert answer == {
        "count": len(ids),
        "max_model_len": 4096,
        "tokens": ids,
        "token_strs": [tokenizer.backend.id_to_token(i) for i in ids],
    }
    answer = await http.post("/detokenize", json={"tokens": ids})
    assert answer.json() == {"prompt": "the café"}


async def test_tokens_of_a_conversation_are_those_that_it_generates_from(http, stack) -> None:
    answer = (await http.post("/tokenize", json={"messages": [QUESTION]})).json()
    await http.post("/v1/chat/completions", json={"messages": [QUESTION]})
    assert stack.decode.requests[0].prompt_token_ids == tuple(answer["tokens"])
    assert answer["token_strs"] is None


async def test_special_tokens_around_a_text(start_stack, model_dir, monkeypatch) -> None:
    tokenizer = Tokenizer(str(model_dir))
    plain = tokenizer.backend.encode("hello").ids
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    monkeypatch.setattr("pdserve_router.server.Tokenizer", lambda path, **options: tokenizer)
    async with start_stack(http=True) as stack:
        for fields, expected in (({}, [0, *plain]), ({"add_special_tokens": False}, plain)):
            body = {"prompt": "hello", **fields}
            assert (await stack.api.post("/tokenize", json=body)).json()["tokens"] == expected
            await stack.api.post("/v1/completions", json=body)
            assert stack.decode.requests[-1].prompt_token_ids == tuple(expected)
            await stack.assert_idle()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [QUESTION]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ("/tokenize", {"messages": [QUESTION], "tools": [1]}, "tools[0]"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": [QUESTION], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
async def test_bad_bodies_are_refused_by_name(http, path, body, param) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param


async def test_large_texts_are_tokenized_beside_the_event_loop(http, stack) -> None:
    """Where large requests are, which counts them."""
    text = "the quick brown fox " * 5000
    answer = await http.post("/tokenize", json={"prompt": text})
    assert answer.status_code in (200, 400)
    assert stack.metric("pdserve_large_requests_total", outcome="done") == 1


async def test_the_description_is_of_the_models_that_parse(http) -> None:
    spec = (await http.get("/openapi.json")).json()
    assert spec["openapi"].startswith("3.1")
    for body in (CompletionBody, ChatCompletionBody, PoolBody, ClassifyBody, ScoreBody, RerankBody):
        schema = spec["components"]["schemas"][body.__name__]
        jsonschema.Draft202012Validator.check_schema(schema)
        described = schema["properties"].keys()
        assert described == {*body.model_fields, *WITHOUT_EFFECT, *body.refused}
        assert all(field.get("description") for field in schema["properties"].values())
    only = spec["components"]["schemas"]["CompletionBody"]["properties"]["tools"]["enum"]
    assert only == list(REFUSED_IN_COMPLETIONS["tools"])
    references = set(
        re.findall(r'"#/components/schemas/(\w+)"', (await http.get("/openapi.json")).text)
    )
    assert references == spec["components"]["schemas"].keys()


POOLED = {"tasks": ("embed", "classify", "score"), "embedding_size": 4}


async def test_every_path_is_described_and_answers_as_described(http, start_stack) -> None:
    spec = (await http.get("/openapi.json")).json()
    inputs, pairs = {"input": ["a", "b"]}, {"text_1": "a", "text_2": "b"}
    ranked = {"query": "a", "documents": ["b"]}
    pooled = {
        **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify", "/v1/classify"), inputs),
        **dict.fromkeys(("/score", "/v1/score"), pairs),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), ranked),
    }
    bodies = {
        "/v1/chat/completions": {"messages": [QUESTION]},
        "/v1/completions": {"prompt": "hello"},
        "/v1/responses": {"input": "hello"},
        "/tokenize": {"prompt": "hello"},
        "/detokenize": {"tokens": [5]},
    }
    async with start_stack(prefill=1, decode=0, http=True, info=POOLED) as pooling:
        for path, methods in spec["paths"].items():
            ((method, operation),) = methods.items()
            url, client = path.format(model="tiny"), pooling.api if path in pooled else http
            response = await client.request(method, url, json={**bodies, **pooled}.get(path))
            assert response.status_code == 200, path
            content = operation["responses"]["200"]["content"]["application/json"]
            schema = {**content["schema"], "components": spec["components"]}
            jsonschema.Draft202012Validator(schema).validate(response.json())
    paths = {"/", "/openapi.json", "/docs", *spec["paths"]}
    assert {route.path.replace(":path", "") for route in routes_of(http)} == paths


def routes_of(http) -> list:
    from pdserve_router.api.http.app import build_app

    unused = dict.fromkeys(("router", "max_body_bytes", "writes", "edge", "unknown_fields"))
    router = unused.pop("router")
    return build_app(router, client_stall_timeout_s=1.0, body_timeout_s=1.0, **unused).routes


async def test_the_page_needs_nothing_else(http) -> None:
    response = await http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    page = response.text
    for name in (
        "POST /v1/chat/completions",
        "chat_template_kwargs",
        "stream_options.include_usage",
    ):
        assert f"<code>{name}</code>" in page
    # No script, and nothing of another host.
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!openapi\.json)', page)
    assert "://" not in page
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in response.headers["content-security-policy"]


async def test_what_describes_the_api_needs_no_key(start_stack, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")
    async with start_stack(http=True, api_keys_file=str(keys)) as stack:
        for path in ("/docs", "/openapi.json", "/version", "/health"):
            assert (await stack.api.get(path)).status_code == 200
        assert (await stack.api.post("/tokenize", json={"prompt": "a"})).status_code == 401


async def test_pages_of_other_origins_are_served_only_if_asked_for(start_stack, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")
    preflight = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    for origins, allowed in ((), None), ((PAGE,), PAGE), (("*",), "*"), (("https://x.y",), None):
        async with start_stack(http=True, cors_origins=origins, api_keys_file=str(keys)) as stack:
            response = await stack.api.options("/v1/chat/completions", headers=preflight)
            assert response.headers.get("access-control-allow-origin") == allowed
            assert (response.status_code == 200) == (allowed is not None)
            headers = {"origin": PAGE, "authorization": "Bearer 0123456789abcdef"}
            body = {"messages": [QUESTION], "stream": True}
            response = await stack.api.post("/v1/chat/completions", json=body, headers=headers)
            assert response.headers.get("access-control-allow-origin") == allowed
            # A refusal too, or the page could not say why.
            response = await stack.api.get("/v1/models", headers={"origin": PAGE})
            assert response.status_code == 401
            assert response.headers.get("access-control-allow-origin") == allowed


HOSTS = {"allowed_hosts": ("localhost", "demo.serving.svc"), "allowed_origins": (PAGE,)}


@pytest.mark.parametrize(
    ("headers", "is_served"),
    [
        ({}, True),
        ({"host": "localhost:8000"}, True),
        ({"host": "LocalHost."}, True),
        ({"host": "10.1.2.3:8000"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "demo.serving.svc:8000"}, True),
        ({"host": "evil.example"}, False),
        ({"host": "localhost.evil.example:8000"}, False),
        ({"host": ""}, False),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, True),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, False),
        ({"host": "localhost:8000", "origin": "http://evil.example"}, False),
        ({"host": "localhost:8000", "origin": "null"}, False),
        ({"host": "evil.example", "origin": "http://evil.example"}, False),
        ({"host": "localhost:8000", "origin": PAGE}, True),
    ],
)
async def test_without_keys_pages_of_others_are_refused(start_stack, headers, is_served) -> None:
    """Of a path that needs no body, and before one that would."""
    async with start_stack(http=True, **HOSTS) as stack:
        answer = await stack.api.get("/v1/models", headers=headers)
        assert (answer.status_code == 200) is is_served
        answer = await stack.api.post(
            "/v1/completions",
            content=b'{"prompt": "hello"}',
            headers={"content-type": "text/plain", **headers},
        )
        assert answer.status_code == (200 if is_served else 403)
        assert is_served or "--allowed-" in answer.json()["error"]["message"]


async def test_a_refused_page_does_not_have_its_body_read(start_stack) -> None:
    async with start_stack(http=True) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.server.http_port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 100\r\n\r\n"
        )
        assert b" 403 " in await reader.readline()
        writer.close()


async def test_with_keys_and_where_all_are_listed_names_do_not_matter(
    start_stack, tmp_path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")
    headers = {"host": "evil.example", "origin": PAGE, "authorization": "Bearer 0123456789abcdef"}
    everybody = {"allowed_hosts": ("*",), "cors_origins": ("*",)}
    for fields in ({"api_keys_file": str(keys)}, everybody):
        async with start_stack(http=True, **fields) as stack:
            assert (await stack.api.get("/v1/models", headers=headers)).status_code == 200
