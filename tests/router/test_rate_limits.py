"""Limits of API keys, as clients of a router meet them."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_router.api.api_keys_file import read_api_keys
from pdserve_router.requests.input.input_processor import InputProcessor
from pdserve_router.requests.input.request_limits import INLINE_BYTES
from support.fake_worker import EMBEDDER, Running, decode, hang, is_probe, pool, prefill
from support.router_stack import Stack, replace_file, tokens_of
from support.waiting import until

ALICE = "alice-key-0123456789"
ALICE_TOO = "alice-too-0123456789"
BOB = "bob-key-0123456789"
NAMELESS = "nameless-1-0123456789"
COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 50}
REQUESTS = "pdserve_api_key_requests_total"
TOKENS = "pdserve_api_key_tokens_total"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "api-keys"


@pytest.fixture
def start(start_stack: Any, keys_file: Path) -> Any:
    @contextlib.asynccontextmanager
    async def start(text: str, **config: object) -> AsyncIterator[Stack]:
        replace_file(keys_file, text)
        async with start_stack(http=True, api_keys_file=str(keys_file), **config) as stack:
            yield stack

    return start


async def post(stack: Stack, key: str, **fields: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await stack.api.post("/v1/completions", json={**COMPLETION, **fields}, headers=headers)


async def generate(stack: Stack, key: str, **fields: Any) -> list[pb2.RequestOutput]:
    metadata = (("authorization", f"Bearer {key}"),)
    call = stack.stub.Generate(
        pb2.GenerateRequest(text="hello", **fields), timeout=30, metadata=metadata
    )
    return [response.output async for response in call]


async def test_requests_above_the_limit_get_openais_429(start: Any) -> None:
    async with start(f"alice:{ALICE} requests_per_minute=2\nbob:{BOB}\n") as stack:
        for left in (1, 0):
            answer = await post(stack, ALICE)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
            assert "x-ratelimit-limit-tokens" not in answer.headers
        answer = await post(stack, ALICE)
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert error["message"].startswith("requests_per_minute of this API key is 2, 0 are left")
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(stack, ALICE)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(refused.value.trailing_metadata() or ())
        assert 1 <= int(trailers["retry-after-ms"]) <= 30_000
        others = await post(stack, BOB)
        assert others.status_code == 200
        assert not [name for name in others.headers if name.startswith("x-ratelimit")]
        assert stack.metric(REQUESTS, api_key="alice", outcome="accepted") == 2
        assert stack.metric(REQUESTS, api_key="alice", outcome="requests_per_minute") == 2
        # No alert on overload because of it.
        assert stack.metric("pdserve_requests_total", model="tiny", outcome="rejected") == 2
        assert stack.metric("pdserve_requests_total", model="tiny", outcome="refused") == 0


async def test_what_is_refused_is_not_tokenized(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processed = []
    process = InputProcessor.process

    async def noting(self: InputProcessor, *args: Any) -> Any:
        processed.append(args)
        return await process(self, *args)

    monkeypatch.setattr(InputProcessor, "process", noting)
    async with start(f"alice:{ALICE} requests_per_minute=1\n") as stack:
        assert (await post(stack, ALICE)).status_code == 200
        assert (await post(stack, ALICE)).status_code == 429
        # Nor is it parsed.
        assert (await post(stack, ALICE, prompt={})).status_code == 429
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(stack, ALICE)
    assert len(processed) == 1


async def test_tokens_are_held_at_the_beginning_and_settled_at_the_end(start: Any) -> None:
    limit = 1000
    async with start(f"alice:{ALICE} tokens_per_minute={limit}\n") as stack:
        answer = await post(stack, ALICE)
        used = answer.json()["usage"]
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= limit - used["total_tokens"]
        stream = await post(stack, ALICE, stream=True, max_tokens=500)
        # While it runs it may come to need all of these.
        assert int(stream.headers["x-ratelimit-remaining-tokens"]) < limit - 500
        for kind in ("prompt", "output"):
            name = {"prompt": "prompt_tokens", "output": "completion_tokens"}[kind]
            assert stack.metric(TOKENS, api_key="alice", kind=kind) == 2 * used[name]
        answer = await post(stack, ALICE, max_tokens=600, n=2)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"
        assert "at most 1000 per minute with this API key" in answer.json()["error"]["message"]
        answer = await post(stack, ALICE, prompt=[[5] * 1100])
        assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("n", [1, 2])
async def test_what_a_stream_goes_on_from_is_not_paid_for_again(start: Any, n: int) -> None:
    async with start(f"alice:{ALICE} tokens_per_minute=10000\n") as stack:
        params = core.SamplingParams(seed=7, n=n)
        outputs = await generate(stack, ALICE, sampling_params=params)
        resume = [
            pb2.ResumedCompletion(index=index, token_ids=tokens_of(outputs, index)[: 3 + index])
            for index in range(n)
        ]
        num_resumed = sum(len(each.token_ids) for each in resume)

        def num_paid(kind: str) -> float:
            return stack.metric(TOKENS, api_key="alice", kind=kind)

        num_output, num_prompt = num_paid("output"), num_paid("prompt")
        rest = await generate(stack, ALICE, sampling_params=params, resume=resume)
        assert rest[-1].usage.num_output_tokens == num_output
        assert num_paid("output") == 2 * num_output - num_resumed
        assert num_paid("prompt") == 2 * num_prompt
        # It is cut before it has brought anything.
        stack.prefill.behave = stack.decode.behave = hang
        cut = asyncio.create_task(generate(stack, ALICE, sampling_params=params, resume=resume))
        await until(lambda: stack.server.router.num_in_flight == 1)
        await stack.server.stop(0.1)
        await asyncio.wait([cut])
        assert num_paid("output") == 2 * num_output - num_resumed
        assert num_paid("prompt") == 2 * num_prompt


async def test_no_more_run_at_a_time_and_each_end_makes_room(start: Any) -> None:
    text = f"alice:{ALICE} max_concurrent_requests=2\nalice:{ALICE_TOO}\nbob:{BOB}\n"
    async with start(text) as stack:
        behave = stack.prefill.behave, stack.decode.behave
        stack.prefill.behave = stack.decode.behave = hang
        running = [asyncio.create_task(post(stack, key)) for key in (ALICE, ALICE_TOO)]
        await until(lambda: all(worker.num_running == 2 for worker in stack.workers))
        answer = await post(stack, ALICE)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert stack.metric(REQUESTS, api_key="alice", outcome="max_concurrent_requests") == 1
        stack.prefill.behave, stack.decode.behave = behave
        assert (await post(stack, BOB)).status_code == 200
        running[0].cancel()
        await until(lambda: stack.server.router.num_in_flight == 1)
        assert (await post(stack, ALICE)).status_code == 200
        assert (await post(stack, ALICE, prompt=["a", "b"])).status_code == 429
        assert (await post(stack, ALICE, prompt=["a", "b", "c"])).status_code == 400
        running[1].cancel()
        await asyncio.wait(running)
        await stack.assert_idle()
        assert (await post(stack, ALICE, prompt=["a", "b"])).status_code == 200


async def test_a_request_that_finds_no_worker_costs_no_tokens(start: Any) -> None:
    async with start(f"alice:{ALICE} tokens_per_minute=500 max_concurrent_requests=1\n") as stack:
        await stack.decode.close()
        await until(lambda: not stack.server.router.is_ready)
        answers = [await post(stack, ALICE) for _ in range(20)]
        assert {answer.status_code for answer in answers} == {503}
        assert answers[-1].headers["x-ratelimit-remaining-tokens"] == "500"


async def test_a_key_may_not_ask_for_a_better_priority_than_its_own(start: Any) -> None:
    async with start(f"* best_priority=0\nalice:{ALICE}\nbob:{BOB} best_priority=-5\n") as stack:
        assert (await post(stack, BOB, priority=-5)).status_code == 200
        assert (await post(stack, ALICE, priority=3)).status_code == 200
        answer = await post(stack, ALICE, priority=-1)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "priority"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(stack, ALICE, priority=-1)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_without_a_priority_has_the_best_of_its_key(start: Any) -> None:
    async with start(f"alice:{ALICE} best_priority=5\n") as stack:
        for fields in ({}, {"priority": 0}, {"priority": 7}, {"prompt": ["a", "b"]}):
            assert (await post(stack, ALICE, **fields)).status_code == 200
        await generate(stack, ALICE)
        for priority in (-1, 4):
            assert (await post(stack, ALICE, priority=priority)).status_code == 400
        assert [each.priority for each in stack.decode.requests] == [5, 5, 7, 5, 5, 5]


async def test_limits_follow_the_file(
    start: Any, keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(f"alice:{ALICE} requests_per_minute=1\n") as stack:
        assert (await post(stack, ALICE)).status_code == 200
        assert (await post(stack, ALICE)).status_code == 429
        replace_file(keys_file, f"alice:{ALICE} requests_per_minute=3\n")
        answer = await post(stack, ALICE)
        assert answer.status_code == 200
        # What was used stays used.
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        # A bad line, and all of the file stays as it was; the log says which.
        replace_file(keys_file, f"alice:{ALICE} requests_per_minute=9\nbob:{BOB} requests=1\n")
        answer = await post(stack, ALICE)
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert "line 2 must have behind its key only requests_per_minute" in caplog.text
        assert "what was read before stays in use" in caplog.text
        assert (await post(stack, BOB)).status_code == 401
        replace_file(keys_file, f"alice:{ALICE}\n")
        answer = await post(stack, ALICE)
        assert answer.status_code == 200
        assert "x-ratelimit-limit-requests" not in answer.headers


async def test_keys_without_a_name_have_limits_each_and_one_name_in_metrics(start: Any) -> None:
    text = f"* requests_per_minute=1\n{NAMELESS}\nanother-{NAMELESS}\n"
    async with start(text) as stack:
        for key in (NAMELESS, f"another-{NAMELESS}"):
            assert (await post(stack, key)).status_code == 200
            assert (await post(stack, key)).status_code == 429
        assert stack.metric(REQUESTS, api_key="unnamed", outcome="accepted") == 2


class OneByOne:
    """Prefill that computes a prompt each time it is told to, and notes whose it was; decode goes
    on behind it.
    """

    def __init__(self, stack: Stack) -> None:
        self.order: list[int] = []
        self._steps = asyncio.Semaphore(0)
        self._computed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        stack.prefill.behave = self._prefill
        stack.decode.behave = self._decode

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self._steps.release()

    async def _prefill(self, running: Running) -> None:
        if not is_probe(running.request.request_id):
            self.order.append(running.request.priority)
            await self._steps.acquire()
        await prefill(running)
        self._computed[running.request.request_id].set()

    async def _decode(self, running: Running) -> None:
        if not is_probe(running.request.request_id):
            await self._computed[running.request.request_id].wait()
        await decode(running)


# So few tokens of a step that one request is under way at a time.
ONE_AT_A_TIME = {"fair_queue_steps": 1 / 8192}


@pytest.mark.parametrize(("share", "served"), [(1, [1, 1, 2, 1, 2, 1, 2]), (3, [1, 1, 2, 2, 2])])
async def test_who_asks_for_little_is_not_behind_anothers_many(
    start: Any, share: int, served: list[int]
) -> None:
    async with start(f"alice:{ALICE}\nbob:{BOB} share={share}\n", **ONE_AT_A_TIME) as stack:
        worker = OneByOne(stack)
        router = stack.server.router
        asking = [asyncio.create_task(post(stack, ALICE, priority=1)) for _ in range(20)]
        await until(lambda: router.num_queued == 20)
        asking += [asyncio.create_task(post(stack, BOB, priority=2)) for _ in range(3)]
        await until(lambda: router.num_queued == 23)
        worker.step(23)
        answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}
        assert worker.order[: len(served)] == served
        assert sorted(worker.order) == [1] * 20 + [2] * 3


async def test_the_prompts_of_a_call_have_a_turn_each(start: Any) -> None:
    async with start(f"alice:{ALICE}\nbob:{BOB}\n", **ONE_AT_A_TIME) as stack:
        worker = OneByOne(stack)
        many = asyncio.create_task(post(stack, ALICE, prompt=["hello"] * 5, priority=1))
        await until(lambda: worker.order == [1])
        await until(lambda: stack.metric("pdserve_fair_queue_tokens") > 0)
        one = asyncio.create_task(post(stack, BOB, priority=2))
        await until(lambda: stack.server.router.num_queued == 3)
        worker.step(6)
        answers = await asyncio.gather(many, one)
        assert [len(each.json()["choices"]) for each in answers] == [5, 1]
        assert worker.order == [1, 1, 2, 1, 1, 1]


async def test_a_call_that_ends_between_the_turns_of_its_prompts_gives_all_back(start: Any) -> None:
    text = f"alice:{ALICE} max_concurrent_requests=3 tokens_per_minute=1000\n"
    async with start(text, **ONE_AT_A_TIME) as stack:
        worker = OneByOne(stack)
        call = asyncio.create_task(post(stack, ALICE, prompt=["hello"] * 3))
        await until(lambda: len(worker.order) == 1)
        await until(lambda: stack.metric("pdserve_fair_queue_tokens") > 0)
        # The second finds no worker.
        await stack.decode.close()
        await until(lambda: not stack.server.router.is_ready)
        worker.step(3)
        assert (await call).status_code == 503
        assert stack.metric("pdserve_fair_queue_tokens") == 0
        account = stack.server.router._quotas._accounts["alice"]
        assert (account.num_running, account.num_waiting) == (0, 0)


async def test_who_waits_for_its_turn_may_leave_or_be_late(start: Any) -> None:
    async with start(f"alice:{ALICE}\n", **ONE_AT_A_TIME) as stack:
        worker = OneByOne(stack)
        router = stack.server.router
        first = asyncio.create_task(post(stack, ALICE, priority=1))
        await until(lambda: worker.order == [1])
        leaving = [asyncio.create_task(post(stack, ALICE, priority=2))]
        leaving.append(asyncio.create_task(generate(stack, ALICE, priority=3)))
        last = asyncio.create_task(post(stack, ALICE, priority=5))
        await until(lambda: router.num_queued == 4)
        late = stack.stub.Generate(
            pb2.GenerateRequest(text="hello", priority=4),
            timeout=0.5,
            metadata=(("authorization", f"Bearer {ALICE}"),),
        )
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await late.read()
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        await until(lambda: router.num_queued == 2)
        worker.step(2)
        answers = await asyncio.gather(first, last)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert worker.order == [1, 5]


async def test_the_body_of_a_request_that_waits_for_its_turn_is_not_held(start: Any) -> None:
    async with start(f"alice:{ALICE}\n", **ONE_AT_A_TIME) as stack:
        worker = OneByOne(stack)
        first = asyncio.create_task(post(stack, ALICE, priority=1))
        await until(lambda: worker.order == [1])
        large = asyncio.create_task(post(stack, ALICE, user="x" * 2 * INLINE_BYTES))
        await until(lambda: stack.metric("pdserve_large_requests_total", outcome="done") == 1)
        await until(lambda: stack.metric("pdserve_fair_queue_tokens") > 0)
        assert stack.metric("pdserve_large_request_bytes") == 0
        worker.step(2)
        answers = await asyncio.gather(first, large)
        assert [answer.status_code for answer in answers] == [200, 200]


async def test_one_key_does_not_take_all_slots_to_wait(start: Any) -> None:
    text = f"alice:{ALICE}\nbob:{BOB}\n"
    async with start(text, max_num_queued_requests=8, **ONE_AT_A_TIME) as stack:
        worker = OneByOne(stack)
        asking = [asyncio.create_task(post(stack, ALICE, priority=1)) for _ in range(20)]
        await until(lambda: sum(task.done() for task in asking) == 14)
        asking.append(asyncio.create_task(post(stack, BOB, priority=2)))
        await until(lambda: stack.server.router.num_queued == 7)
        worker.step(7)
        answers = await asyncio.gather(*asking)
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) == 14
        assert {answer.json()["error"]["code"] for answer in refused} == {"overloaded"}
        assert answers[-1].status_code == 200


async def test_replicas_give_a_part_each(start: Any) -> None:
    async with start(f"alice:{ALICE} requests_per_minute=8\n", quota_replicas=4) as stack:
        answer = await post(stack, ALICE)
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert (await post(stack, ALICE)).status_code == 200
        answer = await post(stack, ALICE)
        assert answer.status_code == 429
        assert "requests_per_minute of this API key is 2 at this router" in answer.text


def test_lines_of_one_name_have_the_same_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"* requests_per_minute=5 best_priority=-1\n"
        f"alice:{ALICE}\n  alice : {ALICE_TOO}   tokens_per_minute=7 requests_per_minute=6\n"
        f"*team:{BOB}\n{NAMELESS} max_concurrent_requests=2\n"
    )
    alice = {"requests_per_minute": 6, "tokens_per_minute": 7, "best_priority": -1}
    everybody = {"requests_per_minute": 5, "best_priority": -1}
    assert read_api_keys(str(path)) == {
        ALICE: ("alice", alice),
        ALICE_TOO: ("alice", alice),
        BOB: ("*team", everybody),
        NAMELESS: ("", {**everybody, "max_concurrent_requests": 2}),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requests_per_minute=0", "line 1: requests_per_minute must be a whole number from 1 to"),
        ("requests_per_minute=1.5", "line 1: requests_per_minute must be a whole number"),
        ("tokens_per_minute=", "line 1: tokens_per_minute must be a whole number"),
        ("tokens_per_minute=1" + 30 * "0", "line 1: tokens_per_minute must be a whole number"),
        ("best_priority=-3000000000", "line 1: best_priority must be a whole number from -2147"),
        ("requests_per_minute", "line 1: requests_per_minute must be a whole number"),
        ("requests_per_hour=5", "line 1 must have behind its key only requests_per_minute, "),
        ("requests_per_minute=5 requests_per_minute=5", "line 1 has requests_per_minute twice"),
        (f"requests_per_minute=5\na:{BOB} tokens_per_minute=5", "line 2 has other limits than a"),
    ],
)
def test_a_file_with_bad_limits_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a:{ALICE} {text}\n")
    with pytest.raises(ValueError, match=message) as error:
        read_api_keys(str(path))
    assert "key-0123456789" not in str(error.value)
    path.write_text("* requests_per_minute=5\n")
    with pytest.raises(ValueError, match="has no keys, must have at least 1"):
        read_api_keys(str(path))


EMBEDDERS = {"prefill": 1, "decode": 0, "info": EMBEDDER}


async def embed(stack: Stack, key: str, inputs: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=30) as http:
        return await http.post("/v1/embeddings", json={"input": inputs})


async def test_who_leaves_while_its_inputs_wait_for_their_turn_ends_all_of_them(start: Any) -> None:
    text = f"alice:{ALICE} max_concurrent_requests=1\nbob:{BOB}\n"
    async with start(text, **EMBEDDERS, **ONE_AT_A_TIME) as stack:
        (worker,) = stack.workers
        steps = asyncio.Semaphore(0)

        async def step_by_step(running: Running) -> None:
            await steps.acquire()
            await pool(running)

        worker.behave = step_by_step
        leaving = asyncio.create_task(embed(stack, ALICE, [[5]] * 20))
        await until(lambda: len(worker.requests) == 1)
        other = asyncio.create_task(embed(stack, BOB, [[6]]))
        await until(lambda: stack.server.router.num_queued == 2)
        steps.release()
        # Now bob's is on the worker, and none of alice's.
        await until(lambda: len(worker.requests) == 2 and stack.server.router.num_in_flight == 1)
        leaving.cancel()
        await asyncio.wait([leaving])
        await until(lambda: stack.server.router._num_answering == 1)
        steps.release()
        assert (await other).status_code == 200
        assert [each.prompt_token_ids for each in worker.requests] == [(5,), (6,)]


async def test_a_call_for_vectors_begins_with_what_its_key_may_have_waiting(start: Any) -> None:
    async with start(f"alice:{ALICE}\n", max_num_queued_requests=7, **EMBEDDERS) as stack:
        (worker,) = stack.workers
        worker.behave = hang
        waiting = [asyncio.create_task(embed(stack, ALICE, [[5]] * 4))]
        await until(lambda: len(worker.requests) == 4)
        # With its first input two slots are left, and 6 may be the key's.
        waiting.append(asyncio.create_task(embed(stack, ALICE, [[5]] * 4)))
        await until(lambda: stack.server.router.num_in_flight == 6)
        worker.behave = pool
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await stack.assert_idle()
        answer = await embed(stack, ALICE, [[5]] * 40)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 40


async def test_the_inputs_of_a_call_for_vectors_are_one_request(start: Any) -> None:
    # More inputs than may run at a time, with more tokens than are left after the first ones.
    limits = "requests_per_minute=2 max_concurrent_requests=2 tokens_per_minute=9"
    async with start(f"alice:{ALICE} {limits}\n", **EMBEDDERS) as stack:
        (worker,) = stack.workers
        most = 0

        async def note(running: Running) -> None:
            nonlocal most
            most = max(most, stack.server.router.num_in_flight)
            await pool(running)

        worker.behave = note
        headers = {"authorization": f"Bearer {ALICE}"}
        body = {"input": [[5, 6, 7]] * 5}
        async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=30) as http:
            answer = await http.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["data"]) == 5
            assert most == 2
            assert answer.headers["x-ratelimit-remaining-requests"] == "1"
            # It has cost 15 tokens, 6 more than there were.
            refused = await http.post("/v1/embeddings", json=body)
            assert refused.status_code == 429
            assert refused.json()["error"]["message"].startswith("tokens_per_minute")
            assert 41 <= int(refused.headers["retry-after"]) <= 47
        assert stack.metric(TOKENS, api_key="alice", kind="prompt") == 15
        assert stack.metric(REQUESTS, api_key="alice", outcome="accepted") == 5
