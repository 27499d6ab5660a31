"""Adapters that come and go in a stack that serves: new content under load, a lost D, no memory."""

import asyncio
import contextlib
import itertools
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_client.client import build_request
from pdserve_common.types.sampling_params import SamplingParams
from support.adapters import merged_greedy, write_adapter
from support.metrics import total
from support.waiting import until

NUM_TOKENS = 60
PROMPT = random.Random(0).choices(range(3, 290), k=75)
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Not over before a test has done something to its worker.
LONG = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
TIMEOUT_S = 120.0
DECODES = ("decode-0", "decode-1")
SCALE_OUT_REQUESTS = 3
# Pools of threads grow and shrink; what an adapter leaves behind comes once for each.
SLACK = 4


class Served(NamedTuple):
    stack: Any
    root: Path
    # By the folder; "" is the model alone.
    expected: dict[str, list[int]]

    def worker(self, name: str) -> str:
        (worker,) = [worker for worker in self.stack.workers if worker.name == name]
        return f"127.0.0.1:{worker.port}"


@pytest.fixture(scope="module")
def served(
    make_served_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    start_stack: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    model = make_served_model("Qwen3ForCausalLM", max_position_embeddings=1024)
    root = tmp_path_factory.mktemp("root")
    expected = {"": hf_greedy(model, PROMPT, NUM_TOKENS)}
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(model, root / name, seed=seed, r=8)
        expected[name] = merged_greedy(model, root / name, PROMPT, NUM_TOKENS)
    assert len(set(map(tuple, expected.values()))) == 4
    with start_stack(
        model=model,
        dtype="float32",
        num_threads=1,
        decode=2,
        max_num_batched_tokens=32,
        lora_root=str(root),
        lora_updates=True,
        lora_scale_out_requests=SCALE_OUT_REQUESTS,
        max_loras=4,
    ) as stack:
        yield Served(stack, root, expected)
        stack.restore()


@contextlib.asynccontextmanager
async def clients(
    served: Served,
) -> AsyncIterator[tuple[httpx.AsyncClient, pb2_grpc.InferenceServiceStub]]:
    url = f"http://127.0.0.1:{served.stack.http_port}"
    async with (
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http,
        grpc.aio.insecure_channel(served.stack.grpc_address) as channel,
    ):
        yield http, pb2_grpc.InferenceServiceStub(channel)


async def load(http: httpx.AsyncClient, name: str, path: str, **fields: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path, **fields}
    return await http.post("/v1/load_lora_adapter", json=body)


async def unload(http: httpx.AsyncClient, name: str) -> httpx.Response:
    return await http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def names(http: httpx.AsyncClient) -> list[str]:
    models = (await http.get("/v1/models")).json()["data"]
    return [each["id"] for each in models if each.get("parent")]


async def listed(http: httpx.AsyncClient, wanted: set[str]) -> None:
    """Return once these adapters are listed, and no others."""
    while set(await names(http)) != wanted:  # noqa: ASYNC110 - the router is another process
        await asyncio.sleep(0.02)


async def generate(
    stub: pb2_grpc.InferenceServiceStub,
    name: str,
    begun: asyncio.Event | None = None,
    params: SamplingParams = PARAMS,
) -> list[int]:
    request = build_request(PROMPT, params)
    request.lora_name = name
    tokens: list[int] = []
    async for response in stub.Generate(request, timeout=TIMEOUT_S):
        for completion in response.output.outputs:
            assert not completion.HasField("error"), completion.error
            tokens.extend(completion.token_ids)
        if begun is not None and tokens:
            begun.set()
    return tokens


async def test_an_adapter_is_loaded_over_http_and_goes_again(served: Served) -> None:
    async with clients(served) as (http, stub):
        answer = await load(http, "a", "one")
        assert answer.status_code == 200, answer.text
        assert "'a' added successfully" in answer.text
        assert await names(http) == ["a"]
        assert (await http.get("/v1/models/a")).json()["id"] == "a"
        assert await generate(stub, "a") == served.expected["one"]
        for fields, status in (
            ({"lora_name": "b", "lora_path": "../one"}, 400),
            ({"lora_name": "b", "lora_path": "nowhere"}, 400),
            ({"lora_name": "", "lora_path": "one"}, 400),
            ({"lora_path": "one"}, 400),
            ({"lora_name": served.stack.config.model.split("/")[-1], "lora_path": "one"}, 400),
            ({"lora_name": "b", "lora_path": "one", "num_workers": -1}, 400),
            ({"lora_name": "b", "lora_path": "one", "num_workers": 3}, 503),
        ):
            answer = await http.post("/v1/load_lora_adapter", json=fields)
            assert answer.status_code == status, (fields, answer.text)
        assert await names(http) == ["a"]
        assert (await unload(http, "b")).status_code == 404
        answer = await unload(http, "a")
        assert answer.status_code == 200, answer.text
        assert await names(http) == []
        with pytest.raises(grpc.aio.AioRpcError, match="'a' is no adapter"):
            await generate(stub, "a")
        assert await generate(stub, "") == served.expected[""]
    for name in served.stack.worker_names():
        served.stack.wait_for(name, "pdserve_loras", 0)


async def test_where_one_worker_refuses_nobody_has_it(served: Served) -> None:
    async with clients(served) as (http, stub):
        folders = ["one", "two", "three"]
        for index, folder in enumerate(folders):
            ctl(served, "decode-1", "lora", "add", f"own {index}", folder)
            ctl(served, "decode-1", "lora", "pin", f"own {index}")
        config = shutil.copytree(served.root / "one", served.root / "more") / "adapter_config.json"
        text = config.read_text()
        config.write_text(text.replace('"lora_alpha": 16', '"lora_alpha": 8'))
        ctl(served, "decode-1", "lora", "add", "own 3", "more")
        ctl(served, "decode-1", "lora", "pin", "own 3")
        assert await names(http) == []
        config.write_text(text.replace('"lora_alpha": 16', '"lora_alpha": 4'))
        answer = await load(http, "a", "more")
        assert answer.status_code == 409, answer.text
        assert "4 adapters are loaded, pinned or in use" in answer.text
        listed = ctl(served, "decode-0", "lora", "list")
        assert listed == ""
        lines = ctl(served, "decode-1", "lora", "list").splitlines()
        assert len(lines) == 4
        assert all(line.endswith("pinned") for line in lines)
        # What is pinned no more makes room.
        ctl(served, "decode-1", "lora", "unpin", "own 0")
        answer = await load(http, "a", "more")
        assert answer.status_code == 200, answer.text
        assert len(ctl(served, "decode-1", "lora", "list").splitlines()) == 4
        assert (await unload(http, "a")).status_code == 200
        # One of each role is enough if that is asked for.
        answer = await load(http, "a", "more", num_workers=1)
        assert answer.status_code == 200, answer.text
        await generate(stub, "a")
        assert (await unload(http, "a")).status_code == 200
        for index in range(1, 4):
            ctl(served, "decode-1", "lora", "remove", f"own {index}")


def ctl(served: Served, name: str, *args: str) -> str:
    command = [sys.executable, "-m", "pdserve_client", "ctl", served.worker(name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_name_gets_new_content_under_load(served: Served) -> None:
    """No request is lost, none has tokens of two, and none that begins later has the old ones."""
    old, new = (served.expected[folder] for folder in ("one", "two"))
    async with clients(served) as (http, stub):
        assert (await load(http, "a", "one")).status_code == 200
        is_over = False
        has_switched = asyncio.Event()
        answers: list[tuple[bool, list[int]]] = []

        async def ask() -> None:
            while not is_over:
                is_late = has_switched.is_set()
                answers.append((is_late, await generate(stub, "a")))

        asking = [asyncio.create_task(ask()) for _ in range(6)]
        await until(lambda: len(answers) >= 6)
        answer = await load(http, "a", "two")
        assert answer.status_code == 200, answer.text
        has_switched.set()
        num_before = len(answers)
        await until(lambda: len(answers) >= num_before + 12)
        is_over = True
        await asyncio.gather(*asking)
        assert all(tokens in (old, new) for _, tokens in answers)
        assert all(tokens == new for is_late, tokens in answers if is_late)
        assert {tuple(tokens) for _, tokens in answers} == {tuple(old), tuple(new)}
        assert (await unload(http, "a")).status_code == 200
    for name in served.stack.worker_names():
        served.stack.wait_for(name, "pdserve_loras", 0)
    served.stack.assert_idle()


async def test_answers_go_on_elsewhere_when_d_dies_and_end_typed_where_nobody_has_it(
    served: Served,
) -> None:
    async with clients(served) as (http, stub):
        assert (await load(http, "both", "one")).status_code == 200
        ctl(served, "decode-0", "lora", "add", "alone", "two")
        ctl(served, "prefill-0", "lora", "add", "alone", "two")
        await asyncio.wait_for(listed(http, {"alone", "both"}), TIMEOUT_S)
        requested = ["both", "", "alone"] * 3
        begun = [asyncio.Event() for _ in requested]
        answers = [
            asyncio.create_task(generate(stub, name, event, LONG if name == "alone" else PARAMS))
            for name, event in zip(requested, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        served.stack.send_signal("decode-0", signal.SIGSTOP)
        await asyncio.to_thread(served.stack.kill_process, "decode-0")
        served.stack.wake_and_start()  # processes end with the thread that has started them
        for name, answer in zip(requested, answers, strict=True):
            if name == "alone":
                with pytest.raises(AssertionError, match=r"FAILED_PRECONDITION(.|\n)*alone"):
                    await answer
            else:
                assert await answer == served.expected["one" if name else ""], name
        await asyncio.to_thread(served.stack.wait_until_whole)
        assert await names(http) == ["both"]
        # The first request with it has the router add it to the new process, too.
        assert await generate(stub, "both") == served.expected["one"]
        await asyncio.to_thread(served.stack.wait_for, "decode-0", "pdserve_loras", 1)
        assert (await unload(http, "both")).status_code == 200
        ctl(served, "prefill-0", "lora", "remove", "alone")


async def test_an_adapter_comes_to_another_pair_when_those_that_hold_it_have_much_to_do(
    served: Served,
) -> None:
    async with clients(served) as (http, stub):
        scaled = 'pdserve_lora_scale_outs_total{outcome="added"}'
        num_before = total(served.stack.metrics("router"), scaled)
        answer = await load(http, "a", "one", num_workers=1)
        assert answer.status_code == 200, answer.text
        holders = [name for name in DECODES if ctl(served, name, "lora", "list")]
        assert len(holders) == 1
        is_over = False

        async def ask() -> None:
            while not is_over:
                assert await generate(stub, "a") == served.expected["one"]

        asking = [asyncio.create_task(ask()) for _ in range(2 * SCALE_OUT_REQUESTS + 2)]
        for name in DECODES:
            await asyncio.to_thread(served.stack.wait_for, name, "pdserve_loras", 1)
        await asyncio.to_thread(served.stack.wait_for, "router", scaled, num_before + 1)
        is_over = True
        await asyncio.gather(*asking)
        # It goes from where the router has put it as well.
        assert (await unload(http, "a")).status_code == 200
    for name in served.stack.worker_names():
        served.stack.wait_for(name, "pdserve_loras", 0)


async def come_and_go(served: Served, num_adapters: int) -> None:
    """Load and unload adapters, each under another name, while others serve."""
    async with clients(served) as (http, stub):
        is_over = False

        async def ask() -> int:
            for count in itertools.count():
                if is_over:
                    return count
                assert await generate(stub, "") == served.expected[""]
            return 0

        asking = asyncio.create_task(ask())
        for number in range(num_adapters):
            folder = ("one", "two", "three")[number % 3]
            answer = await load(http, f"adapter {number}", folder)
            assert answer.status_code == 200, answer.text
            assert await generate(stub, f"adapter {number}") == served.expected[folder]
            assert (await unload(http, f"adapter {number}")).status_code == 200
        is_over = True
        assert await asking > 0
    for name in served.stack.worker_names():
        served.stack.wait_for(name, "pdserve_loras", 0)
    served.stack.assert_idle()


@pytest.mark.parametrize("num_adapters", [12, pytest.param(100, marks=pytest.mark.soak)])
async def test_adapters_come_and_go_and_nothing_is_left(served: Served, num_adapters: int) -> None:
    await come_and_go(served, 6)
    resources = served.stack.resources()
    before = {name: served.stack.rss_mib(name) for name in served.stack.worker_names()}
    await come_and_go(served, num_adapters)
    for name, (fds, threads) in served.stack.resources().items():
        had_fds, had_threads = resources[name]
        assert fds <= had_fds + SLACK, f"{name} has {fds} descriptors, had {had_fds}"
        assert threads <= had_threads + SLACK, f"{name} has {threads} threads, had {had_threads}"
    for name, mib in before.items():
        # One of these adapters takes less than 1 MiB, a model 1 MiB more.
        assert served.stack.rss_mib(name) < mib + 24, name
