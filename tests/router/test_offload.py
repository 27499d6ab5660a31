import threading

import pytest

from pdserve_router.api.http.large_answers import INLINE_POSITIONS, write_off_loop
from pdserve_router.requests.output.outputs import CompletionOutput, RequestOutput
from support.fake_worker import logprobs_of


def output(num_prompt: int, *num_tokens: int) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        outputs=tuple(CompletionOutput(logprobs=logprobs_of([5] * n, 0)) for n in num_tokens),
        seed=0,
        prompt_logprobs=logprobs_of([5] * num_prompt, 0),
    )


@pytest.mark.parametrize(
    ("large", "is_inline"),
    [
        (RequestOutput(request_id="r", outputs=(CompletionOutput(),), seed=0), True),
        (output(INLINE_POSITIONS - 2, 1, 1), True),
        (output(INLINE_POSITIONS - 2, 1, 2), False),
        (output(0, INLINE_POSITIONS + 1), False),
    ],
)
async def test_only_large_outputs_are_written_in_a_thread(large, is_inline) -> None:
    thread = await write_off_loop(large, threading.current_thread)
    assert (thread is threading.current_thread()) == is_inline


async def test_an_error_while_writing_is_raised() -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await write_off_loop(output(1000), fail)
