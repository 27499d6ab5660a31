"""One of our engines for benchmarks, without a service around it: ... MODEL CORES [TP [PP]]"""

import sys
from collections.abc import Sequence

from peers.offline import Engine, serve
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.processes.cores import confine_process
from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.assemble import load_engine
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.engine_core import EngineCore


class PdserveEngine:
    """As `peers/offline.py` wants it, and for other benchmarks that time cases."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._request_ids: list[str] = []

    def add_request(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._core.add_request(
            EngineCoreRequest(
                request_id=request_id, prompt_token_ids=tuple(prompt), task=Generate(params)
            )
        )
        self._request_ids.append(request_id)

    def step(self) -> set[str]:
        outputs = self._core.step().outputs.values()
        return {output.request_id for client in outputs for output in client}

    def abort_all(self) -> None:
        self._core.abort_requests(self._request_ids)
        self._core.step()  # so that the model runner hears of it
        self._request_ids = []


def load() -> Engine:
    model, cores, *sizes = sys.argv[1:]
    tensor_parallel_size, pipeline_parallel_size = map(int, [*sizes, "1", "1"][:2])
    config = EngineConfig(
        model=model,
        cpu_cores=cores,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        kv_connector="none",
        kv_cache_memory_mib=1024,
        max_model_len=4096,
        enable_prefix_caching=False,
    )
    confine_process(config.cores)
    metrics = KVTransferMetrics(CollectorRegistry())
    return PdserveEngine(
        load_engine(config, role="decode", engine_id="bench", metrics=metrics).core
    )


if __name__ == "__main__":
    serve(load)
