"""A worker's proof, before it serves, that its engine generates: with the model's own tokens,
through the way requests take.
"""

import asyncio
import logging
import time
from typing import NamedTuple

from pdserve_common.engine_client import EngineClient
from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
)
from pdserve_common.errors import PdserveError, error_from_engine
from pdserve_common.sampling_params import SamplingParams
from pdserve_common.verbs import ResetPrefixCache

logger = logging.getLogger(__name__)

NUM_BLOCKS = 3
NUM_TOKENS = 4


class SelfCheckError(PdserveError):
    """The worker must not serve; says what failed and what to do. Not retryable."""


async def check_engine(engine: EngineClient, *, timeout_s: float) -> None:
    """Generate the same tokens greedily, twice, and leave no block cached or held. Raises
    SelfCheckError.
    """
    started = time.monotonic()
    try:
        await asyncio.wait_for(_check(engine), timeout_s)
    except asyncio.TimeoutError:
        raise SelfCheckError(
            f"a few tokens took more than {timeout_s:g} s: raise --self-check-timeout-s, or find "
            "out what holds the engine up"
        ) from None
    except PdserveError as error:
        raise SelfCheckError(f"the self-check failed: {error.message}") from error
    logger.info("the self-check took %.0f ms", 1e3 * (time.monotonic() - started))


async def _check(engine: EngineClient) -> None:
    outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
    client_index = engine.register_client(outputs.put_nowait)
    request = _request(engine.info, client_index)
    try:
        first = await _generate(engine, request, outputs)
        second = await _generate(engine, request, outputs)
    finally:
        engine.unregister_client(client_index)
    # Where the last bits depend on a batch's shape, a near tie may go either way.
    if engine.info.determinism == "exact" and first.token_ids != second.token_ids:
        raise SelfCheckError(
            f"one prompt gave the tokens {first.token_ids} and then {second.token_ids}: does "
            "--no-enable-prefix-caching help? Then its blocks were overwritten"
        )
    is_whole_block = len(request.prompt_token_ids) > engine.info.block_size
    if engine.info.has_prefix_caching and is_whole_block and not second.num_cached_tokens:
        raise SelfCheckError(
            "the same prompt was not found in the prefix cache: use --no-enable-prefix-caching"
        )
    await engine.call(ResetPrefixCache())


def _request(info: EngineInfo, client_index: int) -> EngineCoreRequest:
    max_tokens = min(NUM_TOKENS, info.max_model_len - 1)
    num_prompt_tokens = min(NUM_BLOCKS * info.block_size + 1, info.max_model_len - max_tokens)
    return EngineCoreRequest(
        request_id="self-check",
        prompt_token_ids=tuple(i % info.vocab_size for i in range(num_prompt_tokens)),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        client_index=client_index,
    )


async def _generate(
    engine: EngineClient, request: EngineCoreRequest, outputs: "asyncio.Queue[EngineCoreOutputs]"
) -> "_Generated":
    """Raises the PdserveError with which the request ends."""
    engine.add_request(request)
    token_ids: tuple[int, ...] = ()
    num_cached_tokens = 0
    is_finished = False
    while not is_finished:
        for output in _outputs_of(await outputs.get()):
            token_ids += output.new_token_ids
            if output.prefill_stats is not None:
                num_cached_tokens = output.prefill_stats.num_cached_tokens
            is_finished = output.finished
    wanted = request.sampling_params.max_tokens if request.sampling_params is not None else None
    if len(token_ids) != wanted:
        raise SelfCheckError(f"{len(token_ids)} tokens came instead of {wanted}")
    return _Generated(token_ids, num_cached_tokens)


def _outputs_of(message: EngineCoreOutputs) -> tuple[EngineCoreOutput, ...]:
    """Return a message's outputs. Raises the PdserveError there is in it; NaN logits are one."""
    for error in (message.engine_dead, *(output.error for output in message.outputs)):
        if error is not None:
            raise error_from_engine(error)
    return message.outputs


class _Generated(NamedTuple):
    token_ids: tuple[int, ...]
    num_cached_tokens: int
