"""From engine outputs to what clients get: rule K7, text, usage, and one collector per stream."""

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    FinishReason,
    LogprobsLists,
    RequestOutputKind,
    SamplingParams,
)
from pdserve_common.errors import PdserveError
from pdserve_common.metrics import RouterMetrics
from pdserve_common.token_end import TokenEnd, token_end
from pdserve_router.chat_formats.base import ParserOptions
from pdserve_router.requests.answer_parser import answer_parser, silent_token_ids
from pdserve_router.requests.request_metrics import RequestMetrics, Timeline
from pdserve_router.requests.resume import ResumedCompletion
from pdserve_router.text.detokenizer import Detokenizer
from pdserve_router.text.parts import OutputPart, content_of, join_parts
from pdserve_router.text.tokenizer import Tokenizer

# Nothing precedes a prompt's first token.
_NO_POSITION = LogprobsLists.unknown(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion, or what is new of it."""

    index: int = 0
    parts: tuple[OutputPart, ...] = ()
    token_ids: tuple[int, ...] = ()
    # One position per token in token_ids, if asked for; empty for tokens the client resumed from.
    logprobs: LogprobsLists | None = None
    # Sum over all tokens so far but those the client resumed from, if logprobs were asked for.
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: EngineError | None = None
    # Of the tokens so far.
    origin: str = ""

    @property
    def text(self) -> str:
        """What is said in it."""
        return content_of(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that count."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    # Of those, what was thought before.
    num_reasoning_tokens: int = 0

    @classmethod
    def total(cls, usages: Iterable["Usage"]) -> "Usage":
        """Return the sum of those of several requests."""
        rows = zip(*map(dataclasses.astuple, usages), strict=True)
        return cls(**dict(zip(cls.__slots__, map(sum, rows), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What a request has brought: the completions that have something new. Exactly one output is
    `finished`, the last; usage and metrics are on it.
    """

    request_id: str
    outputs: tuple[CompletionOutput, ...]
    seed: int
    # These two on the first output. The logprobs, if asked for, have one position per prompt
    # token; nothing precedes the first token, so its position is empty.
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: LogprobsLists | None = None
    finished: bool = False
    usage: Usage | None = None
    metrics: RequestMetrics | None = None

    @property
    def error(self) -> EngineError | None:
        """What ended the request, if it failed; one completion's failure is the request's."""
        return next((output.error for output in self.outputs if output.error is not None), None)

    @property
    def num_logprob_positions(self) -> int:
        """Of the prompt and of all completions."""
        count = 0 if self.prompt_logprobs is None else len(self.prompt_logprobs)
        for output in self.outputs:
            if output.logprobs is not None:
                count += len(output.logprobs)
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a request ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: EngineError | None = None
    usage: Usage
    metrics: RequestMetrics


class RequestOutputCollector:
    """What one stream has not been given yet of completion `index`. Deltas merge while its reader
    is slow, so it never holds more than one answer. One reader, who may share `wake` among several
    collectors; all on the event loop's thread.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_ending",
        "_index",
        "_is_first",
        "_kind",
        "_logprobs",
        "_parts",
        "_prompt_logprobs",
        "_request",
        "_token_ids",
        "_wake",
        "has_output",
        "origin",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        kind: RequestOutputKind,
        *,
        index: int = 0,
        wake: asyncio.Event | None = None,
    ) -> None:
        self._request = request
        self._kind = kind
        self._index = index
        self._parts: list[OutputPart] = []
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobsLists] = []
        self._cumulative_logprob: float | None = None
        self._prompt_logprobs: LogprobsLists | None = None
        self._ending: Ending | None = None
        self._is_first = True
        self._wake = wake or asyncio.Event()
        self.has_output = False
        # What is told of where the tokens come from.
        self.origin = ""

    def resume(
        self, parts: Iterable[OutputPart], token_ids: Sequence[int], *, has_logprobs: bool
    ) -> None:
        """Begin behind what another stream has brought: deltas are only what follows."""
        if self._kind is RequestOutputKind.DELTA:
            self._is_first = False
            return
        self._parts.extend(parts)
        self._token_ids.extend(token_ids)
        if has_logprobs:
            self._logprobs.append(LogprobsLists.unknown(len(token_ids)))

    def put_prompt_logprobs(self, logprobs: LogprobsLists) -> None:
        """Take the prompt's logprobs; the first output will have them."""
        self._prompt_logprobs = logprobs

    def put(
        self,
        parts: Iterable[OutputPart],
        token_ids: Sequence[int],
        logprobs: LogprobsLists | None = None,
    ) -> None:
        self._parts.extend(parts)
        self._token_ids.extend(token_ids)
        if logprobs is not None:
            self._logprobs.append(logprobs)
            # As everywhere in a position, the chosen token is first.
            total = sum(values[0] for values in logprobs.logprobs)
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + total
        if self._kind is not RequestOutputKind.FINAL_ONLY:
            self._notify()

    def finish(self, ending: Ending, *, is_known: bool = False) -> None:
        """Take the end. One that the reader knows already is no output among other completions'."""
        self._ending = ending
        if is_known and self._kind is RequestOutputKind.DELTA:
            self._wake.set()
        else:
            self._notify()

    async def get(self) -> RequestOutput:
        """Wait for output and return all of it; the last one is `finished`."""
        await self._wake.wait()
        self._wake.clear()
        return self.take()

    def take(self) -> RequestOutput:
        """Return all that is new; the last one is `finished`."""
        self.has_output = False
        parts = join_parts(self._parts)
        logprobs = LogprobsLists.join(self._logprobs) if self._logprobs else None
        completion = CompletionOutput(
            index=self._index,
            parts=parts,
            token_ids=tuple(self._token_ids),
            logprobs=logprobs,
            cumulative_logprob=self._cumulative_logprob,
            origin=self.origin,
        )
        output = RequestOutput(
            request_id=self._request.external_req_id or self._request.request_id,
            outputs=(completion,),
            seed=_seed(self._request),
            prompt_token_ids=self._request.prompt_token_ids if self._is_first else (),
            prompt_logprobs=self._prompt_logprobs,
        )
        self._is_first = False
        self._prompt_logprobs = None
        if self._kind is RequestOutputKind.DELTA:
            self._parts.clear()
            self._token_ids.clear()
            self._logprobs.clear()
        else:
            self._parts = list(parts)
            self._logprobs = [logprobs] if logprobs is not None else []
        return output if self._ending is None else _finished(output, self._ending)

    def _notify(self) -> None:
        self.has_output = True
        self._wake.set()


def _finished(output: RequestOutput, ending: Ending) -> RequestOutput:
    (completion,) = output.outputs
    completion = dataclasses.replace(
        completion,
        finish_reason=ending.finish_reason,
        stop_reason=ending.stop_reason,
        error=ending.error,
    )
    return dataclasses.replace(
        output,
        outputs=(completion,),
        finished=True,
        usage=ending.usage,
        metrics=ending.metrics,
    )


class RequestState:
    """The router's view of one live request: every token so far, its text and its reader."""

    __slots__ = (
        "_detokenizer",
        "_is_end_known",
        "_metrics",
        "_params",
        "_parser",
        "_prompt_logprobs",
        "attempt",
        "collector",
        "ending",
        "num_reasoning_tokens",
        "num_resumed",
        "request",
        "resumed_end",
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
        index: int = 0,
        wake: asyncio.Event | None = None,
        resumed: ResumedCompletion | None = None,
        parsing: ParserOptions | None = None,
    ) -> None:
        self.request = request
        self.timeline = timeline
        self.attempt = request.attempt
        # Kept whole: recovery sends them along with the next attempt.
        self.token_ids: list[int] = []
        # Of these, what another stream has brought.
        self.num_resumed = 0
        # How that ended the answer, if it did.
        self.resumed_end: TokenEnd | None = None
        self._is_end_known = False
        self.ending: Ending | None = None
        params = request.sampling_params or SamplingParams()
        self._params = params
        self._metrics = metrics
        # Slices of them, until the first token.
        self._prompt_logprobs: list[LogprobsLists] = []
        self._detokenizer = _detokenizer(tokenizer, params, parsing)
        self._parser = answer_parser(parsing, request, index)
        # Of the tokens so far.
        self.num_reasoning_tokens = 0
        self.collector = RequestOutputCollector(request, params.output_kind, index=index, wake=wake)
        if resumed is not None and resumed.is_begun:
            self._resume(resumed)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that this stream brings."""
        return len(self.token_ids) - self.num_resumed

    @property
    def wants_logprobs(self) -> bool:
        """Some of them exist only where the prompt is computed."""
        return self._params.logprobs is not None or self._params.prompt_logprobs is not None

    def begin_attempt(self, attempt: int) -> None:
        """From now on outputs of this attempt are taken, which goes on behind `token_ids`."""
        self.attempt = attempt
        # They come again, from the first on.
        self._prompt_logprobs.clear()

    def accept(self, output: EngineCoreOutput) -> str | None:
        """Take the new tokens of an output of the current attempt, by rule K7, and pass their text
        on. Returns the stop string if one ended the request. Raises PdserveError if tokens or
        logprobs are missing or tokens contradict those already delivered.
        """
        if output.attempt != self.attempt:
            return None
        if output.new_prompt_logprobs is not None and not self.token_ids:
            _check_positions(output.new_prompt_logprobs)
            self._prompt_logprobs.append(output.new_prompt_logprobs)
        new = self._fresh(output.new_token_ids, output.first_token_index)
        if not new:
            return None
        logprobs = self._logprobs_of(new, output)
        if not self.token_ids and self._params.prompt_logprobs is not None:
            self.collector.put_prompt_logprobs(self._all_prompt_logprobs())
        self.timeline.on_tokens(
            time.monotonic_ns(), num_before=self.num_new_tokens, num_new=len(new)
        )
        end = None if output.finish_reason is None else TokenEnd(output.finish_reason)
        return self._deliver(new, logprobs, num_silent=self._num_silent(end))

    def finish(self, ending: Ending) -> None:
        """Pass on what is held back, and the end. Later outputs must not come. If it raises it may
        be called again, and passes on the end alone.
        """
        detokenizer, self._detokenizer = self._detokenizer, None
        if detokenizer is not None and not self._is_end_known:
            self.collector.put(
                [*self._parser.push(detokenizer.finish()), *self._parser.finish()], ()
            )
        self.ending = ending
        self.collector.finish(ending, is_known=self._is_end_known)

    def _resume(self, resumed: ResumedCompletion) -> None:
        """Take what another stream has brought. The detokenizer sees it again, so that it holds
        back now what it held back then.
        """
        end = token_end(
            self._params,
            resumed.token_ids,
            num_output_tokens=len(resumed.token_ids),
            max_tokens=self._params.max_tokens,
            eos_token_id=self.request.eos_token_id,
        )
        parts, num_taken = self._parts_of(resumed.token_ids, num_silent=self._num_silent(end))
        if self._detokenizer is not None and self._detokenizer.stop_string is not None:
            end = TokenEnd(FinishReason.STOP, self._detokenizer.stop_string)
        if resumed.is_finished:
            if self._detokenizer is not None:
                parts += self._parser.push(self._detokenizer.finish())
            parts += self._parser.finish()
            end = end or TokenEnd(FinishReason.STOP)
        self.token_ids.extend(resumed.token_ids[:num_taken])
        self.num_resumed = num_taken
        self.resumed_end = end
        self._is_end_known = resumed.is_finished
        has_logprobs = self._params.logprobs is not None
        self.collector.resume(parts, self.token_ids, has_logprobs=has_logprobs)

    def _num_silent(self, end: TokenEnd | None) -> int:
        """EOS and stop tokens count as tokens and are no text."""
        is_stopped = end is not None and end.finish_reason is FinishReason.STOP
        return 1 if is_stopped and not self._params.include_stop_str_in_output else 0

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

    def _logprobs_of(
        self, token_ids: Sequence[int], output: EngineCoreOutput
    ) -> LogprobsLists | None:
        """Return the logprobs of an output's last tokens, the new ones. For the token of P that it
        repeats D has none, or an empty position.
        """
        if self._params.logprobs is None:
            return None
        logprobs = output.new_logprobs
        num_missing = len(token_ids) - (len(logprobs) if logprobs is not None else 0)
        if logprobs is None or num_missing > 0:
            raise PdserveError(f"a worker sent {num_missing} tokens without their logprobs")
        logprobs = logprobs[len(logprobs) - len(token_ids) :]
        _check_positions(logprobs)
        return logprobs

    def _all_prompt_logprobs(self) -> LogprobsLists:
        logprobs = LogprobsLists.join([_NO_POSITION, *self._prompt_logprobs])
        num_prompt_tokens = len(self.request.prompt_token_ids)
        if len(logprobs) != num_prompt_tokens:
            raise PdserveError(
                f"a worker sent logprobs of {len(logprobs) - 1} prompt tokens, the prompt has "
                f"{num_prompt_tokens - 1} besides its first"
            )
        self._prompt_logprobs.clear()
        return logprobs

    def _deliver(
        self, token_ids: Sequence[int], logprobs: LogprobsLists | None, *, num_silent: int
    ) -> str | None:
        parts, num_taken = self._parts_of(token_ids, num_silent=num_silent)
        self.token_ids.extend(token_ids[:num_taken])
        if logprobs is not None:
            logprobs = logprobs[:num_taken]
        self.collector.put(parts, token_ids[:num_taken], logprobs)
        return self._detokenizer.stop_string if self._detokenizer is not None else None

    def _parts_of(
        self, token_ids: Sequence[int], *, num_silent: int
    ) -> tuple[list[OutputPart], int]:
        """Return what may go out with these tokens and how many of them count: those behind a stop
        string are dropped, in however many messages they came.
        """
        parts: list[OutputPart] = []
        if self._detokenizer is None:
            return parts, len(token_ids)
        for i in range(len(token_ids) - num_silent):
            parts += self._parser.push(self._detokenizer.push(token_ids[i]))
            self.num_reasoning_tokens += self._parser.is_reasoning
            if self._detokenizer.stop_string is not None:
                return parts, i + 1
        return parts, len(token_ids)


def _check_positions(logprobs: LogprobsLists) -> None:
    """The chosen token at least, and a value for each."""
    for token_ids, values in zip(logprobs.logprob_token_ids, logprobs.logprobs, strict=True):
        if not 1 <= len(token_ids) == len(values):
            raise PdserveError(
                f"a worker sent a position of {len(token_ids)} tokens and {len(values)} logprobs"
            )


def _detokenizer(
    tokenizer: Tokenizer, params: SamplingParams, parsing: ParserOptions | None
) -> Detokenizer | None:
    if not params.detokenize:
        return None
    return Detokenizer(
        tokenizer.backend,
        skipped=silent_token_ids(tokenizer, params, parsing),
        stops=params.stop,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )


def _seed(request: EngineCoreRequest) -> int:
    params = request.sampling_params
    return params.seed or 0 if params is not None else 0
