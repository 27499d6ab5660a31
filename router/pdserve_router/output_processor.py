"""From engine outputs to what clients get: rule K7, text, usage, and one collector per stream."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    FinishReason,
    RequestOutputKind,
    SamplingParams,
)
from pdserve_common.errors import PdserveError
from pdserve_common.metrics import RouterMetrics
from pdserve_router.detokenizer import Detokenizer
from pdserve_router.request_metrics import RequestMetrics, Timeline
from pdserve_router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion, or what is new of it."""

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: EngineError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that count."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What a request has brought. Usage and metrics are on the last one."""

    request_id: str
    completion: CompletionOutput
    seed: int
    prompt_token_ids: tuple[int, ...] = ()
    finished: bool = False
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a request ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: EngineError | None = None
    usage: Usage
    metrics: RequestMetrics


class RequestOutputCollector:
    """What one stream has not been given yet. Deltas merge while its reader is slow, so it never
    holds more than one answer. One reader; all on the event loop's thread.
    """

    __slots__ = ("_ending", "_is_first", "_kind", "_request", "_text", "_token_ids", "_wake")

    def __init__(self, request: EngineCoreRequest, kind: RequestOutputKind) -> None:
        self._request = request
        self._kind = kind
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._ending: Ending | None = None
        self._is_first = True
        self._wake = asyncio.Event()

    def put(self, text: str, token_ids: Sequence[int]) -> None:
        self._text.append(text)
        self._token_ids.extend(token_ids)
        if self._kind is not RequestOutputKind.FINAL_ONLY:
            self._wake.set()

    def finish(self, ending: Ending) -> None:
        self._ending = ending
        self._wake.set()

    async def get(self) -> RequestOutput:
        """Wait for news and return all of it; the last one is `finished`."""
        await self._wake.wait()
        self._wake.clear()
        text = "".join(self._text)
        completion = CompletionOutput(text=text, token_ids=tuple(self._token_ids))
        output = RequestOutput(
            request_id=self._request.external_req_id or self._request.request_id,
            completion=completion,
            seed=_seed(self._request),
            prompt_token_ids=self._request.prompt_token_ids if self._is_first else (),
        )
        self._is_first = False
        if self._kind is RequestOutputKind.DELTA:
            self._text.clear()
            self._token_ids.clear()
        else:
            self._text = [text]
        return output if self._ending is None else _finished(output, self._ending)


def _finished(output: RequestOutput, ending: Ending) -> RequestOutput:
    completion = dataclasses.replace(
        output.completion,
        finish_reason=ending.finish_reason,
        stop_reason=ending.stop_reason,
        error=ending.error,
    )
    return dataclasses.replace(
        output,
        completion=completion,
        finished=True,
        usage=ending.usage,
        metrics=ending.metrics,
    )


class RequestState:
    """The router's view of one live request: every token so far, its text and its reader."""

    __slots__ = (
        "_detokenizer",
        "_metrics",
        "_params",
        "attempt",
        "collector",
        "ending",
        "request",
        "timeline",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        tokenizer: Tokenizer,
        timeline: Timeline,
        metrics: RouterMetrics,
    ) -> None:
        self.request = request
        self.timeline = timeline
        self.attempt = request.attempt
        # Kept whole: recovery sends them along with the next attempt.
        self.token_ids: list[int] = []
        self.ending: Ending | None = None
        params = request.sampling_params or SamplingParams()
        self._params = params
        self._metrics = metrics
        self._detokenizer = _detokenizer(tokenizer, params)
        self.collector = RequestOutputCollector(request, params.output_kind)

    def accept(self, output: EngineCoreOutput) -> str | None:
        """Take the new tokens of an output of the current attempt, by rule K7, and pass their text
        on. Returns the stop string if one ended the request. Raises PdserveError if tokens are
        missing or contradict those already delivered.
        """
        if output.attempt != self.attempt:
            return None
        new = self._fresh(output.new_token_ids, output.first_token_index)
        if not new:
            return None
        self.timeline.on_tokens(
            time.monotonic_ns(), num_before=len(self.token_ids), num_new=len(new)
        )
        # EOS and stop tokens count as tokens and are no text.
        is_stopped = output.finish_reason is FinishReason.STOP
        is_cut = is_stopped and not self._params.include_stop_str_in_output
        return self._deliver(new, num_silent=1 if is_cut else 0)

    def finish(self, ending: Ending) -> None:
        """Pass on what is held back, and the end. Later outputs must not come."""
        self.ending = ending
        if self._detokenizer is not None:
            self.collector.put(self._detokenizer.finish(), ())
        self.collector.finish(ending)

    def _fresh(self, token_ids: Sequence[int], first_index: int) -> Sequence[int]:
        """Return the tokens that were not delivered before."""
        num_known = len(self.token_ids)
        if first_index == num_known:
            return token_ids
        if first_index > num_known:
            raise PdserveError(f"tokens {num_known} to {first_index - 1} of the answer are missing")
        known = self.token_ids[first_index : first_index + len(token_ids)]
        is_match = list(token_ids[: len(known)]) == known
        self._metrics.duplicate_tokens.labels(match=str(is_match).lower()).inc(len(known))
        if not is_match:
            raise PdserveError(
                f"a worker repeated tokens {first_index} to {num_known - 1} of the answer "
                "differently from what was delivered"
            )
        return token_ids[len(known) :]

    def _deliver(self, token_ids: Sequence[int], *, num_silent: int) -> str | None:
        if self._detokenizer is None:
            self.token_ids.extend(token_ids)
            self.collector.put("", token_ids)
            return None
        texts = []
        num_spoken = len(token_ids) - num_silent
        num_taken = len(token_ids)
        for i in range(num_spoken):
            texts.append(self._detokenizer.push(token_ids[i]))
            if self._detokenizer.stop_string is not None:
                # Tokens behind a stop string are dropped, in however many messages they came.
                num_taken = i + 1
                break
        self.token_ids.extend(token_ids[:num_taken])
        self.collector.put("".join(texts), token_ids[:num_taken])
        return self._detokenizer.stop_string


def _detokenizer(tokenizer: Tokenizer, params: SamplingParams) -> Detokenizer | None:
    if not params.detokenize:
        return None
    return Detokenizer(
        tokenizer.backend,
        skipped=tokenizer.special_token_ids if params.skip_special_tokens else frozenset(),
        stops=params.stop,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )


def _seed(request: EngineCoreRequest) -> int:
    params = request.sampling_params
    return params.seed or 0 if params is not None else 0
