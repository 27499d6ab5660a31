"""A worker's proof, before it serves, that its engine generates, or pools: with the model's own
tokens, through the way requests take.
"""

import asyncio
import logging
import secrets
import time
from typing import NamedTuple

from pdserve_common.errors import PdserveError, error_from_engine
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    Generate,
    Pool,
)
from pdserve_common.types.engine_client import EngineClient
from pdserve_common.types.pooling_params import GENERATE, PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.types.verbs import ResetPrefixCache

logger = logging.getLogger(__name__)

NUM_BLOCKS = 3
NUM_TOKENS = 4


class SelfCheckError(PdserveError):
    """The worker must not serve; says what failed and what to do. Not retryable."""


async def check_engine(engine: EngineClient, *, timeout_s: float) -> None:
    """Have one prompt answered twice, greedily if it generates, and leave no block cached or held.
    Raises SelfCheckError.
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
        first = await _ask(engine, request, outputs)
        second = await _ask(engine, request, outputs)
    finally:
        engine.unregister_client(client_index)
    # Where the last bits depend on a batch's shape, a near tie may go either way.
    if engine.info.determinism == "exact" and first.values != second.values:
        raise SelfCheckError(
            f"one prompt gave {_shown(first.values)} and then {_shown(second.values)}: does "
            "--no-enable-prefix-caching help? Then its blocks were overwritten"
        )
    is_whole_block = len(request.prompt_token_ids) > engine.info.block_size
    if engine.info.has_prefix_caching and is_whole_block and not second.num_cached_tokens:
        raise SelfCheckError(
            "the same prompt was not found in the prefix cache: use --no-enable-prefix-caching"
        )
    await engine.call(ResetPrefixCache(keeps_tiers=True))


def _request(info: EngineInfo, client_index: int) -> EngineCoreRequest:
    task: Generate | Pool
    max_tokens = 0
    if GENERATE in info.tasks:
        max_tokens = min(NUM_TOKENS, info.max_model_len - 1)
        task = Generate(SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    else:
        task = Pool(PoolingParams(task=info.tasks[0]))
    num_prompt_tokens = min(NUM_BLOCKS * info.block_size + 1, info.max_model_len - max_tokens)
    return EngineCoreRequest(
        request_id="self-check",
        prompt_token_ids=tuple(i % info.vocab_size for i in range(num_prompt_tokens)),
        task=task,
        client_index=client_index,
        # Computed here, not found in a tier that an earlier start has filled.
        cache_salt=secrets.token_hex(8),
    )


async def _ask(
    engine: EngineClient, request: EngineCoreRequest, outputs: "asyncio.Queue[EngineCoreOutputs]"
) -> "_Answer":
    """Raises the PdserveError with which the request ends."""
    engine.add_request(request)
    values: tuple[float, ...] = ()
    num_cached_tokens = 0
    is_finished = False
    while not is_finished:
        for output in _outputs_of(await outputs.get()):
            values += output.new_token_ids + (output.pooling_output or ())
            if output.prefill_stats is not None:
                num_cached_tokens = output.prefill_stats.num_cached_tokens
            is_finished = output.finished
    kind, wanted = "numbers", engine.info.embedding_size
    match request.task:
        case Generate(SamplingParams(max_tokens=int(max_tokens))):
            kind, wanted = "tokens", max_tokens
    if len(values) != wanted:
        raise SelfCheckError(f"{len(values)} {kind} came instead of {wanted}")
    return _Answer(values, num_cached_tokens)


def _shown(values: tuple[float, ...]) -> str:
    """Return them, as far as it helps."""
    more = len(values) - NUM_TOKENS
    return f"{values[:NUM_TOKENS]}" + (f" and {more} more" if more > 0 else "")


def _outputs_of(message: EngineCoreOutputs) -> tuple[EngineCoreOutput, ...]:
    """Return a message's outputs. Raises the PdserveError there is in it; NaN logits are one."""
    for error in (message.engine_dead, *(output.error for output in message.outputs)):
        if error is not None:
            raise error_from_engine(error)
    return message.outputs


class _Answer(NamedTuple):
    """Tokens, or the numbers of a vector."""

    values: tuple[float, ...]
    num_cached_tokens: int
