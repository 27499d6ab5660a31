"""/openapi.json, of the very models that parse requests, and a page for people made of it."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pydantic import BaseModel

from pdserve_common.version import VERSION
from pdserve_router.api.openai.fields import WITHOUT_EFFECT
from pdserve_router.api.openai.format import ERROR_STATUSES
from pdserve_router.api.openai.model import RequestBody
from pdserve_router.api.openai.tokenize import DetokenizeBody, TokenizeBody
from pdserve_router.api.openai.types import ChatCompletionBody, CompletionBody, GenerationBody
from pdserve_router.api.pooling.types import (
    ClassifyBody,
    EmbeddingBody,
    PoolBody,
    RerankBody,
    ScoreBody,
)
from pdserve_router.api.responses.types import ResponsesBody

_REF = "#/components/schemas/"
# Besides those of errors: no key, no such path, a body that is too large.
_POST_STATUSES = sorted({*ERROR_STATUSES, 401, 404, 413})


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One path and its one method."""

    path: str
    summary: str
    body: type[BaseModel] | None = None
    answer: str
    statuses: Sequence[int] = (401,)
    content_type: str = "application/json"

    @property
    def method(self) -> str:
        return "get" if self.body is None else "post"


OPERATIONS = (
    Operation(
        path="/v1/chat/completions",
        summary="The next message of a conversation",
        body=ChatCompletionBody,
        answer="ChatCompletion",
        statuses=_POST_STATUSES,
    ),
    Operation(
        path="/v1/responses",
        summary="The next answer of a conversation, as items",
        body=ResponsesBody,
        answer="Response",
        statuses=_POST_STATUSES,
    ),
    Operation(
        path="/v1/completions",
        summary="What follows a text; of several prompts at once",
        body=CompletionBody,
        answer="Completion",
        statuses=_POST_STATUSES,
    ),
    *(
        Operation(path=path, summary=summary, body=body, answer=answer, statuses=_POST_STATUSES)
        for summary, body, answer, *paths in (
            ("The embeddings of texts", EmbeddingBody, "Embeddings", "/v1/embeddings"),
            ("What a model makes of texts", PoolBody, "Vectors", "/pooling"),
            ("Which class texts are of", ClassifyBody, "Classes", "/v1/classify", "/classify"),
            ("How alike texts are", ScoreBody, "Scores", "/v1/score", "/score"),
            (
                "Documents, the best first",
                RerankBody,
                "Ranking",
                *("/v1/rerank", "/v2/rerank", "/rerank"),
            ),
        )
        for path in paths
    ),
    Operation(path="/v1/models", summary="What is served", answer="Models"),
    Operation(path="/v1/models/{model}", summary="One model", answer="Model", statuses=(401, 404)),
    Operation(
        path="/tokenize",
        summary="The tokens of a text or a conversation",
        body=TokenizeBody,
        answer="Tokens",
        statuses=_POST_STATUSES,
    ),
    Operation(
        path="/detokenize",
        summary="The text of tokens",
        body=DetokenizeBody,
        answer="Text",
        statuses=_POST_STATUSES,
    ),
    Operation(
        path="/health", summary="Whether requests can be served", answer="Health", statuses=(503,)
    ),
    Operation(path="/version", summary="The router's version", answer="Version", statuses=()),
)


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _array(items: Mapping[str, object]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_STRING: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_NULLABLE_STRING: dict[str, Any] = {"type": ["string", "null"]}
_CHOICE: Mapping[str, Mapping[str, object]] = {"index": _INTEGER, "finish_reason": _NULLABLE_STRING}
_FRAME: Mapping[str, Mapping[str, object]] = {
    "id": _STRING,
    "object": _STRING,
    "created": _INTEGER,
    "model": _STRING,
}
_USAGE = _object(prompt_tokens=_INTEGER, completion_tokens=_INTEGER, total_tokens=_INTEGER)
_MESSAGE = _object(role=_STRING, content=_STRING)
_NUMBER: dict[str, Any] = {"type": "number"}
_VECTOR: dict[str, Any] = {"anyOf": [_array(_NUMBER), _STRING]}
_INPUT_USAGE = _object(prompt_tokens=_INTEGER, total_tokens=_INTEGER)


def _list(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return _object(**_FRAME, data=_array(_object(index=_INTEGER, **properties)), usage=_INPUT_USAGE)


_MODEL = _object(id=_STRING, object=_STRING, created=_INTEGER, owned_by=_STRING)

_ANSWERS: Mapping[str, dict[str, Any]] = {
    "ChatCompletion": _object(
        **_FRAME, choices=_array(_object(**_CHOICE, message=_MESSAGE)), usage=_USAGE
    ),
    "Response": _object(
        id=_STRING,
        object=_STRING,
        created_at=_INTEGER,
        status=_STRING,
        model=_STRING,
        output=_array(_object(id=_STRING, type=_STRING)),
        usage=_object(input_tokens=_INTEGER, output_tokens=_INTEGER, total_tokens=_INTEGER),
    ),
    "Completion": _object(**_FRAME, choices=_array(_object(**_CHOICE, text=_STRING)), usage=_USAGE),
    "Embeddings": _list(object=_STRING, embedding=_VECTOR),
    "Vectors": _list(object=_STRING, data=_VECTOR),
    "Classes": _list(label=_NULLABLE_STRING, probs=_array(_NUMBER), num_classes=_INTEGER),
    "Scores": _list(object=_STRING, score=_NUMBER),
    "Ranking": _object(
        id=_STRING,
        model=_STRING,
        results=_array(_object(index=_INTEGER, relevance_score=_NUMBER)),
        usage=_INPUT_USAGE,
    ),
    "Model": _MODEL,
    "Models": _object(object=_STRING, data=_array(_MODEL)),
    "Tokens": _object(count=_INTEGER, max_model_len=_INTEGER, tokens=_array(_INTEGER)),
    "Text": _object(prompt=_STRING),
    "Health": _object(status=_STRING),
    "Version": _object(version=_STRING),
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_NULLABLE_STRING, code=_NULLABLE_STRING)
    ),
}


@functools.cache
def openapi() -> dict[str, Any]:
    """Return the description of the HTTP API, OpenAPI 3.1."""
    schemas = dict(_ANSWERS)
    for operation in OPERATIONS:
        if operation.body is not None:
            schemas |= _body_schemas(operation.body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": VERSION},
        "paths": {each.path: {each.method: _operation(each)} for each in OPERATIONS},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Where keys are on; without, none is asked for.
        "security": [{}, {"key": []}],
    }


def _body_schemas(body: type[BaseModel]) -> dict[str, Any]:
    schema = body.model_json_schema(ref_template=_REF + "{model}")
    schemas = schema.pop("$defs", {})
    if issubclass(body, RequestBody):
        properties = schema["properties"]
        for name, reason in WITHOUT_EFFECT.items():
            properties[name] = {"description": f"Without effect: {reason}."}
        for name, values in body.refused.items():
            only = {"enum": list(values), "description": "Not served: may only ask for nothing."}
            properties[name] = only
    return {body.__name__: schema, **schemas}


def _operation(operation: Operation) -> dict[str, Any]:
    ok: dict[str, Any] = _json(operation.answer)
    if operation.body is not None and issubclass(operation.body, GenerationBody):
        ok["text/event-stream"] = {"schema": _STRING}
    responses = {"200": {"description": "The answer", "content": ok}}
    for status in operation.statuses:
        # A 503 of /health says why.
        name = operation.answer if status == 503 and operation.body is None else "Error"
        responses[str(status)] = {"description": _MEANINGS[status], "content": _json(name)}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body.__name__)}
    if "{model}" in operation.path:
        described["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": _STRING}
        ]
    return described


_MEANINGS = {
    400: "The request is wrong: message and param say what",
    401: "No API key, or an unknown one",
    404: "No such model",
    408: "The body did not come in time, or the answer was not read",
    409: "Not in this state",
    413: "The body is too large",
    429: "Too much at once: try again after retry-after",
    499: "The client has left",
    500: "An error of the server",
    503: "No worker can take it: try again after retry-after",
    504: "The deadline has passed",
}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF + schema}}}


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pdserve: HTTP API</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0 }}
code {{ font: .9em ui-monospace, monospace }}
</style></head><body>
<h1>pdserve {version}: HTTP API</h1>
<p>As data: <a href="openapi.json">openapi.json</a>.</p>
{operations}
</body></html>
"""


@functools.cache
def docs_page() -> str:
    """Return `openapi()` as HTML that needs nothing else."""
    spec = openapi()
    sections = [
        _section(path, method, details, spec["components"]["schemas"])
        for path, methods in spec["paths"].items()
        for method, details in methods.items()
    ]
    return _PAGE.format(version=escape(VERSION), operations="\n".join(sections))


def _section(path: str, method: str, details: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    rows = ""
    if (body := details.get("requestBody")) is not None:
        name = body["content"]["application/json"]["schema"]["$ref"].removeprefix(_REF)
        rows = _table("field", _fields(schemas[name], schemas))
    statuses = {status: each["description"] for status, each in details["responses"].items()}
    title = f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    return f"{title}<p>{escape(details['summary'])}.</p>{rows}{_table('status', statuses)}"


def _fields(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], path: str = ""
) -> dict[str, str]:
    """Each field and its description, those of nested objects by their path."""
    found = {}
    for name, field in schema["properties"].items():
        found[path + name] = field.get("description", "")
        for choice in (field, field.get("items", {}), *field.get("anyOf", ())):
            if "$ref" in choice:
                inner = schemas[choice["$ref"].removeprefix(_REF)]
                found |= _fields(inner, schemas, f"{path}{name}.")
    return found


def _table(heading: str, rows: Mapping[str, str]) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table><tr><th>{heading}</th><th></th></tr>{cells}</table>"
