"""A worker whose adapters come and go: what its routers hear of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.config import EngineConfig
from support.adapters import write_adapter
from support.refusals import refused
from support.worker import TIMEOUT_S, Worker, add, ends, read_until, serve, until_idle


def add_lora(name: str, path: str = "") -> control_pb2.AddLoraRequest:
    lora = core_pb2.LoraRequest(lora_name=name, lora_path=path)
    return control_pb2.AddLoraRequest(lora_request=lora)


def held(message: Any) -> list[tuple[str, str]]:
    return [(each.name, each.digest) for each in message.heartbeat.adapters.adapters]


async def test_routers_hear_at_once_and_once(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model("Qwen3ForCausalLM")
    for seed, name in enumerate("ab"):
        write_adapter(model, tmp_path / name, seed=seed, r=4)
    config = EngineConfig(
        model=str(model),
        num_threads=1,
        kv_connector="none",
        kv_cache_memory_mib=8,
        lora_root=str(tmp_path),
    )
    engine = await InprocEngineClient.load(
        config, role="decode", engine_id="d", metrics=KVTransferMetrics(CollectorRegistry())
    )
    async with serve(engine) as worker:
        await _hears(worker)
        await until_idle(worker)
    await engine.close()


async def _hears(worker: Worker) -> None:
    async with worker.attach("one") as one:
        response = await worker.control.AddLora(add_lora("x", "a"), timeout=TIMEOUT_S)
        first = response.adapter
        *_, told = await read_until(one, lambda m: m.heartbeat.HasField("adapters"))
        assert held(told) == [("x", first.digest)]
        version = told.heartbeat.adapters.version
        # Other heartbeats are as short as ever.
        *_, beat = await read_until(one, lambda m: m.HasField("heartbeat"))
        assert not beat.heartbeat.HasField("adapters")
        second = (await worker.control.AddLora(add_lora("x", "b"), timeout=TIMEOUT_S)).adapter
        *_, told = await read_until(one, lambda m: m.heartbeat.HasField("adapters"))
        assert held(told) == [("x", second.digest), ("", first.digest)]
        assert told.heartbeat.adapters.version == version + 1
        info = (await worker.core.GetInfo(service_pb2.GetInfoRequest(), timeout=TIMEOUT_S)).info
        assert [each.digest for each in info.adapters] == [second.digest, first.digest]
        assert info.adapters_version == version + 1
        async with worker.attach("late") as late:
            message = add("r", 3)
            message.add_request.lora_request.digest = second.digest
            await late.write(message)
            *_, end = await read_until(late, ends)
            assert end.outputs.outputs[-1].finish_reason == core_pb2.FINISH_REASON_LENGTH
            for digest in ("f" * 64, second.digest[:16], ""):
                message = add("r" + digest, 3)
                message.add_request.lora_request.digest = digest
                await late.write(message)
                *_, end = await read_until(late, ends)
                error = end.outputs.outputs[-1].error
                assert error.code == core_pb2.ERROR_CODE_FAILED_PRECONDITION
                assert error.retryable
        loras = (await worker.control.ListLoras(control_pb2.ListLorasRequest())).loras
        assert [each.adapter.digest for each in loras] == [second.digest, first.digest]
        removal = control_pb2.RemoveLoraRequest(lora_name="x")
        await worker.control.RemoveLora(removal, timeout=TIMEOUT_S)
        *_, told = await read_until(one, lambda m: m.heartbeat.HasField("adapters"))
        assert held(told) == []
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            await worker.control.AddLora(add_lora("x", "../a"), timeout=TIMEOUT_S)
