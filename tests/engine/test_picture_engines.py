"""Pictures on whole engines: in a process of their own, from P to D, and over a sleep."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.errors import OverloadedError
from pdserve_common.processes.channel import Channel
from pdserve_common.types.engine import EngineCoreOutput, ErrorCode, Generate, KVTransferParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.types.verbs import ResetPrefixCache, Sleep, WakeUp
from pdserve_engine.clients import messages
from pdserve_engine.clients.launch import WorkerEngine
from pdserve_engine.config import Role
from pdserve_engine.request.sched_output import SchedulerOutput
from support import engines
from support.engines import Client, linked, tokens_of
from support.models import LLAVA
from support.pictures import Picture, Prompt, hf_greedy
from support.steps import loaded_part
from support.waiting import until

NUM_OUTPUT = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
A, B, C = map(Picture, range(3))
PROMPTS = {
    "one": Prompt([5, 6, 7], A, [8, 9]),
    "several": Prompt([7, 8], A, [9, 10, 11], B, C, [13, 14]),
    "at the end": Prompt([5, 6], B),
}
ON_P = KVTransferParams(do_remote_decode=True, remote_engine_id="d0")
ON_D = KVTransferParams(do_remote_prefill=True, remote_engine_id="p0", remote_host="127.0.0.1")


def launched(model: Path, role: Role, **fields: Any) -> AbstractAsyncContextManager[WorkerEngine]:
    settings = {"block_size": 4, "num_blocks": 200, "max_model_len": 96, "kv_connector": "nixl"}
    return engines.launched(model, role, **{**settings, "engine_process": "inproc", **fields})


@pytest.fixture(scope="module")
def model(make_served_model: Callable[..., Path]) -> Path:
    return make_served_model(LLAVA)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    return {name: hf_greedy(model, prompt, NUM_OUTPUT) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("process", ["inproc", "subprocess"])
async def test_pictures_outlive_a_sleep_and_a_reset(
    model: Path, expected: dict[str, list[int]], process: str
) -> None:
    async with launched(
        model, "decode", engine_process=process, kv_connector="none", max_num_batched_tokens=48
    ) as engine:
        assert engine.info.modalities == ("image",)
        client = Client(engine)
        for attempt, verbs in enumerate(([], [ResetPrefixCache()], [Sleep(level=2), WakeUp()])):
            for verb in verbs:
                await engine.call(verb)
            for name, prompt in PROMPTS.items():
                request = prompt.request(f"{name} {attempt}", task=Generate(GREEDY))
                client.send(request, prompt.tensors)
            for name, tokens in expected.items():
                assert tokens_of(await client.answer(f"{name} {attempt}")) == tokens


async def test_a_picture_crosses_once_while_any_request_needs_it(
    model: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """n forks, or the beams of a search, would send it again each."""
    sent: list[messages.Message] = []
    send = Channel.send

    def record(channel: Channel, message: messages.Message, ref: int = 0) -> None:
        if isinstance(message, messages.AddRequest | messages.ForgetTensors):
            sent.append(message)
        send(channel, message, ref)

    monkeypatch.setattr(Channel, "send", record)
    prompt = PROMPTS["several"]
    async with launched(
        model, "decode", engine_process="subprocess", kv_connector="none"
    ) as engine:
        client = Client(engine)
        for wave in range(2):
            for fork in range(4):
                request = prompt.request(f"{wave} {fork}", task=Generate(GREEDY))
                client.send(request, prompt.tensors)
            for fork in range(4):
                assert tokens_of(await client.answer(f"{wave} {fork}")) == expected["several"]
        monkeypatch.setattr("pdserve_engine.clients.subprocess.MAX_UNSENT_BYTES", 2)
        with pytest.raises(OverloadedError):
            client.send(prompt.request("too much", task=Generate(GREEDY)), prompt.tensors)
    carried = [set(each.tensors) for each in sent if isinstance(each, messages.AddRequest)]
    assert carried == [set(prompt.tensors), *[set()] * 3] * 2
    forgotten = [each for each in sent if isinstance(each, messages.ForgetTensors)]
    assert [set(each.content_hashes) for each in forgotten] == [set(prompt.tensors)] * 2


async def hand_over(
    name: str, p: Client, d: Client, port: int, *, tensors_on_d: bool
) -> list[EngineCoreOutput]:
    """Return what D brings of a prompt."""
    prompt = PROMPTS[name]
    request = prompt.request(name, task=Generate(GREEDY))
    on_d = dataclasses.replace(ON_D, remote_port=port)
    d.send(
        dataclasses.replace(request, kv_transfer_params=on_d),
        prompt.tensors if tensors_on_d else {},
    )
    p.send(dataclasses.replace(request, kv_transfer_params=ON_P), prompt.tensors)
    return await d.answer(name)


async def test_d_decodes_what_p_has_seen(model: Path, expected: dict[str, list[int]]) -> None:
    async with (
        launched(model, "prefill", max_num_batched_tokens=7) as p,
        launched(model, "decode") as d,
        linked(p, d) as port,
    ):
        for name in PROMPTS:
            outputs = await hand_over(name, Client(p), Client(d), port, tensors_on_d=False)
            assert tokens_of(outputs) == expected[name]
        await until(lambda: not p.stats().num_open_kv_sessions)


@pytest.mark.parametrize("tensors_on_d", [True, False])
async def test_a_d_that_preempts_computes_the_pictures_itself_if_it_has_them(
    model: Path, expected: dict[str, list[int]], tensors_on_d: bool
) -> None:
    async with (
        launched(model, "prefill") as p,
        launched(model, "decode", enable_prefix_caching=False, max_num_batched_tokens=9) as d,
        linked(p, d) as port,
    ):
        preempt_each_once(d)
        for name in PROMPTS:
            outputs = await hand_over(name, Client(p), Client(d), port, tensors_on_d=tensors_on_d)
            if tensors_on_d:
                assert tokens_of(outputs) == expected[name]
                continue
            error = outputs[-1].error
            assert error is not None
            assert error.code is ErrorCode.FAILED_PRECONDITION
            assert error.is_retryable
            assert "pixels are not on this worker" in error.message
        assert d.stats().num_preemptions == len(PROMPTS)


def preempt_each_once(engine: WorkerEngine) -> None:
    """Have each request lose its blocks when it has three tokens."""
    scheduler: Any = loaded_part(engine).core.scheduler
    schedule, preempted = scheduler.schedule, set()

    def preempt_and_schedule() -> SchedulerOutput:
        for request in list(scheduler.running):
            is_due = request.num_output_tokens >= 3 and not request.handoff.needs_remote_kv
            if is_due and request.request_id not in preempted:
                preempted.add(request.request_id)
                scheduler.containers.preempt(request)
        step: SchedulerOutput = schedule()
        return step

    scheduler.schedule = preempt_and_schedule
