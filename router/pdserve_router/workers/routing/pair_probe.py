"""Tiny generations of the router's own: over a pair of workers, which proves that their handoff
works, and on one worker.
"""

import asyncio
import dataclasses
import itertools
from typing import TypeVar

from pdserve_common.errors import NoWorkerError
from pdserve_common.limits.validation import MAX_PROBE_BLOCKS, MAX_PROBE_TOKENS, PROBE_PRIORITY
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineInfo,
    Generate,
    KVTransferStats,
    Pool,
    WorkerRole,
)
from pdserve_common.types.pooling_params import GENERATE, PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.clients.legs import has_failed, make_legs
from pdserve_router.workers.worker import Worker

PROBE_PREFIX = "probe-"
T = TypeVar("T")
_NUM_TOKENS = MAX_PROBE_TOKENS


class ProbeFailedError(Exception):
    """The workers cannot be used; the message says why."""


async def probe(
    prefill: Worker, decode: Worker, *, timeout_s: float, runtime: Runtime
) -> KVTransferStats:
    """Have `prefill` compute two blocks and one token, and `decode` pull them and add one. Returns
    what the transfer was. Raises ProbeFailedError.
    """
    assert decode.info is not None
    request = _request(decode.info, runtime, timeout_s=timeout_s)
    run = _Probe(prefill, decode)
    try:
        run.start(request)
        return await _result(run.result, timeout_s, runtime)
    except NoWorkerError as error:
        raise ProbeFailedError(error.message) from None
    finally:
        prefill.abort(request.request_id)
        decode.abort(request.request_id)


async def probe_alone(worker: Worker, *, timeout_s: float, runtime: Runtime) -> None:
    """Have `worker` compute two blocks and as many tokens as its role brings, without a handoff, or
    their vector if its model pools. Raises ProbeFailedError.
    """
    assert worker.info is not None
    is_pooling = GENERATE not in worker.info.tasks
    num_tokens = 1 if worker.role is WorkerRole.PREFILL else _NUM_TOKENS
    request = _request(worker.info, runtime, timeout_s=timeout_s, num_tokens=num_tokens)
    if is_pooling:
        task = Pool(PoolingParams(task=worker.info.tasks[0]))
        request = dataclasses.replace(request, task=task)
    result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    token_ids: list[int] = []

    def on_output(output: EngineCoreOutput) -> None:
        token_ids.extend(output.new_token_ids)
        if not output.finished or result.done():
            return
        if has_failed(output):
            result.set_exception(ProbeFailedError(f"it failed: {_why(output)}"))
        elif is_pooling and output.pooling_output is not None:
            result.set_result(None)
        elif len(token_ids) != num_tokens:
            result.set_exception(ProbeFailedError(f"{len(token_ids)} of {num_tokens} tokens came"))
        else:
            result.set_result(None)

    try:
        worker.add_request(request, on_output)
        await _result(result, timeout_s, runtime)
    except NoWorkerError as error:
        raise ProbeFailedError(error.message) from None
    finally:
        worker.abort(request.request_id)


async def _result(future: "asyncio.Future[T]", timeout_s: float, runtime: Runtime) -> T:
    if not await runtime.wait(future, timeout_s):
        raise ProbeFailedError(f"no answer within {timeout_s:g} s")
    return future.result()


def _request(
    info: EngineInfo, runtime: Runtime, *, timeout_s: float, num_tokens: int = _NUM_TOKENS
) -> EngineCoreRequest:
    others = (token for token in range(info.vocab_size) if token not in info.eos_token_ids)
    ordinary = list(itertools.islice(others, info.block_size))
    num_prompt_tokens = min(MAX_PROBE_BLOCKS * info.block_size, info.max_model_len - num_tokens)
    request_id = f"{PROBE_PREFIX}{runtime.rng.getrandbits(64):016x}"
    now = runtime.now()
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tuple(ordinary[i % len(ordinary)] for i in range(num_prompt_tokens)),
        task=Generate(SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)),
        # Blocks that decode has cached would not be pulled.
        cache_salt=request_id,
        # Before all others, and beside a full batch: behind a long queue it would fail, and have
        # decode workers compute prompts that prefill workers are there for.
        priority=PROBE_PRIORITY,
        arrival_time=now,
        deadline=now + timeout_s,
    )


class _Probe:
    """Both legs of one probe; `result` is set once decode has its token."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.result: asyncio.Future[KVTransferStats] = asyncio.get_running_loop().create_future()
        self._prefill = prefill
        self._decode = decode
        self._num_tokens = 0
        self._stats: KVTransferStats | None = None

    def start(self, request: EngineCoreRequest) -> None:
        """Raises NoWorkerError if a worker takes nothing."""
        prefill_leg, decode_leg = make_legs(request, prefill=self._prefill, decode=self._decode)
        self._prefill.add_request(prefill_leg, self._on_prefill_output)
        self._decode.add_request(decode_leg, self._on_decode_output)

    def _on_prefill_output(self, output: EngineCoreOutput) -> None:
        if has_failed(output):
            self._fail(f"{self._prefill.engine_id} failed: {_why(output)}")
        elif output.finished and output.kv_transfer_params is None:
            self._fail(f"{self._prefill.engine_id} handed nothing over")

    def _on_decode_output(self, output: EngineCoreOutput) -> None:
        self._num_tokens += len(output.new_token_ids)
        self._stats = output.kv_transfer_stats or self._stats
        if output.kv_lost is not None:
            self._fail(f"{self._decode.engine_id} lost the KV: {output.kv_lost.message}")
        elif has_failed(output):
            self._fail(f"{self._decode.engine_id} failed: {_why(output)}")
        elif output.finished:
            self._on_decoded()

    def _on_decoded(self) -> None:
        if self._num_tokens != _NUM_TOKENS:
            self._fail(f"{self._decode.engine_id} has {self._num_tokens} of {_NUM_TOKENS} tokens")
        elif self._stats is None or self._stats.num_blocks == 0:
            self._fail(f"{self._decode.engine_id} pulled no KV blocks")
        elif not self.result.done():
            self.result.set_result(self._stats)

    def _fail(self, reason: str) -> None:
        if not self.result.done():
            self.result.set_exception(ProbeFailedError(reason))


def _why(output: EngineCoreOutput) -> str:
    return output.error.message if output.error is not None else str(output.finish_reason)
