"""When a request is over: EOS, stop tokens, lengths and loops, in vLLM's order."""

from collections.abc import Sequence

from pdserve_common.engine_types import RepetitionDetectionParams
from pdserve_engine.core.request import Request, RequestStatus


def check_stop(request: Request) -> RequestStatus | None:
    """Return the final status if the last token ends the request. The router does stop strings."""
    params = request.sampling_params
    may_stop = request.num_output_tokens >= params.min_tokens
    if may_stop:
        last = request.all_token_ids[-1]
        if not params.ignore_eos and last == request.request.eos_token_id:
            return RequestStatus.FINISHED_STOPPED
        if last in params.stop_token_ids:
            request.stop_reason = last
            return RequestStatus.FINISHED_STOPPED
    if request.num_output_tokens >= request.max_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    detection = params.repetition_detection
    if may_stop and detection is not None and _ends_in_loop(request.output_token_ids, detection):
        return RequestStatus.FINISHED_REPETITION
    return None


def _ends_in_loop(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Do the last tokens consist of min_count copies of one pattern of an allowed size?"""
    longest = min(params.max_pattern_size, len(token_ids) // params.min_count)
    for size in range(params.min_pattern_size, longest + 1):
        tail = token_ids[-size * params.min_count :]
        if all(a == b for a, b in zip(tail, tail[size:], strict=False)):
            return True
    return False
