"""NIXL between two processes on one GPU, with and without CUDA IPC; then a prefill and a decode
service against a decode service alone.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu.bench import Bench
from gpu.engines import write_model
from gpu.reads import record_reads

TESTS = Path(__file__).parents[2] / "tests"
# What follows the first three if there is a prefill service; milliseconds, as in bench_handoff.py.
COLUMNS = ("TTFT", "prefill", "plain step")
HANDOFF_COLUMNS = ("raw transfer", "exposed", "admit", "first step", "handoff")
# Of each length.
NUM_REQUESTS = 4


def run(bench: Bench) -> None:
    """See the module."""
    for tls in ("", "^cuda_ipc") if bench.is_cuda else ("",):
        bench.attempt(record_reads, tls)
    for num_prefill in (1, 0):
        bench.attempt(_serve, num_prefill)


def _serve(bench: Bench, num_prefill: int) -> None:
    """One request at a time: time to the first token and between tokens."""
    # Here, so that READs are measured where no services are installed.
    from pdserve_client.client import Client
    from pdserve_client.config import StackConfig
    from pdserve_client.stack import Stack

    with tempfile.TemporaryDirectory() as folder:
        _write_served_model(bench, Path(folder))
        config = StackConfig(
            model=folder,
            prefill=num_prefill,
            device=bench.device.type,
            max_model_len=max(bench.sizes.handoff_lengths) + 256,
            kv_cache_memory_mib=4096 if bench.is_cuda else 64,
            require_disaggregation=num_prefill > 0,
            log_dir=f"{folder}/logs",
            **dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0),
        )
        try:
            with Stack(config) as stack, Client(stack.grpc_address) as client:
                for _ in stack.wait_until_ready():
                    pass
                _time_requests(bench, client, num_prefill)
        except Exception:  # whatever it was, the services' logs say more
            for log in Path(folder).glob("logs/*"):
                print(f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}", flush=True)
            raise


def _write_served_model(bench: Bench, folder: Path) -> None:
    """Write the small model; services read its weights as zeros, with which steps take as long."""
    sys.path.append(str(TESTS))
    from support.models import save_byte_tokenizer

    write_model(folder, bench.small)
    save_byte_tokenizer(folder)


def _time_requests(bench: Bench, client: Any, num_prefill: int) -> None:
    import bench_handoff as requests

    lengths = bench.sizes.handoff_lengths
    args = argparse.Namespace(tokens=32, timeout_s=60.0, lengths=lengths)
    names = COLUMNS + HANDOFF_COLUMNS if num_prefill else COLUMNS
    what = "1P1D" if num_prefill else "alone"
    requests.warm_up(client, args)
    for length in lengths:
        requests.measure(client, args, num_prompt_tokens=length)  # its shapes are compiled
        rows = [
            requests.measure(client, args, num_prompt_tokens=length) for _ in range(NUM_REQUESTS)
        ]
        values: dict[str, Any] = {
            f"{name} ms": statistics.median(row.values[name] for row in rows) for name in names
        }
        if num_prefill:
            values["moved"] = rows[0].moved
        bench.record(f"{what}, {bench.small.name}, {length} tokens", **values)
