"""docs/http.md says what a router does: its examples are run, its tables are those of the code."""

import json
import re
from pathlib import Path

import pytest

from pdserve_router.api.http.openapi import OPERATIONS
from pdserve_router.api.openai.fields import (
    MESSAGE_WITHOUT_EFFECT,
    REFUSED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_POOLING,
    REFUSED_IN_RERANK,
    REFUSED_IN_RESPONSES,
    WITHOUT_EFFECT,
)
from pdserve_router.api.openai.format import ERROR_STATUSES, http_status
from pdserve_router.api.openai.types import (
    ChatCompletionBody,
    ChoicesBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
)
from pdserve_router.api.pooling.types import (
    ClassifyBody,
    EmbeddingBody,
    PoolBody,
    RerankBody,
    ScoreBody,
)
from pdserve_router.api.responses.types import ResponsesBody

DOC = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
MODEL = "pdserve-tiny"
INFO = {"model": MODEL, "served_fields": ("structured_outputs",)}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"prompt": "hello"}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
RESPONSES = "/v1/responses"
BLOCK = re.compile(
    r"```http\n(?P<method>\w+) (?P<path>\S+)\n(?P<body>.*?)```\n\n"
    r"```(?P<kind>json|sse)(?: (?P<status>\d+))?\n(?P<answer>.*?)```",
    re.DOTALL,
)


# A model that pools, for a section of its own.
POOLING = "Vectors, classes and scores"
POOLING_INFO = {
    "model": MODEL,
    "tasks": ("embed", "classify", "score"),
    "embedding_size": 4,
    "is_matryoshka": True,
    "eos_token_ids": (),
}
POOLING_BODIES = {
    "embeddings": ("/v1/embeddings", EmbeddingBody, {"input": "a"}),
    "pooling": ("/pooling", PoolBody, {"input": "a"}),
    "classify": ("/classify", ClassifyBody, {"input": "a"}),
    "score": ("/score", ScoreBody, {"text_1": "a", "text_2": "b"}),
    "rerank": ("/rerank", RerankBody, {"query": "a", "documents": ["b"]}),
}


@pytest.fixture
async def http(start_stack):
    async with start_stack(http=True, served_model_name=MODEL, info=INFO) as stack:
        yield stack.api


@pytest.fixture
async def pooling_http(start_stack):
    async with start_stack(
        prefill=1, decode=0, http=True, served_model_name=MODEL, info=POOLING_INFO
    ) as stack:
        yield stack.api


def section_of(name: str) -> str:
    return DOC.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]


def table(section: str, number: int = 0) -> list[list[str]]:
    """The cells of a section's table."""
    text = section_of(section)
    tables = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    rows = tables[number].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def names(rows: list[list[str]]) -> list[str]:
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


def code(cell: str) -> list:
    """What stands in backticks, as JSON."""
    return [json.loads(text) for text in re.findall(r"`([^`]+)`", cell)]


def assert_equal(documented: object, found: object) -> None:
    if documented == "...":
        return
    if isinstance(documented, dict):
        assert isinstance(found, dict)
        assert documented.keys() == found.keys()
        for name, value in documented.items():
            assert_equal(value, found[name])
    elif isinstance(documented, list):
        assert isinstance(found, list)
        assert len(documented) == len(found)
        for pair in zip(documented, found, strict=True):
            assert_equal(*pair)
    else:
        assert documented == found


async def test_every_example_is_answered_as_it_says(http, pooling_http) -> None:
    pooling = section_of(POOLING)
    await run_examples(http, DOC.replace(pooling, ""))
    await run_examples(pooling_http, pooling)


async def run_examples(http, text: str) -> None:
    examples = list(BLOCK.finditer(text))
    assert len(examples) == text.count("```http")
    for example in examples:
        body = json.loads(example["body"]) if example["body"].strip() else None
        response = await http.request(example["method"], example["path"], json=body)
        assert response.status_code == int(example["status"] or 200), response.text
        if example["kind"] == "json":
            assert_equal(json.loads(example["answer"]), response.json())
            continue
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        documented = example["answer"].splitlines()
        assert (lines[-1], documented[-1]) == ("[DONE]", "[DONE]")
        assert_equal(list(map(json.loads, documented[:-1])), list(map(json.loads, lines[:-1])))


def test_every_endpoint_is_there() -> None:
    rows = DOC.split("| endpoint | |", 1)[1].split("\n\n", 1)[0]
    found = set(re.findall(r"`(\w+) (/[^`]*)`", rows))
    described = {(each.method.upper(), each.path) for each in OPERATIONS}
    assert found == described | {("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json")}


def test_the_tables_have_every_field() -> None:
    shared = ChoicesBody.model_fields.keys()
    assert names(table("Fields of both")) == list(shared)
    options = table("Fields of both", 1)
    assert names(options) == list(StreamOptions.model_fields)
    assert {len(row) for row in options} == {2}
    for section, body in (("Chat", ChatCompletionBody), ("Completions", CompletionBody)):
        assert set(names(table(section))) == body.model_fields.keys() - shared
    assert names(table("Responses")) == [
        name for name in ResponsesBody.model_fields if name not in GenerationBody.model_fields
    ]
    without = section_of("Responses").split("fields of both are served as well, but ", 1)[1]
    without = without.split(".", 1)[0]
    assert re.findall(r"`(\w+)`", without) == [
        name for name in shared if name not in GenerationBody.model_fields
    ]
    assert names(table("Responses", 1)) == list(REFUSED_IN_RESPONSES)
    assert ResponsesBody.refused.keys() == {*REFUSED, *REFUSED_IN_RESPONSES}
    assert names(table("Fields without effect")) == list(WITHOUT_EFFECT)
    refused = [(row[0].strip("`"), row[1]) for row in table("Fields that are refused")]
    assert sorted(refused) == sorted(
        (name, where)
        for where, fields in (
            ("both", REFUSED),
            ("chat", REFUSED_IN_CHAT),
            ("completions", REFUSED_IN_COMPLETIONS),
        )
        for name in fields
    )
    for name in MESSAGE_WITHOUT_EFFECT:
        assert f"`{name}`" in DOC


def bodies_of(cell: str) -> list[str]:
    return list(POOLING_BODIES) if cell == "all" else cell.split(", ")


def test_the_tables_of_vectors_have_every_field() -> None:
    fields, refused = table(POOLING, 0), table(POOLING, 1)
    for name, (_, body, _) in POOLING_BODIES.items():
        own = {row[0].strip("`") for row in fields if name in bodies_of(row[1])}
        assert own == body.model_fields.keys()
        own = {row[0].strip("`") for row in refused if name in bodies_of(row[1])}
        assert own == body.refused.keys()
    assert {**REFUSED_IN_POOLING, **REFUSED_IN_RERANK}.keys() == set(names(refused))


async def test_fields_of_vectors_are_as_the_tables_say(pooling_http) -> None:
    for name, cell, example, _ in table(POOLING, 0):
        for path, _, body in map(POOLING_BODIES.__getitem__, bodies_of(cell)):
            fields = json.loads("{" + example.strip("`") + "}")
            assert name.strip("`") in fields
            response = await pooling_http.post(path, json={**body, **fields})
            assert response.status_code == 200, (name, response.text)
    for name, cell, taken in table(POOLING, 1):
        for path, _, body in map(POOLING_BODIES.__getitem__, bodies_of(cell)):
            for value in code(taken):
                response = await pooling_http.post(path, json={**body, name.strip("`"): value})
                assert response.status_code == 200, (name, value)


@pytest.mark.parametrize("section", ["Chat", "Completions", "Fields of both"])
async def test_the_example_of_each_field_is_served(http, section) -> None:
    for path, body in ((PATHS["chat"], CHAT), (PATHS["completions"], COMPLETION)):
        own = "Chat" if body is CHAT else "Completions"
        if section in ("Fields of both", own):
            for name, example, _ in table(section):
                fields = json.loads("{" + example.strip("`") + "}")
                assert name.strip("`") in fields
                # Beams go on for as long as they may.
                limit = {} if "max_completion_tokens" in fields else {"max_tokens": 16}
                response = await http.post(path, json={**body, **limit, **fields})
                assert response.status_code == 200, (name, response.text)


async def test_fields_of_responses_are_as_the_tables_say(http) -> None:
    unserved = ChoicesBody.model_fields.keys() - GenerationBody.model_fields.keys()
    shared = [row for row in table("Fields of both") if row[0].strip("`") not in unserved]
    for name, example, _ in (*table("Responses"), *shared):
        fields = json.loads("{" + example.strip("`") + "}")
        limit = fields.pop("max_tokens", 16)
        body = {"input": "hello", "max_output_tokens": limit, **fields}
        response = await http.post(RESPONSES, json=body)
        assert response.status_code == 200, (name, response.text)
    both = [(name, taken) for name, of, taken in table("Fields that are refused") if of == "both"]
    for name, taken in (*table("Responses", 1), *both):
        for value in code(taken):
            body = {"input": "hello", name.strip("`"): value}
            assert (await http.post(RESPONSES, json=body)).status_code == 200, (name, value)


async def test_the_example_of_each_field_without_effect_is_taken(http) -> None:
    for _, example, _ in table("Fields without effect"):
        fields = json.loads("{" + example.strip("`") + "}")
        for path, body in ((PATHS["chat"], CHAT), (PATHS["completions"], COMPLETION)):
            assert (await http.post(path, json={**body, **fields})).status_code == 200


async def test_what_is_refused_is_taken_with_the_values_of_the_table_alone(http) -> None:
    for name, where, taken in table("Fields that are refused"):
        for path, body in ((PATHS["chat"], CHAT), (PATHS["completions"], COMPLETION)):
            if where not in ("both", "chat" if body is CHAT else "completions"):
                continue
            field = name.strip("`")
            for value in code(taken):
                response = await http.post(path, json={**body, field: value})
                assert response.status_code == 200, (field, value)
            response = await http.post(path, json={**body, field: {"x": 1}})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field


async def test_answers_have_the_headers_of_the_table(http) -> None:
    documented = set(names(table("Headers", 1)))
    response = await http.post(PATHS["chat"], json=CHAT)
    own = {name for name in response.headers if name.startswith(("pdserve-", "x-"))}
    stages = {name for name in own if name.endswith("-ms")}
    assert stages
    limits = {name for name in documented if name.startswith("x-ratelimit-")}
    assert len(limits) == 6  # test_rate_limits.py has them
    own |= {"pdserve-*-ms", "retry-after", "www-authenticate"}
    assert own - stages | limits == documented


def test_the_table_of_errors_has_every_status() -> None:
    rows = table("Errors")
    assert [int(row[0]) for row in rows] == sorted({*ERROR_STATUSES, 401, 404, 405, 413})
    from pdserve_common.errors import error_from_engine
    from pdserve_common.types.engine import EngineError, ErrorCode

    for code in ErrorCode:
        status = http_status(error_from_engine(EngineError(code=code, message="")))
        (row,) = [row for row in rows if int(row[0]) == status]
        assert f"`{code.name.lower()}`" in row[1]
