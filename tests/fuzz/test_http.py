"""HTTP as clients send it who do not mean well: bodies, paths, headers, and bytes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from byte_mutations import mutated
from constraints import http_constraints, http_tools
from hypothesis import given, note
from hypothesis import strategies as st
from json_bodies import bodies, of_schema, read_strictly, texts
from raw_http import Response, exchange, parse, parse_one
from settings_of_fuzz import examples
from system import ADAPTERS, PoolingSystem, System

from pdserve_router.api.http.lora_endpoints import LoadBody, UnloadBody
from pdserve_router.api.openai.types import ChatCompletionBody, CompletionBody
from pdserve_router.api.pooling.types import (
    ClassifyBody,
    EmbeddingBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from pdserve_router.api.responses.types import ResponsesBody

MODEL = "pdserve-tiny"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# A conversation with an answer.
ANSWERED = [
    {"role": "user", "content": "a fox"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a dog"}]},
    {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "late"},
]
# What is served, below what is drawn.
SERVED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "a fox", "max_tokens": 3},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "a fox"}], "max_tokens": 3},
    RESPONSES: {"model": MODEL, "input": ANSWERED, "max_output_tokens": 3},
    LOAD: {"lora_name": ADAPTERS[1], "lora_path": ADAPTERS[1]},
    UNLOAD: {"lora_name": ADAPTERS[1]},
}
SCHEMAS = {
    COMPLETIONS: CompletionBody.model_json_schema(),
    CHAT: ChatCompletionBody.model_json_schema(),
    RESPONSES: ResponsesBody.model_json_schema(),
    LOAD: LoadBody.model_json_schema(),
    UNLOAD: UnloadBody.model_json_schema(),
}
# What is often beside it.
BESIDE = {COMPLETIONS: http_constraints(), CHAT: st.one_of(http_constraints(), http_tools())}
# Of models that pool, beside others.
VECTORS: dict[str, tuple[type[PoolingBody], dict[str, Any]]] = {
    "/v1/embeddings": (EmbeddingBody, {"input": ["a fox", [5, 6, 7]]}),
    "/pooling": (PoolBody, {"input": "a fox"}),
    "/classify": (ClassifyBody, {"input": "a fox"}),
    "/score": (ScoreBody, {"text_1": "a fox", "text_2": ["a dog", "a cat"]}),
    "/rerank": (RerankBody, {"query": "a fox", "documents": ["a dog", {"text": "a cat"}]}),
}
# The chat page, and what adapters are answered with.
TEXTS_OF_OURS = ("text/html", "text/plain")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "get", "PROPFIND")
PATHS = (
    *VECTORS,
    *(*SERVED, "/tokenize", "/detokenize", "/version", "/v1/models", "/v1/models/"),
    *("/health", "/", "/metrics", "//v1/models"),
)
# Nothing comes any more: our side of the connection is closed, and the server has to end it.
QUIET_S = 0.1

MODELS_REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


def served_bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A body that is served, and fields of its schema; or one with a constraint."""
    around = bodies_around(SERVED[path], SCHEMAS[path])
    if path not in BESIDE:
        return around
    constrained = BESIDE[path].map(lambda fields: SERVED[path] | fields)
    return st.one_of(around, around, constrained)


def vector_bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """The same of a request for vectors."""
    body, served = VECTORS[path]
    return bodies_around({"model": MODEL, **served}, body.model_json_schema())


def bodies_around(
    served: dict[str, Any], schema: dict[str, Any]
) -> st.SearchStrategy[dict[str, Any]]:
    drawn = of_schema(schema, schema)
    names = st.sets(st.sampled_from(sorted(served)))
    return st.tuples(drawn, names).map(
        lambda pair: {**pair[0], **{k: v for k, v in served.items() if k not in pair[1]}}
    )


def check(response: Response) -> None:
    """It is an answer, or says what is wrong with the request."""
    assert 200 <= response.status < 500, response
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        _check_events(response)
    elif kind == "application/json" and response.is_whole:
        answer = read_strictly(response.body)
        if response.status >= 400:
            assert isinstance(answer["error"]["message"], str), answer
            assert answer["error"]["type"] != "server_error", answer
    elif response.is_whole and not (response.status == 200 and kind.startswith(TEXTS_OF_OURS)):
        # Of the server below the application.
        assert response.status >= 400 or response.status == 307, response


def _check_events(response: Response) -> None:
    *events, rest = response.body.split(b"\n\n")
    assert not rest or not response.is_whole
    for event in events:
        event = event.partition(b"\n")[2] if event.startswith(b"event: ") else event
        assert event.startswith(b"data: "), event
        if event != b"data: [DONE]":
            error = read_strictly(event.removeprefix(b"data: ")).get("error", {})
            assert error.get("type") != "server_error", error


def send(system: System, method: str, target: bytes, body: bytes) -> Response:
    """Send a request whose head is well formed, whatever it asks for."""
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    head = b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % (method.encode(), target)
    data = exchange(system.stack.http_port, [head + length + body])
    if method == "HEAD":  # says how long a body is that does not follow
        return parse_one(data)[0]
    (response,) = parse(data)
    assert response.is_whole, response
    return response


@pytest.mark.parametrize("path", SERVED)
def test_any_body_is_answered_or_refused(system: System, path: str) -> None:
    @examples(40)
    @given(bodies(served_bodies(path)))
    def target(body: bytes) -> None:
        with system.example():
            response = send(system, "POST", path.encode(), body)
            if path == LOAD and response.status == 503:  # more workers are asked for than there are
                assert read_strictly(response.body)["error"]["code"] == "no_worker", response
            else:
                check(response)

    target()


@pytest.mark.parametrize("path", VECTORS)
def test_any_body_for_vectors_is_answered_or_refused(
    pooling_system: PoolingSystem, path: str
) -> None:
    @examples(20)
    @given(bodies(vector_bodies(path)))
    def target(body: bytes) -> None:
        with pooling_system.example():
            check(send(pooling_system, "POST", path.encode(), body))

    target()


def test_any_path_is_answered_or_refused(system: System) -> None:
    segments = st.one_of(texts(), st.sampled_from(["..", ".", "%2e%2e", "%00", "%ff", "%", "%zz"]))
    odd = st.lists(segments.map(_quoted), max_size=4).map(lambda parts: "/" + "/".join(parts))
    paths = st.one_of(st.sampled_from(PATHS), odd, odd.map(lambda path: "/v1/models" + path))
    queries = st.one_of(st.just(""), texts().map(lambda text: "?" + _quoted(text)))

    @examples(20)
    @given(st.sampled_from(METHODS), paths, queries, st.binary(max_size=50))
    def target(method: str, path: str, query: str, body: bytes) -> None:
        with system.example():
            check(send(system, method, (path + query).encode("latin-1"), body))

    target()


def _quoted(text: str) -> str:
    """Request lines have no spaces, no controls, and bytes above 127 as they come."""
    data = text.encode("utf-8", "surrogatepass").decode("latin-1")
    return "".join(c if c > " " and c != "\x7f" else f"%{ord(c):02x}" for c in data)


# ---- headers and bytes

HEADER_NAMES = (
    *("Host", "Content-Type", "Content-Length", "Transfer-Encoding", "Connection", "Expect"),
    *("Upgrade", "HTTP2-Settings", "X-Request-Id", "traceparent", "tracestate", "Authorization"),
    *("Accept-Encoding", "Content-Encoding", "TE", "Trailer", "Cookie", "Range", "X-Forwarded-For"),
    *("", " Host", "Host ", "A B", "a\x00", "\xff", "x" * 1000, ":path", "Proxy-Connection"),
)
HEADER_VALUES = (
    *("", "a", "0", "5", "-1", "+5", "0x5", "5, 5", "5,6", "99999999999999999999", "1e3", " 5"),
    *(
        "chunked",
        "Chunked",
        "chunked, chunked",
        "identity",
        "gzip, chunked",
        "xchunked",
        "chunked,",
    ),
    *("keep-alive", "close", "Upgrade", "websocket", "h2c", "100-continue", "text/plain", "\x00"),
    *("application/json", "a\r\n b", "a\n b", "a\rb", "\xff\xfe", "é", "x" * 10_000, "gzip", "\t"),
    *(
        "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        "Bearer ",
        "bytes=0-",
        "AAMAAABkAAQAAP__",
        "y" * 300,
    ),
)
REQUEST_LINES = (
    *(b"POST /v1/completions HTTP/1.1", b"POST /v1/chat/completions HTTP/1.1"),
    *(b"GET /v1/models HTTP/1.1", b"GET /health HTTP/1.0", b"GET /v1/models HTTP/0.9", b"GET /"),
    *(b"GET /v1/models HTTP/2.0", b"PRI * HTTP/2.0", b"OPTIONS * HTTP/1.1", b"", b"\r\n\r\n"),
    *(b"GET http://a/v1/models HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"GET /\x00 HTTP/1.1"),
    *(b"GET  /v1/models  HTTP/1.1", b"GET\t/v1/models\tHTTP/1.1", b"G\xc3\x89T / HTTP/1.1"),
    *(b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"GET /?" + b"%00" * 100 + b" HTTP/1.1"),
    *(b"GET v1/models HTTP/1.1", b"GET ?a HTTP/1.1", b"GET /v1/models#a HTTP/1.1"),
)
BODY = b'{"model":"pdserve-tiny","prompt":"a","max_tokens":2}'
CHUNKED_BODIES = (
    *(b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n", b"0\r\n\r\n", b"5\r\nab", b"zz\r\n\r\n"),
    *(b"ffffffffffffffff\r\na", b"-1\r\n\r\n", b"5;a=b\r\nabcde\r\n0\r\nX: y\r\n\r\n", b"0x5\r\n"),
    *(b"5\nabcde\n0\n\n", b" 5\r\nabcde\r\n0\r\n\r\n", b"5\r\nabcdefgh\r\n0\r\n\r\n", b"1" * 5000),
)
WORDS = (
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", b"\x00", b"\xff", b"HTTP/1.1", b","),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", MODELS_REQUEST),
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A request line and headers, few or many."""
    lines = [draw(st.sampled_from(REQUEST_LINES))]
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(HEADER_NAMES))
        value = draw(st.one_of(st.sampled_from(HEADER_VALUES), st.text("a\x00é,;= ", max_size=20)))
        header = f"{name}: {value}".encode("latin-1", "replace")
        lines += [header] * draw(st.sampled_from((1, 1, 1, 2, 50)))
    return draw(st.sampled_from((b"\r\n", b"\r\n", b"\r\n", b"\n"))).join([*lines, b"", b""])


def requests() -> st.SearchStrategy[bytes]:
    """One request: a head and a body that may be another's."""
    rest = st.one_of(
        st.just(b""), st.just(BODY), st.sampled_from(CHUNKED_BODIES), st.binary(max_size=50)
    )
    return st.tuples(heads(), rest).map(b"".join)


@st.composite
def pieces(draw: st.DrawFn) -> list[bytes]:
    """What goes over one connection: requests behind one another, cut into writes."""
    whole = st.lists(requests(), min_size=1, max_size=3).map(b"".join)
    data = draw(st.one_of(whole, mutated(whole, WORDS), st.binary(max_size=100)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    bounds = [0, *cuts, len(data)]
    return [data[i:j] for i, j in pairwise(bounds) if i < j]


def test_any_bytes_are_answered_or_cut(system: System) -> None:
    @examples(40)
    @given(pieces())
    def target(pieces: list[bytes]) -> None:
        with system.example():
            answer = exchange(system.stack.http_port, pieces, quiet_s=QUIET_S)
            note(f"answer: {answer[:1000]!r}")
            for response in parse(answer):
                assert response.status < 200 or check(response) is None

    target()


FRAMINGS = (
    *(
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Content-Length: 5", "Content-Length: 6"],
    ),
    *(
        ["Content-Length: 5, 6"],
        ["Content-Length: +5"],
        ["Content-Length: 0x5"],
        ["Content-Length: -5"],
    ),
    *(["Content-Length: 5 5"], ["Transfer-Encoding: xchunked"], ["Transfer-Encoding: chunked, x"]),
    *(
        ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
        ["Transfer-Encoding : chunked"],
    ),
    *(
        ["Transfer-Encoding:\x0bchunked"],
        ["Content-Length: 99999999999999999999"],
        ["Content-Length: "],
    ),
)


@pytest.mark.parametrize("headers", FRAMINGS, ids=" and ".join)
def test_a_body_of_unclear_length_hides_no_request(system: System, headers: Sequence[str]) -> None:
    """Whoever stands before us may have seen another length: what follows is nobody's request."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", *headers, "", ""]
    data = "\r\n".join(lines).encode("latin-1") + b"0\r\n\r\n" + MODELS_REQUEST
    with system.example():
        responses = parse(exchange(system.stack.http_port, [data], quiet_s=QUIET_S))
    assert [response.status for response in responses] in ([], [400]), responses
