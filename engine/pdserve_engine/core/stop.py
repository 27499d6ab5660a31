"""When a request is over: EOS, stop tokens, lengths and loops, in vLLM's order."""

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
    if may_stop and detection is not None and _ends_in_loop(request, detection):
        return RequestStatus.FINISHED_REPETITION
    return None


def _ends_in_loop(request: Request, params: RepetitionDetectionParams) -> bool:
    """Do the last tokens consist of min_count copies of one pattern of an allowed size?

    How many of the last tokens equal the one `size` before them is, over all sizes, the Z-array of
    the answer read backwards (Gusfield, Algorithms on Strings, Trees, and Sequences, 1997, section
    1.4). No token is compared twice for what a shorter size has shown: answers that nearly repeat
    themselves would cost their length times the number of sizes.
    """
    token_ids = request.all_token_ids
    longest = min(params.max_pattern_size, request.num_output_tokens // params.min_count)
    num_tokens = longest * params.min_count  # from the end; what is before them does not matter
    num_repeated = [0] * (longest + 1)
    # The size whose repetition reaches furthest back, and where that ends.
    base = end = 0
    for size in range(1, longest + 1):
        num = min(num_repeated[size - base], end - size) if size < end else 0
        while num < num_tokens - size and token_ids[-1 - num] == token_ids[-1 - num - size]:
            num += 1
        num_repeated[size] = num
        if size + num > end:
            base, end = size, size + num
        if size >= params.min_pattern_size and num >= size * (params.min_count - 1):
            return True
    return False
