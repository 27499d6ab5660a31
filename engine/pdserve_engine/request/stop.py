"""When a request is over by its tokens."""

from pdserve_common.tokens.token_end import token_end
from pdserve_common.types.engine import FinishReason
from pdserve_engine.request.request import Request, RequestStatus

_STATUSES = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.REPETITION: RequestStatus.FINISHED_REPETITION,
}


def check_stop(request: Request) -> RequestStatus | None:
    """Return the final status if the last token ends the request. The router does stop strings."""
    params = request.sampling_params
    may_end = (
        request.num_output_tokens >= request.output_limit
        or request.all_token_ids[-1] in request.end_token_ids
        or params.repetition_detection is not None
    )
    if not may_end:  # as almost always
        return None
    end = token_end(
        params,
        request.all_token_ids,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_tokens,
        eos_token_id=request.core_request.eos_token_id,
    )
    if end is None:
        return None
    request.stop_reason = end.stop_reason
    return _STATUSES[end.finish_reason]
