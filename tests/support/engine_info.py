"""What a small engine tells of itself."""

import dataclasses
from typing import Any

from pdserve_common.types.engine import EngineInfo, WorkerRole

_INFO = EngineInfo(
    engine_id="e",
    epoch="f",
    role=WorkerRole.DECODE,
    model="m",
    max_model_len=8,
    vocab_size=100,
    eos_token_ids=(0,),
    block_size=4,
    num_blocks=5,
    max_num_seqs=6,
    max_num_batched_tokens=7,
    dtype="float32",
    kv_compatibility_hash="h",
    kv_transport="shm",
    determinism="exact",
    numerics_id="n",
    version="v",
)


def make_info(**fields: Any) -> EngineInfo:
    """Return it with other fields than it has."""
    return dataclasses.replace(_INFO, **fields)
