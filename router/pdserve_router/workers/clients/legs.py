"""The two legs of a request that is handed off: what each worker gets, and when one has failed."""

import dataclasses

from pdserve_common.errors import EngineDeadError
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    FinishReason,
    KVPrefixSource,
)
from pdserve_router.workers.worker import Worker


def make_legs(
    request: EngineCoreRequest,
    *,
    prefill: Worker,
    decode: Worker,
    prefix_source: KVPrefixSource | None = None,
) -> tuple[EngineCoreRequest, EngineCoreRequest]:
    """Return what prefill gets and what decode gets; each says where the other is, and prefill's
    where the start of the prompt is cached.
    """
    to_decode = dataclasses.replace(
        decode.kv_transfer_params, do_remote_decode=True, prefix_source=prefix_source
    )
    to_prefill = dataclasses.replace(prefill.kv_transfer_params, do_remote_prefill=True)
    return (
        # Prefill guesses no tokens, and may be of any rank.
        dataclasses.replace(
            request,
            kv_transfer_params=to_decode,
            prediction_token_ids=(),
            data_parallel_rank=None,
        ),
        dataclasses.replace(request, kv_transfer_params=to_prefill),
    )


def failure_of(output: EngineCoreOutput, worker: Worker) -> EngineError:
    """Return why a leg ended badly (`has_failed`). An abort that nobody here has asked for is the
    worker's failure.
    """
    error = output.error
    if error is not None and error.code is not ErrorCode.CANCELLED:
        return error
    why = output.finish_reason if error is None else error.message
    message = f"worker {worker.address} ended the request: {why!s}"
    return EngineDeadError(message).to_engine_error()


def has_failed(output: EngineCoreOutput) -> bool:
    """True for a leg's bad end. An abort that nobody here has asked for is the worker's failure."""
    return output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
