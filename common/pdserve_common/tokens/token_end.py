"""When an answer is over by its tokens: EOS, stop tokens, lengths and loops, in vLLM's order."""

from collections.abc import Sequence
from typing import NamedTuple

from pdserve_common.types.engine import FinishReason
from pdserve_common.types.sampling_params import RepetitionDetectionParams, SamplingParams


class TokenEnd(NamedTuple):
    """How an answer ended, as far as its tokens tell."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


def token_end(
    params: SamplingParams,
    token_ids: Sequence[int],
    *,
    num_output_tokens: int,
    max_tokens: int | None,
    eos_token_id: int | None,
) -> TokenEnd | None:
    """Return how the last of `token_ids` ended the answer, which is the last `num_output_tokens` of
    them; None if it did not. Stop strings are the detokenizer's.
    """
    if not num_output_tokens:
        return None
    may_stop = num_output_tokens >= params.min_tokens
    if may_stop:
        last = token_ids[-1]
        if not params.ignore_eos and last == eos_token_id:
            return TokenEnd(FinishReason.STOP)
        if last in params.stop_token_ids:
            return TokenEnd(FinishReason.STOP, last)
    if max_tokens is not None and num_output_tokens >= max_tokens:
        return TokenEnd(FinishReason.LENGTH)
    detection = params.repetition_detection
    if (
        may_stop
        and detection is not None
        and _ends_in_loop(token_ids, num_output_tokens, detection)
    ):
        return TokenEnd(FinishReason.REPETITION)
    return None


def _ends_in_loop(
    token_ids: Sequence[int], num_output_tokens: int, params: RepetitionDetectionParams
) -> bool:
    """Do the last tokens consist of min_count copies of one pattern of an allowed size?

    How many of the last tokens equal the one `size` before them is, over all sizes, the Z-array of
    the answer read backwards (Gusfield, Algorithms on Strings, Trees, and Sequences, 1997, section
    1.4). No token is compared twice for what a shorter size has shown: answers that nearly repeat
    themselves would cost their length times the number of sizes.
    """
    longest = min(params.max_pattern_size, num_output_tokens // params.min_count)
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
