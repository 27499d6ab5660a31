"""Who is let in by API key, over HTTP and gRPC, and what is said to the others."""

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import Counter

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_router.api.api_keys import ApiKeys
from support.refusals import refused
from support.router_stack import ANSWER_TEXT, replace_file

FIRST = "first-key-0123456789"
SECOND = "second-key-0123456789"
REFUSED = "pdserve_requests_unauthorized_total"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "api-keys"
    path.write_text(f"# of the tests\n\nalice:{FIRST}\n{SECOND}\n")
    return path


@pytest.fixture
async def stack(start_stack: Any, keys_file: Path) -> AsyncIterator[Any]:
    async with start_stack(http=True, api_keys_file=str(keys_file)) as stack:
        yield stack


def sdk(stack: Any, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0)


async def complete(stack: Any, key: str) -> str:
    async with sdk(stack, key) as client:
        answer = await client.completions.create(model="tiny", prompt="hello", max_tokens=50)
    return str(answer.choices[0].text)


async def generate(stack: Any, key: str | None) -> str:
    client = AsyncClient(f"127.0.0.1:{stack.server.grpc_port}", api_key=key)
    try:
        return "".join([o.outputs[0].text async for o in client.generate("hello", timeout_s=30)])
    finally:
        await client.close()


async def test_every_key_of_the_file_opens_both_apis(stack: Any) -> None:
    for key in (FIRST, SECOND):
        assert await complete(stack, key) == ANSWER_TEXT
        assert await generate(stack, key) == ANSWER_TEXT
    async with sdk(stack, FIRST) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_others_get_openais_401(stack: Any) -> None:
    with pytest.raises(openai.AuthenticationError) as error:
        await complete(stack, "another-key-0123456789")
    assert error.value.code == "invalid_api_key"
    assert error.value.type == "invalid_request_error"
    for path in ("/v1/completions", "/v1/models", "/nowhere", "/health/"):
        answer = await stack.api.post(path, content=b"{}")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert stack.metric(REFUSED, api="http", reason="unknown") == 1
    assert stack.metric(REFUSED, api="http", reason="missing") == 4


@pytest.mark.parametrize(
    "header", [FIRST, f"Basic {FIRST}", "Bearer", f"Bearer {FIRST} {SECOND}", "Bearer ü"]
)
async def test_a_header_that_is_none_opens_nothing(stack: Any, header: str) -> None:
    answer = await stack.api.get("/v1/models", headers={"authorization": header.encode()})
    assert answer.status_code == 401


async def test_others_are_unauthenticated_on_grpc(stack: Any) -> None:
    for key in (None, "another-key-0123456789"):
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            await generate(stack, key)
    with refused(grpc.StatusCode.UNAUTHENTICATED):
        await stack.stub.Tokenize(pb2.TokenizeRequest(text="a"))
    assert stack.metric(REFUSED, api="grpc", reason="missing") == 2
    assert stack.metric(REFUSED, api="grpc", reason="unknown") == 1


async def test_health_needs_no_key(stack: Any) -> None:
    assert (await stack.api.get("/health")).status_code == 200
    health = health_pb2_grpc.HealthStub(stack.channel)
    status = (await health.Check(health_pb2.HealthCheckRequest(), timeout=30)).status
    assert status == health_pb2.HealthCheckResponse.SERVING


async def test_a_key_that_is_taken_out_of_the_file_opens_nothing_any_more(
    stack: Any, keys_file: Path
) -> None:
    assert await complete(stack, FIRST) == ANSWER_TEXT
    replace_file(keys_file, f"alice:{SECOND}\n")
    with pytest.raises(openai.AuthenticationError):
        await complete(stack, FIRST)
    assert await complete(stack, SECOND) == ANSWER_TEXT
    # What cannot be meant does not lock everybody out.
    replace_file(keys_file, "")
    assert await complete(stack, SECOND) == ANSWER_TEXT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys, must have at least 1"),
        ("# none\n", "has no keys"),
        (f"{FIRST}\nalice:short\n", "the key in line 2 must be 16 or more visible ASCII"),
        ("alice: two words 0123456789\n", "the key in line 1"),
        (f"alice:{FIRST}: tokens_per_minute=200000", "a limit in line 1 stands where the key must"),
        (f"{FIRST}: token_per_minute=200000", "a limit in line 1 stands where the key must"),
        (f"{SECOND}\nalice:{FIRST}:{SECOND}", "the name in line 2 must be without colons and"),
        (f"{FIRST} alice:{SECOND}", "the name in line 1 must be without colons and white space"),
        ("\xff" * 20, "the key in line 1"),
        ("x" * (1 << 20) + "y", "has more than 1048576 bytes"),
    ],
)
def test_a_file_without_good_keys_is_refused_without_showing_any(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=f"api_keys_file {re.escape(str(path))}.*{message}"
    ) as error:
        ApiKeys(str(path), refusals())
    assert "key-0123456789" not in str(error.value)
    assert "short" not in str(error.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(OSError, match="api_keys_file /nowhere cannot be read: No such file"):
        ApiKeys("/nowhere", refusals())


def refusals() -> Counter:
    return Counter("refused", "", ["api", "reason"], registry=None)


async def test_keys_are_not_kept(keys_file: Path) -> None:
    keys = ApiKeys(str(keys_file), refusals())
    # In a context of its own, as a call has: it is told there whose call it is.
    await asyncio.create_task(keys.check(f"Bearer {FIRST}", api="http"))
    held = strings_of(keys)
    assert str(keys_file) in held
    assert not any(FIRST in each for each in held)


def strings_of(root: object) -> set[str]:
    """Return what can be reached from it, but for what all objects share."""
    seen, todo, strings = {id(root)}, [root], set()
    while todo:
        for each in gc.get_referents(todo.pop()):
            if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType)):
                continue
            seen.add(id(each))
            todo.append(each)
            if isinstance(each, (str, bytes)):
                strings.add(each if isinstance(each, str) else each.decode(errors="replace"))
    return strings
