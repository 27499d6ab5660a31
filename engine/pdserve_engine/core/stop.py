"""When a request is over: EOS, stop tokens and lengths, in vLLM's order."""

from pdserve_engine.core.request import Request, RequestStatus


def check_stop(request: Request) -> RequestStatus | None:
    """Return the final status if the last token ends the request. The router does stop strings."""
    params = request.sampling_params
    if request.num_output_tokens >= params.min_tokens:
        last = request.all_token_ids[-1]
        if not params.ignore_eos and last == request.request.eos_token_id:
            return RequestStatus.FINISHED_STOPPED
        if last in params.stop_token_ids:
            request.stop_reason = last
            return RequestStatus.FINISHED_STOPPED
    if request.num_output_tokens >= request.max_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None
