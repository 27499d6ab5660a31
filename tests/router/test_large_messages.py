"""One message of any size and shape: it is refused before objects are made of it, and nothing that
is large is parsed or tokenized in the router's own process.
"""

import asyncio
import gc
import json

import grpc
import httpx
import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.errors import InvalidRequestError
from pdserve_router.api.large_requests import processes as edge_processes
from pdserve_router.requests.input.input_processor import InputProcessor
from pdserve_router.requests.input.request_limits import (
    INLINE_BYTES,
    MAX_MESSAGES,
    MAX_STRINGS,
    MAX_VALUES,
    MAX_WIRE_FIELDS,
    check_json_counts,
    check_wire_counts,
)
from support.router_stack import ANSWER_TEXT
from support.samples import sampled

SERVICE = "/pdserve.v1.InferenceService/"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MiB = 1 << 20
# Such that a body of 8 MB could be a prompt.
LONG = {"max_model_len": 1 << 17}
VICTIM = "victim"
# Of more tokens than there are attacks.
ANSWER = 5 * ANSWER_TEXT


def chat(messages: bytes) -> bytes:
    return b'{"model":"tiny","messages":[%b]}' % messages


def completion(prompt: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"tiny","prompt":%b%b}' % (prompt, more)


def many(entry: bytes, num_bytes: int = 8 * MiB - 4096) -> bytes:
    return b",".join([entry] * (num_bytes // (len(entry) + 1)))


def wire(number: int, content: bytes) -> bytes:
    """A length-delimited field in protobuf."""
    out = bytearray()
    for value in (number << 3 | 2, len(content)):
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out) + content


TURN = wire(1, wire(1, b"user") + wire(2, b"a"))
MESSAGE = b'{"role":"user","content":"a"}'
TEXT = b"the quick brown fox "
NUM_WIRE_BYTES = 8 * MiB - 4096

HOSTILE_BODIES = {
    "messages": (CHAT, lambda: chat(many(MESSAGE)), "body has 1117935 strings"),
    "messages that could be": (
        CHAT,
        lambda: chat(many(MESSAGE, 30 * (MAX_MESSAGES + 1))),
        f"messages has {MAX_MESSAGES + 1} entries, at most {MAX_MESSAGES}",
    ),
    "parts": (
        CHAT,
        lambda: chat(b'{"role":"user","content":[%b]}' % many(b'{"type":"text","text":""}')),
        f"strings, at most {MAX_STRINGS}",
    ),
    "parts that could be": (
        CHAT,
        lambda: chat(b'{"role":"user","content":[%b]}' % many(b'{"type":"text","text":""}', MiB)),
        "messages[0].content has 40329 entries, at most 4096",
    ),
    "annotations": (
        CHAT,
        lambda: chat(b'{"role":"user","content":"a","annotations":[%b]}' % many(b"[]", MiB // 4)),
        "messages[0].annotations has 87381 entries, at most 1024",
    ),
    "one string": (
        COMPLETION,
        lambda: completion(b'"%b"' % (TEXT * 400_000)),
        "bytes of text or more, at most",
    ),
    "escapes": (
        COMPLETION,
        lambda: completion(b'"%b"' % (b"\\u0061" * (8 * MiB // 6 - 100))),
        "prompt has more than 131072 tokens (max_model_len): the first 524288",
    ),
    "token ids": (COMPLETION, lambda: completion(b"[%b]" % many(b"1")), "values, at most"),
    "token ids that could be": (
        COMPLETION,
        lambda: completion(b"[%b]" % many(b"7", 2 * 200_000)),
        "prompt has 200000 tokens, at most 131071 fit",
    ),
    "prompts": (COMPLETION, lambda: completion(b"[%b]" % many(b'""')), "strings, at most"),
    "nesting": (
        COMPLETION,
        lambda: completion(b"[" * 4_000_000 + b"]" * 4_000_000),
        "body has 4000002 values",
    ),
    "stop strings": (
        COMPLETION,
        lambda: completion(b'"a"', b',"stop":[%b]' % many(b'"abcde"')),
        "strings, at most",
    ),
    "stop strings that could be": (
        COMPLETION,
        lambda: completion(b'"a"', b',"stop":[%b]' % many(b'"abcde"', MiB)),
        "stop has 131072 entries, at most 16",
    ),
    "bad words": (
        COMPLETION,
        lambda: completion(b'"a"', b',"bad_words":[%b]' % many(b'"abcde"', MiB)),
        "bad_words has 131072 entries, at most 64",
    ),
    "logit_bias": (
        COMPLETION,
        lambda: completion(
            b'"a"', b',"logit_bias":{%b}' % b",".join(b'"%d":1' % i for i in range(100_000))
        ),
        "logit_bias has 100000 entries, at most 1024",
    ),
    "unknown fields": (
        COMPLETION,
        lambda: completion(b'"a",' + b",".join(b'"%d":1' % i for i in range(100_000))),
        "body has 100002 fields, at most 100",
    ),
    "no JSON": (COMPLETION, lambda: b"x" * (8 * MiB), "body is not valid JSON"),
    "too many bytes": (COMPLETION, lambda: b"x" * (8 * MiB + 1), "body has 8388609 bytes or more"),
}

HOSTILE_MESSAGES = {
    "messages": ("Generate", lambda: wire(4, TURN * (NUM_WIRE_BYTES // len(TURN))), "fields"),
    "empty messages": ("Generate", lambda: wire(4, b"\n\0" * (NUM_WIRE_BYTES // 2)), "fields"),
    "messages that could be": (
        "Generate",
        lambda: wire(4, b"\n\0" * 100_000),
        f"messages has 100000 entries, at most {MAX_MESSAGES}",
    ),
    "text": (
        "Generate",
        lambda: wire(3, TEXT * (NUM_WIRE_BYTES // len(TEXT))),
        "bytes of text or more, at most",
    ),
    "resume": ("Generate", lambda: wire(3, b"a") + b"R\0" * (NUM_WIRE_BYTES // 2), "fields"),
    "resume that could be": (
        "Generate",
        lambda: wire(3, b"a") + b"R\0" * 100_000,
        "resume has 100000 entries, at most 64",
    ),
    "stop strings": (
        "Generate",
        lambda: wire(3, b"a") + wire(6, wire(14, b"a") * 100_000),
        "stop has 100000 entries, at most 16",
    ),
    "bad_words_token_ids": (
        "Generate",
        lambda: wire(3, b"a") + wire(6, wire(32, b"") * 100_000),
        "bad_words_token_ids has 100000 entries, at most 128",
    ),
    "token ids": (
        "Generate",
        lambda: wire(5, wire(1, b"\7" * 4 * MiB)),
        "prompt has 4194304 tokens, at most 131071 fit",
    ),
    "a model's name": (
        "Generate",
        lambda: wire(3, b"a") + wire(2, b"x" * NUM_WIRE_BYTES),
        "is not served here",
    ),
    "no message": ("Generate", lambda: b"\xff" * NUM_WIRE_BYTES, "no message"),
    "tokenized messages": (
        "Tokenize",
        lambda: wire(3, TURN * (NUM_WIRE_BYTES // len(TURN))),
        "fields",
    ),
    "tokenized text": (
        "Tokenize",
        lambda: wire(2, TEXT * (NUM_WIRE_BYTES // len(TEXT))),
        "bytes of text or more, at most",
    ),
    "detokenized ids": (
        "Detokenize",
        lambda: wire(2, b"\7" * NUM_WIRE_BYTES),
        "bytes, at most 1638400",
    ),
    "detokenized ids that could be": (
        "Detokenize",
        lambda: wire(2, b"\7" * MiB),
        "token_ids has 1048576 tokens, at most 262144",
    ),
}


@pytest.fixture
def nothing_here(monkeypatch):
    """From now on this process parses and tokenizes nothing; others do not know of it."""

    def forbid() -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise AssertionError("in the router's own process")

        monkeypatch.setattr("pdserve_router.api.openai.request.parse_body", fail)
        monkeypatch.setattr("pdserve_router.api.grpc.service._parse", fail)
        monkeypatch.setattr(InputProcessor, "process", fail)
        monkeypatch.setattr(InputProcessor, "tokenize", fail)
        monkeypatch.setattr(InputProcessor, "detokenize", fail)

    return forbid


class Victim:
    """A stream of which a token comes whenever it is asked for."""

    def __init__(self, stack) -> None:
        self._may_go_on = asyncio.Semaphore(0)
        stack.decode.before_token = self._before_token
        self._call = stack.stub.Generate(pb2.GenerateRequest(text="hello", request_id=VICTIM))

    async def _before_token(self, running, num_tokens: int) -> None:
        if running.request.external_req_id == VICTIM:
            await self._may_go_on.acquire()

    async def read(self) -> str:
        """Return the text of what comes next."""
        self._may_go_on.release()
        response = await self._call.read()
        return "" if response is grpc.aio.EOF else response.output.outputs[0].text


async def send_raw(stack, method: str, raw: bytes):
    if method == "Generate":
        call = stack.channel.unary_stream(SERVICE + method)(raw)
        return [part async for part in call]
    return await stack.channel.unary_unary(SERVICE + method)(raw)


async def test_hostile_bodies_are_refused_elsewhere_while_others_stream(
    start_stack, nothing_here
) -> None:
    async with start_stack(prefill=0, http=True, info=LONG, answer=ANSWER) as stack:
        victim = Victim(stack)
        text = await victim.read()
        nothing_here()
        for name, (path, make, problem) in HOSTILE_BODIES.items():
            sending = asyncio.create_task(stack.api.post(path, content=make()))
            text += await victim.read()
            answer = await sending
            assert answer.status_code in (400, 413), f"{name}: {answer.text[:500]}"
            assert problem in answer.json()["error"]["message"], name
        while part := await victim.read():
            text += part
        assert text == ANSWER
        done = stack.metric("pdserve_large_requests_total", outcome="done")
        # All but the one that is refused by its length.
        assert done == len(HOSTILE_BODIES) - 1


async def test_hostile_messages_are_refused_elsewhere_while_others_stream(
    start_stack, nothing_here
) -> None:
    async with start_stack(prefill=0, info=LONG, answer=ANSWER) as stack:
        victim = Victim(stack)
        text = await victim.read()
        nothing_here()
        for name, (method, make, problem) in HOSTILE_MESSAGES.items():
            sending = asyncio.create_task(send_raw(stack, method, make()))
            text += await victim.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sending
            code = caught.value.code()
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), name
            assert problem in caught.value.details(), name
        models = await send_raw(stack, "ListModels", b"\n\0" * (NUM_WIRE_BYTES // 2))
        assert pb2.ListModelsResponse.FromString(models).models[0].id == "tiny"
        while part := await victim.read():
            text += part
        assert text == ANSWER


async def test_a_short_model_bounds_bodies_by_their_length(start_stack) -> None:
    async with start_stack(prefill=0, http=True) as stack:
        limit = stack.server.router.max_request_bytes
        assert 4096 * stack.server.router.tokenizer.max_token_bytes < limit < 4 * MiB
        answer = await stack.api.post(COMPLETION, content=b" " * (limit + 1))
        assert answer.status_code == 413
        assert f"body has {limit + 1} bytes or more, at most {limit}" in answer.text
        with pytest.raises(grpc.aio.AioRpcError, match=f"at most {limit} are of use"):
            await send_raw(stack, "Generate", b"\xff" * (limit + 1))
        assert stack.metric("pdserve_large_requests_total", outcome="done") == 0


LARGE_REQUESTS = {
    "text": {"prompt": "hello world " * 9000},
    "token ids": {"prompt": [5, 6, 7] * 15_000, "echo": True},
    "echoed text": {"prompt": "hello " * 15_000, "echo": True, "logprobs": 1},
    "stream": {
        "prompt": "hello " * 15_000,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "several": {"prompt": "hello " * 15_000, "n": 2, "stop": ["zzz"], "bad_words": ["fox jumps"]},
}


def content(answer: httpx.Response) -> list[object]:
    """What it says. Tokens of a stream that come while the router is busy leave together."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
    values = [json.loads(line) for line in lines if line not in ("", "[DONE]")]
    text = ""
    rest: list[object] = []
    for value in values:
        del value["id"], value["created"]
        (choice,) = value["choices"] if len(values) > 1 and value["choices"] else ({},)
        text += choice.pop("text", "")
        if choice.get("finish_reason", "none") is not None:
            rest.append(value)
    return [text, *rest]


@pytest.mark.parametrize("name", sampled(LARGE_REQUESTS, "echoed text", "stream", "several"))
async def test_a_large_request_is_answered_like_a_small_one(
    start_stack, tokenizer, monkeypatch, name
) -> None:
    body = {"model": "tiny", "seed": 1, "max_tokens": 50, **LARGE_REQUESTS[name]}

    async with start_stack(prefill=0, http=True, info=LONG) as stack:
        large = await stack.api.post(COMPLETION, json=body)
        assert large.status_code == 200
        assert stack.metric("pdserve_large_requests_total", outcome="done") == 1
        monkeypatch.setattr("pdserve_router.api.openai.endpoints.is_small", lambda raw, mark: True)
        small = await stack.api.post(COMPLETION, json=body)
        assert stack.metric("pdserve_large_requests_total", outcome="done") == 1
        assert content(large) == content(small)
        sent = [
            (request.prompt_token_ids, request.task.sampling_params)
            for request in stack.decode.requests
        ]
        half = len(sent) // 2
        assert sent[:half] == sent[half:]


BAD_BODIES = [
    {"prompt": ""},
    {"prompt": [400]},
    {"prompt": "a", "model": "other"},
    {"prompt": "a", "top_p": 0},
    {"prompt": "a", "n": "x"},
    {"prompt": "a", "truncate_prompt_tokens": 0},
    {"prompt": "a", "tools": [1]},
    {"prompt": "a", "stop": ["a"] * 17},
    {"prompt": "a", "stream": True, "use_beam_search": True, "temperature": 0},
    {"prompt": "a", "logit_bias": {"x": 1}},
    {"prompt": "a", "min_tokens": 1 << 20},
    {},
]


async def test_refusals_are_the_same_for_small_and_large_bodies(start_stack) -> None:
    async with start_stack(prefill=0, http=True) as stack:
        for number, fields in enumerate(BAD_BODIES, 1):
            raw = json.dumps({"model": "tiny", **fields}).encode()
            small = await stack.api.post(COMPLETION, content=raw)
            large = await stack.api.post(COMPLETION, content=raw + b" " * INLINE_BYTES)
            assert small.status_code in (400, 404), fields
            assert (large.status_code, large.json()) == (small.status_code, small.json())
            done = stack.metric("pdserve_large_requests_total", outcome="done")
            assert done == number
        assert stack.metric("pdserve_requests_total", model="tiny", outcome="rejected") == 2 * len(
            BAD_BODIES
        )


BAD_MESSAGES = [
    pb2.GenerateRequest(),
    pb2.GenerateRequest(text="a", model="other"),
    pb2.GenerateRequest(text="a", lora_name="x"),
    pb2.GenerateRequest(text="a", request_id="x" * 257),
    pb2.GenerateRequest(chat=pb2.ChatPrompt(messages=[pb2.ChatMessage(role="robot")])),
    pb2.GenerateRequest(text="a", sampling_params=core.SamplingParams(top_p=2)),
    pb2.GenerateRequest(text="a", resume=[pb2.ResumedCompletion(index=1)]),
]


async def test_refusals_are_the_same_for_small_and_large_messages(start_stack) -> None:
    padding = wire(1000, b" " * INLINE_BYTES)  # an unknown field
    async with start_stack(prefill=0) as stack:
        for message in BAD_MESSAGES:
            raw = message.SerializeToString()
            errors = []
            for each in (raw, raw + padding):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await send_raw(stack, "Generate", each)
                errors.append((caught.value.code(), caught.value.details()))
            assert errors[0] == errors[1]
        done = stack.metric("pdserve_large_requests_total", outcome="done")
        assert done == len(BAD_MESSAGES)


async def test_tokenizing_and_back_is_the_same_for_small_and_large_messages(start_stack) -> None:
    padding = wire(1000, b" " * INLINE_BYTES)
    messages = {
        "Tokenize": pb2.TokenizeRequest(text="hello world"),
        "Detokenize": pb2.DetokenizeRequest(token_ids=[50, 60, 70]),
    }
    async with start_stack(prefill=0) as stack:
        for method, message in messages.items():
            raw = message.SerializeToString()
            assert await send_raw(stack, method, raw) == await send_raw(
                stack, method, raw + padding
            )
        assert stack.metric("pdserve_large_requests_total", outcome="done") == len(messages)


async def test_a_client_with_too_many_bytes_is_told_to_come_back(start_stack, monkeypatch) -> None:
    monkeypatch.setattr(edge_processes, "MAX_CLIENT_BYTES", MiB)
    large = completion(b'"a"') + b" " * (MiB // 2)
    async with start_stack(prefill=0, http=True) as stack:
        answers = await asyncio.gather(
            *(stack.api.post(COMPLETION, content=large) for _ in range(8))
        )
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) >= 1
        assert sum(answer.status_code == 200 for answer in answers) >= 1
        assert "large requests of one client have" in refused[0].text
        assert refused[0].headers["retry-after"] == "1"
        assert (await stack.api.post(COMPLETION, content=completion(b'"a"'))).status_code == 200
        assert (await stack.api.post(COMPLETION, content=large)).status_code == 200


async def test_a_refused_message_is_gone_without_a_garbage_collection(start_stack) -> None:
    """It has megabytes; collections of all objects are rare."""
    padding = b" " * INLINE_BYTES
    async with start_stack(prefill=0, http=True) as stack:
        await stack.api.post(COMPLETION, content=completion(b'""') + padding)
        gc.collect()
        gc.disable()
        try:
            answer = await stack.api.post(COMPLETION, content=completion(b'""') + padding)
            assert answer.status_code == 400
            for method in ("Generate", "Tokenize"):
                with pytest.raises(grpc.aio.AioRpcError):
                    await send_raw(stack, method, b"\xff" + padding)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kinds = {type(each).__name__ for each in gc.garbage}
            # The call, its exceptions.
            assert not kinds & {"RPCState", "AbortError", "InvalidRequestError"}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


def test_strings_hide_what_looks_like_structure() -> None:
    code = json.dumps({"prompt": '{[,"\\"' * MAX_VALUES, "model": "tiny"}).encode()
    check_json_counts(code, max_token_ids=0)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b'["a",' * (MAX_STRINGS + 1), f"body has {MAX_STRINGS + 1} strings, at most"),
        (b'["\\\\","\\"",' * (MAX_STRINGS // 2 + 1), f"body has {MAX_STRINGS + 2} strings"),
        (b"[1," * (MAX_VALUES // 2 + 1), f"body has {MAX_VALUES + 2} values, at most {MAX_VALUES}"),
        (b"{" * (MAX_VALUES + 1), f"body has {MAX_VALUES + 1} values"),
    ],
)
def test_json_is_counted_without_objects(raw, problem) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        check_json_counts(raw, max_token_ids=0)
    assert caught.value.field == "body"


def test_the_fields_of_a_message_are_counted_as_far_as_it_is_known() -> None:
    descriptor = pb2.GenerateRequest.DESCRIPTOR
    check_wire_counts(wire(4, TURN * (MAX_WIRE_FIELDS // 3 - 1)), descriptor)
    check_wire_counts(wire(3, TURN * MAX_WIRE_FIELDS), descriptor)  # text
    check_wire_counts(wire(999, TURN * MAX_WIRE_FIELDS), descriptor)  # nobody looks into it
    for raw in (wire(4, TURN * (MAX_WIRE_FIELDS // 3 + 1)), b"\x38\1" * (MAX_WIRE_FIELDS + 1)):
        with pytest.raises(InvalidRequestError, match=f"more than {MAX_WIRE_FIELDS} fields"):
            check_wire_counts(raw, descriptor)
    for raw in (b"\xff" * 20, b"\x0f", b"\x08"):
        with pytest.raises(InvalidRequestError, match="message"):
            check_wire_counts(raw, descriptor)
