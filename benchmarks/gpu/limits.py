"""How fast the device copies, reads and multiplies; the machine."""

import subprocess

import torch
from gpu.bench import Bench
from machine import describe


def run(bench: Bench) -> None:
    """See the module."""
    bench.record("machine", what=describe("torch"))
    if bench.is_cuda:
        _record_gpu(bench)
    limits = bench.limits
    bench.record("copy, bytes read and written", gb_s=limits.copy / 1e9)
    bench.record("read, sum of fp32", gb_s=limits.read / 1e9)
    bench.record(f"matrix, bf16 {bench.sizes.matrix}^3", tflops=limits.matrix / 1e12)


def _record_gpu(bench: Bench) -> None:
    import triton  # which a machine without a GPU need not have

    properties = torch.cuda.get_device_properties(bench.device)
    bench.record(
        "GPU",
        what=properties.name,
        memory_gib=properties.total_memory / 2**30,
        sms=properties.multi_processor_count,
        l2_mib=properties.L2_cache_size / 2**20,
        cuda=str(torch.version.cuda),
        driver=_driver(),
        triton=triton.__version__,
    )


def _driver() -> str:
    """Return its version, the SMs' highest clock and the power limit."""
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return done.stdout.strip().partition("\n")[0]
