"""The line that each request leaves in the log."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.observability.logging import make_formatter
from pdserve_common.types.engine import ErrorCode
from pdserve_router.requests.records import request_log
from pdserve_router.requests.records.request_log import MAX_LINES_PER_S, RequestLine, RequestLog
from support.fake_worker import fails_with, hang
from support.router_stack import ANSWER_TEXT
from support.waiting import until

PROMPT = "the quick fox"
COMPLETION = {"model": "tiny", "prompt": PROMPT, "max_tokens": 100}
GENERATE = "/pdserve.v1.InferenceService/Generate"
KEY = "a-key-of-the-tests"


class Lines(logging.Handler):
    """What the module logs, as the JSON log has it and as a terminal shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        record.worker_id = "router"
        self.fields.append(json.loads(make_formatter(is_json=True).format(record)))
        self.text += make_formatter(is_json=False).format(record) + "\n"

    async def only(self) -> dict[str, Any]:
        """Wait for the line of the only request, and return its fields."""
        await until(lambda: bool(self.fields))
        (fields,) = self.fields
        assert PROMPT not in str(fields)
        assert ANSWER_TEXT not in str(fields)
        return fields


@pytest.fixture
def lines() -> Any:
    handler = Lines()
    request_log.logger.addHandler(handler)
    level = request_log.logger.level
    request_log.logger.setLevel(logging.INFO)
    yield handler
    request_log.logger.setLevel(level)
    request_log.logger.removeHandler(handler)


STACK = {"http": True, "max_body_bytes": 2000}


async def begin_and_hang(running: Any) -> None:
    running.emit(*running.worker.answer[:1], at=0)
    await asyncio.Event().wait()


async def read_all(call: Any) -> None:
    async for _ in call:
        pass


async def test_an_http_request(http: Any, lines: Lines) -> None:
    headers = {"x-request-id": "mine"}
    answer = await http.post("/v1/completions", json=COMPLETION, headers=headers)
    usage = answer.json()["usage"]
    fields = await lines.only()
    assert fields["method"] == "POST"
    assert (fields["path"], fields["status"]) == ("/v1/completions", "200")
    assert fields["request_id"] == "mine"
    assert fields["num_prompt_tokens"] == usage["prompt_tokens"]
    assert fields["num_cached_tokens"] == 2
    assert fields["num_output_tokens"] == usage["completion_tokens"]
    assert f"{fields['ttft_ms']:.3f}" == answer.headers["pdserve-ttft-ms"]
    assert f"{fields['e2e_ms']:.3f}" == answer.headers["pdserve-e2e-ms"]
    assert fields["route"] == "disaggregated"
    assert (fields["prefill"], fields["decode"]) == ("prefill-0", "decode-0")
    assert (fields["finish_reason"], fields["num_redrives"]) == ("stop", 0)
    assert not fields.keys() & {"api_key", "error", "field", "route_reason", "num_prompts"}
    for words in (
        "POST /v1/completions 200, request mine, ",
        f", {usage['prompt_tokens']} tokens in (2 cached), {usage['completion_tokens']} out, TTFT ",
        " ms, disaggregated: prefill-0 -> decode-0, stop, 0 redrives\n",
    ):
        assert words in lines.text


async def test_a_grpc_request(stack: Any, lines: Lines) -> None:
    params = {"max_tokens": 1}
    request = pb2.GenerateRequest(text=PROMPT, request_id="mine", sampling_params=params)
    await read_all(stack.stub.Generate(request))
    fields = await lines.only()
    assert (fields["path"], fields["status"]) == (GENERATE, "OK")
    assert fields["request_id"] == "mine"
    assert (fields["route"], fields["route_reason"]) == ("local", "max_tokens_1")
    assert (fields["decode"], fields["num_output_tokens"]) == ("decode-0", 1)
    assert not fields.keys() & {"method", "prefill"}
    assert ", local: decode-0 (max_tokens_1), length, 0 redrives\n" in lines.text


async def test_several_prompts_have_one_line(http: Any, lines: Lines) -> None:
    body = {**COMPLETION, "prompt": [PROMPT, PROMPT], "stream": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    fields = await lines.only()
    assert fields["num_prompts"] == 2
    assert fields["num_prompt_tokens"] > 0
    assert (fields["num_cached_tokens"], fields["finish_reason"]) == (4, "stop")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {**COMPLETION, "top_p": 7}, ("400", "invalid_argument", "top_p")),
        ("/v1/completions", {**COMPLETION, "model": "x"}, ("404", "invalid_argument", "model")),
        ("/v1/completions", {"prompt": 2000 * "x"}, ("413", "invalid_argument", None)),
        ("/tokenize", {"prompt": PROMPT, "model": "x"}, ("404", "invalid_argument", "model")),
        ("/nowhere", {}, ("404", None, None)),
    ],
)
async def test_a_refused_http_request(
    http: Any, lines: Lines, path: str, body: object, expected: tuple[str, str | None, str | None]
) -> None:
    await http.post(path, json=body, headers={"x-request-id": "mine"})
    fields = await lines.only()
    assert (fields["status"], fields.get("error"), fields.get("field")) == expected
    assert (fields["path"], fields["request_id"]) == (path, "mine")
    assert fields["e2e_ms"] >= 0
    assert "num_prompt_tokens" not in fields


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({"sampling_params": {"top_p": 7.0}}, ("INVALID_ARGUMENT", "invalid_argument", "top_p")),
        ({"model": "x"}, ("NOT_FOUND", "invalid_argument", "model")),
        # gRPC's core tells the client RESOURCE_EXHAUSTED, and this side that the call is over.
        ({"text": 2000 * "x"}, ("CANCELLED", None, None)),
    ],
)
async def test_a_refused_grpc_request(
    stack: Any,
    lines: Lines,
    request_fields: dict[str, Any],
    expected: tuple[str, str | None, str | None],
) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await read_all(
            stack.stub.Generate(pb2.GenerateRequest(**{"text": PROMPT, **request_fields}))
        )
    fields = await lines.only()
    assert (fields["status"], fields.get("error"), fields.get("field")) == expected


async def test_a_grpc_method_that_is_none(stack: Any, lines: Lines) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.channel.unary_unary("/a.b/C")(b"")
    fields = await lines.only()
    assert (fields["path"], fields["status"]) == ("/a.b/C", "UNIMPLEMENTED")


async def test_a_request_without_workers(start_stack: Any, lines: Lines) -> None:
    async with start_stack(http=True, prefill=0, decode=["127.0.0.1:1"], wait=False) as stack:
        assert (await stack.api.post("/v1/completions", json=COMPLETION)).status_code == 503
        fields = await lines.only()
        assert (fields["status"], fields["error"]) == ("503", "no_worker")


async def test_too_many_requests(start_stack: Any, lines: Lines) -> None:
    async with start_stack(http=True, max_num_queued_requests=1) as stack:
        stack.prefill.behave = stack.decode.behave = hang
        waiting = stack.stub.Generate(pb2.GenerateRequest(text=PROMPT))
        reading = asyncio.create_task(read_all(waiting))
        await until(lambda: stack.server.router.num_queued == 1)
        assert (await stack.api.post("/v1/completions", json=COMPLETION)).status_code == 429
        fields = await lines.only()
        assert (fields["status"], fields["error"]) == ("429", "overloaded")
        waiting.cancel()
        await asyncio.wait([reading])


async def test_keys_have_names(start_stack: Any, lines: Lines, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"team-alice:{KEY}\nanother-{KEY}\n")
    async with start_stack(http=True, api_keys_file=str(keys)) as stack:

        async def models(key: str) -> None:
            await stack.api.get("/v1/models", headers={"authorization": f"Bearer {key}"})

        for key in (KEY, f"another-{KEY}", f"unknown-{KEY}"):
            await models(key)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(stack.stub.Generate(pb2.GenerateRequest(text=PROMPT)))
        metadata = (("authorization", f"Bearer {KEY}"),)
        await read_all(stack.stub.Generate(pb2.GenerateRequest(text=PROMPT), metadata=metadata))
        await until(lambda: len(lines.fields) == 5)
    found = [(fields["status"], fields.get("api_key")) for fields in lines.fields]
    named, unnamed, unknown, missing, served = found
    assert named == ("200", "team-alice")
    assert unnamed == ("200", None)
    assert unknown == ("401", None)
    assert missing == ("UNAUTHENTICATED", None)
    assert served == ("OK", "team-alice")
    assert KEY not in lines.text


async def test_a_client_that_leaves_before_the_first_token(
    stack: Any, http: Any, lines: Lines
) -> None:
    stack.prefill.behave = stack.decode.behave = hang
    asking = asyncio.create_task(http.post("/v1/completions", json=COMPLETION))
    await until(lambda: stack.server.router.num_in_flight == 1)
    asking.cancel()
    fields = await lines.only()
    assert (fields["status"], fields["error"], fields["finish_reason"]) == (
        "499",
        "cancelled",
        "abort",
    )
    assert fields["num_output_tokens"] == 0
    assert "ttft_ms" not in fields


async def test_a_client_that_leaves_in_mid_stream(stack: Any, http: Any, lines: Lines) -> None:
    stack.prefill.behave = hang
    stack.decode.behave = begin_and_hang
    async with http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as call:
        await anext(call.aiter_raw())
    fields = await lines.only()
    assert (fields["status"], fields["error"], fields["finish_reason"]) == (
        "200",
        "cancelled",
        "abort",
    )
    assert fields["num_output_tokens"] == 1


async def test_a_grpc_call_that_is_cancelled(stack: Any, lines: Lines) -> None:
    stack.prefill.behave = hang
    stack.decode.behave = begin_and_hang
    call = stack.stub.Generate(pb2.GenerateRequest(text=PROMPT))
    await call.read()
    call.cancel()
    fields = await lines.only()
    assert (fields["status"], fields["finish_reason"]) == ("CANCELLED", "abort")
    assert fields["num_output_tokens"] == 1


async def test_a_request_that_fails_at_a_worker(stack: Any, http: Any, lines: Lines) -> None:
    fail = fails_with(ErrorCode.INVALID_ARGUMENT, PROMPT)
    stack.prefill.behave, stack.decode.behave = fail, hang
    assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 400
    fields = await lines.only()
    assert (fields["status"], fields["error"]) == ("400", "invalid_argument")
    assert fields["finish_reason"] == "error"
    assert fields["num_prompt_tokens"] > 0


async def test_probes_and_pages_leave_no_line(stack: Any, http: Any, lines: Lines) -> None:
    for path in ("/", "/health", "/version", "/docs", "/openapi.json"):
        assert (await http.get(path)).status_code == 200
    health = health_pb2_grpc.HealthStub(stack.channel)
    await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert not lines.fields


async def test_what_clients_write_stays_in_its_line(http: Any, lines: Lines) -> None:
    await http.get(
        "/%0d%0aa%1b[31m%e2%80%a8" + 1000 * "x", headers={"x-request-id": 200 * b"\x85\x9b"}
    )
    fields = await lines.only()
    assert fields["path"].startswith("/\r\na\x1b[31m\u2028x")
    assert len(fields["path"]) < 200
    assert len(fields["request_id"]) < 300
    assert lines.text.endswith("\n")
    assert not any(character < " " or "\x7f" <= character < "\xa0" for character in lines.text[:-1])
    assert " /\\r\\na\\x1b[31m\\u2028x" in lines.text


async def test_a_flood_of_requests_that_are_refused(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Callable[[], None]] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay_s, then: ends.append(then))
    log = RequestLog()
    for status, count in (("400", 1000), ("503", MAX_LINES_PER_S)):
        for _ in range(count):
            line = RequestLine(path="/v1/completions", method="POST")
            line.status = status
            log.end(line)
    assert len(lines.fields) == 2 * MAX_LINES_PER_S
    # The second is over.
    (end,) = ends
    lines.fields.clear()
    end()
    (left_out,) = lines.fields
    assert left_out["num_left_out"] == 1000 - MAX_LINES_PER_S
    assert left_out["status"] == "400"
    log.end(RequestLine(path="/", method="GET"))
    assert len(lines.fields) == 2


async def test_the_log_of_requests_may_be_off(start_stack: Any, lines: Lines) -> None:
    async with start_stack(http=True, log_requests=False) as stack:
        assert (await stack.api.post("/v1/completions", json=COMPLETION)).status_code == 200
        await read_all(stack.stub.Generate(pb2.GenerateRequest(text=PROMPT)))
    assert not lines.fields
