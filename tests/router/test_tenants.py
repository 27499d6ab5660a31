"""What a request is said to belong to: its session, and its API key's tenant."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import ErrorCode
from pdserve_router.api.large_requests.processes import EdgeSettings
from pdserve_router.config import RouterConfig
from pdserve_router.requests.input import input_processor
from pdserve_router.requests.input.generation_request import GenerationRequest
from pdserve_router.requests.input.input_processor import InputProcessor
from pdserve_router.requests.tenants.tenant import owned
from pdserve_router.workers.model_limits import ModelLimits
from pdserve_router.workers.routing.prefix_index import prefix_hashes
from support.fake_worker import Running, decode
from support.refusals import refused

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 50}
ALICE = "alice-key-0123456789"
ALICE_TOO = "alice-too-0123456789"
BOB = "bob-key-0123456789"
NAMELESS = ("nameless-1-0123456789", "nameless-2-0123456789")


async def ask(stack: Any, *, session: str = "", key: str = "", **fields: object) -> tuple[str, str]:
    """Return the workers that answered, over HTTP."""
    headers = {"x-session-id": session} if session else {}
    if key:
        headers["authorization"] = f"Bearer {key}"
    body = {**COMPLETION, **fields}
    answer = await stack.api.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return (
        answer.headers["pdserve-prefill-engine-id"],
        answer.headers["pdserve-decode-engine-id"],
    )


async def ask_grpc(
    stack: Any, *, session: str = "", key: str = "", **fields: object
) -> tuple[str, str]:
    metadata = [("x-session-id", session)] if session else []
    if key:
        metadata.append(("authorization", f"Bearer {key}"))
    request = pb2.GenerateRequest(text="hello", **fields)
    call = stack.stub.Generate(request, timeout=30, metadata=metadata)
    metrics = [response.output.metrics async for response in call][-1]
    return metrics.prefill_engine_id, metrics.decode_engine_id


class Sessions:
    """Sessions that routes were asked for, by the router's own choosing of them."""

    def __init__(self, stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: list[str] = []
        choose = stack.server.pool.route

        def route(*args: Any, session: str, **kwargs: Any) -> Any:
            self._seen.append(session)
            return choose(*args, session=session, **kwargs)

        monkeypatch.setattr(stack.server.pool, "route", route)

    def take(self) -> str:
        (session,) = self._seen
        self._seen.clear()
        return session


async def test_a_session_stays_with_its_workers_whatever_names_it(start_stack: Any) -> None:
    async with start_stack(http=True, prefill=3, decode=3, routing_policy="session") as stack:
        pair = await ask(stack, session="chat-7")
        for _ in range(3):
            assert await ask(stack, session="chat-7", user="another") == pair
            assert await ask(stack, user="chat-7") == pair
            assert await ask_grpc(stack, session="chat-7") == pair


async def test_a_request_that_is_sent_again_takes_its_session_along(start_stack: Any) -> None:
    async with start_stack(http=True, prefill=2, decode=2, routing_policy="session") as stack:
        _, first = await ask(stack, session="chat-7")
        worker = next(each for each in stack.decodes if each.info.engine_id == first)

        async def refuse(running: Running) -> None:
            worker.behave = decode
            running.fail(ErrorCode.OVERLOADED, "full", is_retryable=True)

        worker.behave = refuse
        moved = await ask(stack, session="chat-7")
        assert moved[1] != first
        assert await ask(stack, session="chat-7") == moved


@pytest.mark.parametrize(
    ("headers", "user", "named"),
    [
        ({}, "u", "u"),
        ({"x-session-id": "s"}, "u", "s"),
        ({"x-session-id": "s" * 256}, None, "s" * 256),
        ({"x-session-id": ""}, "u", "u"),
        ({}, "ü" * 256, "ü" * 256),
        *(({}, user, "") for user in (None, "", 5, ["u"], {"u": "u"}, "u" * 257)),
    ],
)
async def test_what_names_a_session(
    start_stack: Any, monkeypatch: Any, headers: Any, user: object, named: str
) -> None:
    async with start_stack(http=True) as stack:
        sessions = Sessions(stack, monkeypatch)
        body = {**COMPLETION, "user": user}
        answer = await stack.api.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert sessions.take() == (owned("", named) if named else "")


async def test_a_session_that_is_none_is_refused(start_stack: Any) -> None:
    async with start_stack(http=True) as stack:
        for value, problem in (
            (b"s" * 257, "has 257 characters, must be 1 to 256"),
            (b"s\xe9", "must be printable ASCII"),
            (b"a\tb", "must be printable ASCII"),
        ):
            headers = {"x-session-id": value}
            answer = await stack.api.post("/v1/completions", json=COMPLETION, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "x-session-id"
            assert answer.json()["error"]["message"] == f"x-session-id {problem}"
        problem = "x-session-id has 257 characters, must be 1 to 256"
        with refused(grpc.StatusCode.INVALID_ARGUMENT, problem):
            await ask_grpc(stack, session="s" * 257)


@pytest.fixture
async def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "api-keys"
    lines = (f"alice:{ALICE}", f"alice:{ALICE_TOO}", f"bob:{BOB}", *NAMELESS)
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
async def stack(start_stack: Any, keys_file: str) -> AsyncIterator[Any]:
    async with start_stack(http=True, api_keys_file=keys_file) as stack:
        yield stack


async def test_sessions_of_different_keys_are_different_ones(stack: Any, monkeypatch: Any) -> None:
    sessions = Sessions(stack, monkeypatch)
    seen: dict[str, str] = {}
    for key in (ALICE, ALICE_TOO, BOB, *NAMELESS):
        await ask(stack, session="chat-7", key=key)
        seen[key] = sessions.take()
        await ask(stack, user="chat-7", key=key)
        assert sessions.take() == seen[key]
        await ask_grpc(stack, session="chat-7", key=key)
        assert sessions.take() == seen[key]
        await ask(stack, key=key)
        assert sessions.take() == ""
    assert seen[ALICE] == seen[ALICE_TOO]
    assert len(set(seen.values())) == 4


def test_a_tenants_values_are_nobody_elses() -> None:
    pairs = (("", "1:ab"), ("a", "b"), ("ab", ""), ("a", "bb"), ("b", "b"), ("", ""), ("1:a", "b"))
    assert len({owned(*pair) for pair in pairs}) == len(pairs)


async def salts(stack: Any, keys: Sequence[str], **fields: object) -> list[str | None]:
    """Return what workers are told to keep each key's blocks apart by, over both APIs."""
    found = []
    for key in keys:
        for send in (ask, ask_grpc):
            await send(stack, key=key, **fields)
            (prefill,), (decode,) = stack.prefill.requests, stack.decode.requests
            assert prefill.cache_salt == decode.cache_salt
            found.append(decode.cache_salt)
            stack.prefill.requests.clear()
            stack.decode.requests.clear()
    return found


async def test_keys_of_different_names_share_no_prefixes(stack: Any) -> None:
    names = {"alice": (ALICE, ALICE_TOO), "bob": (BOB,), "1": NAMELESS[:1], "2": NAMELESS[1:]}
    seen: list[str | None] = []
    for keys in names.values():
        for fields in ({}, {"cache_salt": "s"}, {"cache_salt": "t"}):
            (salt,) = set(await salts(stack, keys, **fields))
            seen.append(salt)
    assert None not in seen
    assert len(set(seen)) == len(names) * 3
    assert not {"s", "t"} & set(seen)


async def test_prefixes_are_shared_where_that_is_wanted(start_stack: Any, keys_file: str) -> None:
    async with start_stack(http=True, api_keys_file=keys_file, share_prefixes=True) as stack:
        assert set(await salts(stack, (ALICE, BOB))) == {None}
        assert set(await salts(stack, (ALICE, BOB), cache_salt="s")) == {"s"}


async def test_without_keys_a_salt_is_the_clients(start_stack: Any) -> None:
    async with start_stack(http=True) as stack:
        assert set(await salts(stack, ("",))) == {None}
        assert set(await salts(stack, ("",), cache_salt="s")) == {"s"}


async def clients(stack: Any, keys: Sequence[str]) -> set[str]:
    """Return whom workers take requests with these keys for, over both APIs."""
    for key in keys:
        for send in (ask, ask_grpc):
            await send(stack, key=key)
    found = {each.client_id for each in (*stack.prefill.requests, *stack.decode.requests)}
    stack.prefill.requests.clear()
    stack.decode.requests.clear()
    return found


async def test_workers_learn_who_asks_by_name_or_address(stack: Any, start_stack: Any) -> None:
    seen = [await clients(stack, keys) for keys in ((ALICE, ALICE_TOO), (BOB,), NAMELESS[:1])]
    async with start_stack(http=True) as other:
        seen.append(await clients(other, ("",)))
    assert [len(each) for each in seen] == [1] * 4
    assert len(set().union(*seen)) == 4
    assert not any("alice" in each or "127" in each for each in set().union(*seen))


async def test_a_long_prompt_is_hashed_with_its_tenants_salt(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_processor, "MAX_UNHASHED_TOKENS", 40)
    limits = ModelLimits(max_model_len=100, vocab_size=320, eos_token_ids=(1,), block_size=16)
    processor = InputProcessor(
        tokenizer, model_name="tiny", default_deadline_s=60, max_deadline_s=90
    )
    hashes = set()
    for tenant in ("", "alice", "bob"):
        wanted = GenerationRequest(request_id="r", token_ids=range(5, 55), tenant=tenant)
        processed = await processor.process(wanted, limits)
        assert processed.prefix_hashes == prefix_hashes(processed.core_request, 16)
        hashes.add(processed.prefix_hashes)
    assert len(hashes) == 3


def test_processes_for_large_requests_are_told(model_dir: Path) -> None:
    for shares in (False, True):
        config = RouterConfig(model=str(model_dir), decode=("127.0.0.1:1",), share_prefixes=shares)
        settings = json.loads(EdgeSettings.from_config(config).to_json())
        assert settings["input_processor"]["share_prefixes"] is shares
