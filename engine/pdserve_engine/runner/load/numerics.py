"""What decides the bits of an engine's logits, besides weights and tokens."""

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from pdserve_common.version import VERSION
from pdserve_engine.config import EngineConfig
from pdserve_engine.models.base import Model
from pdserve_kernels import KernelSet, name_of, select

# Extensions of a processor by which matrix multiplications are chosen.
_ISA_PREFIXES = ("sse", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16")

CPUINFO = Path("/proc/cpuinfo")
_MODEL_FIELDS = ("model name", "cpu family", "model", "stepping", "cache size")


def numerics_id(
    config: EngineConfig, model: Model, device: torch.device, *, cpuinfo: Path = CPUINFO
) -> str:
    """Return 16 hexadecimal digits that are equal for two workers only if an exact model computes
    the same bits on both.

    Digested are: our version, which fixes the kernels and their tiles; torch's, which fixes the
    libraries under it, and on CUDA Triton's, which compiles the kernels; the processor's or GPU's
    model and instruction set, by which those choose their code; our kernel set and the instruction
    set it is compiled for; dtype, quantization at load time, the KV's dtype, block size, whose code
    the model is (by its config), compute threads where bits depend on them, and transformers'
    version if its code sees pictures. The number of ranks is not: where bits depend on it no model
    is exact. It errs on the safe side: workers whose ids differ may still agree. Weights are left
    to the compatibility hash.
    """
    kernels = select(device)
    parts = (
        VERSION,
        torch.__version__,
        *_machine(device, cpuinfo),
        name_of(kernels),
        type(model.config).__name__,
        model.config.dtype_name,
        config.quantization,
        config.kv_cache_dtype,
        config.block_size,
        *_threads(kernels, config, model),
        *(() if model.config.vision is None else (version("transformers"),)),
    )
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def _threads(kernels: KernelSet, config: EngineConfig, model: Model) -> tuple[int, ...]:
    """How many there are, unless the model is all ours and none of its kernels cares."""
    shape = model.config
    is_ours = model.config.vision is None
    if (
        is_ours
        and model.is_row_independent
        and kernels.is_thread_independent(shape.kv_dtype, config.block_size, shape.head_dim)
    ):
        return ()
    return (torch.get_num_threads(),)


def _machine(device: torch.device, cpuinfo: Path) -> tuple[object, ...]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
        return device.type, torch.version.cuda, version("triton"), name, capability
    isa = torch.backends.cpu.get_cpu_capability()
    # It chooses MKL's code as well (see `pdserve_kernels`).
    return device.type, platform.machine(), isa, os.environ.get("MKL_CBWR"), *_processor(cpuinfo)


def _processor(cpuinfo: Path) -> tuple[str, ...]:
    """Model and extensions, as Linux tells them; nothing elsewhere."""
    try:
        with cpuinfo.open() as file:
            fields = dict(_field(line) for line in file if ":" in line)
    except OSError:
        return ()
    flags = (fields.get("flags") or fields.get("Features", "")).split()
    isa = sorted(flag for flag in flags if flag.startswith(_ISA_PREFIXES))
    return *(fields.get(name, "") for name in _MODEL_FIELDS), " ".join(isa)


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()
