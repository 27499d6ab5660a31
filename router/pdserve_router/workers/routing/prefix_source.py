"""Where the prefill worker of a request finds the start of its prompt: a decode worker that has it
cached, as after an earlier turn of a chat.
"""

from collections.abc import Mapping

from pdserve_common.types.engine import EngineInfo, KVPrefixSource, WorkerRole
from pdserve_router.workers.worker import Worker


def find_prefix_source(decode: Worker, cached: Mapping[Worker, int]) -> KVPrefixSource | None:
    """Return which of those that `may_lend` has most of the prompt's tokens `cached`, among equals
    `decode`; None if there is none.
    """
    if not cached:
        return None
    best = max(cached, key=lambda worker: (cached[worker], worker is decode))
    at = best.kv_transfer_params
    return KVPrefixSource(
        engine_id=at.remote_engine_id,
        host=at.remote_host,
        port=at.remote_port,
        num_tokens=cached[best],
    )


def may_lend(lender: Worker, borrower: Worker) -> bool:
    """Can the prefill worker `borrower` use blocks of the decode worker `lender`?"""
    theirs, ours = lender.info, borrower.info
    if theirs is None or ours is None or not (theirs.has_prefix_pulls and ours.has_prefix_pulls):
        return False
    is_lender = lender.is_ready and theirs.role is WorkerRole.DECODE
    return is_lender and _meaning(theirs) == _meaning(ours)


def _meaning(info: EngineInfo) -> tuple[str, str]:
    """Of a worker's blocks. Those of an exact one have bits that only its equals compute."""
    is_exact = info.determinism == "exact"
    return info.kv_compatibility_hash, info.numerics_id if is_exact else ""
