"""What clients get of a request, and one collector of it for each stream."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve_common.types.engine import (
    EngineCoreRequest,
    EngineError,
    FinishReason,
    LogprobsLists,
)
from pdserve_common.types.sampling_params import RequestOutputKind, SamplingParams
from pdserve_router.requests.records.request_events import RequestEvent
from pdserve_router.requests.records.request_metrics import RequestMetrics
from pdserve_router.text.parts import Content, OutputPart, content_of, join_parts


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
    # The model version of the tokens so far.
    model_version: str = ""
    # With the finish reason, if asked for.
    events: tuple[RequestEvent, ...] = ()

    @property
    def is_text_alone(self) -> bool:
        """It is some text, or none, and not the end."""
        is_text = all(isinstance(part, Content) for part in self.parts)
        return is_text and self.logprobs is None and self.finish_reason is None

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
    # The part of those that was thought before.
    num_reasoning_tokens: int = 0
    # Guesses of tokens, and how many became some; the same of those from the prediction.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_prediction_draft_tokens: int = 0
    num_accepted_prediction_tokens: int = 0

    @classmethod
    def total(cls, usages: Iterable["Usage"]) -> "Usage":
        """Return the sum of those of several requests."""
        first, *others = usages
        return functools.reduce(_add, others, first)


def _add(one: Usage, other: Usage) -> Usage:
    names = Usage.__slots__
    return Usage(**{name: getattr(one, name) + getattr(other, name) for name in names})


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
    # Set for a pooling request that did not fail.
    pooling_output: tuple[float, ...] | None = None

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
    # The part of its output tokens that another stream had brought.
    num_resumed_tokens: int = 0
    metrics: RequestMetrics
    events: tuple[RequestEvent, ...] = ()


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
        "_seed",
        "_text",
        "_token_ids",
        "_wake",
        "has_output",
        "is_awaited",
        "model_version",
        "on_text",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        *,
        index: int = 0,
        wake: asyncio.Event | None = None,
    ) -> None:
        self._request = request
        self._kind = params.output_kind
        self._seed = params.seed or 0
        self._index = index
        self._parts: list[OutputPart] = []
        # Behind them.
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobsLists] = []
        self._cumulative_logprob: float | None = None
        self._prompt_logprobs: LogprobsLists | None = None
        self._ending: Ending | None = None
        self._is_first = True
        self._wake = wake or asyncio.Event()
        # The reader waits: all that it was given is sent.
        self.is_awaited = False
        # Called when there is text which can wait for more: that of a token that is neither the
        # first nor the last.
        self.on_text: Callable[[], None] = self.wake
        self.has_output = False
        # What is told of where the tokens come from.
        self.model_version = ""

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

    def wake(self) -> None:
        """Have the reader take what there is."""
        self._wake.set()

    def put_text(self, text: str, token_id: int) -> None:
        """`put` for a token that brought text and nothing else."""
        self._text.append(text)
        self._token_ids.append(token_id)
        if not self.has_output and self._kind is not RequestOutputKind.FINAL_ONLY:
            self.has_output = True
            self.on_text()

    def put(
        self,
        parts: Iterable[OutputPart],
        token_ids: Sequence[int],
        logprobs: LogprobsLists | None = None,
    ) -> None:
        self._end_text()
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
        await self.wait()
        return self.take()

    async def wait(self) -> None:
        """Wait for output, which `take` returns."""
        self.is_awaited = True
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.has_output or self._ending is not None:
                break
        self.is_awaited = False

    def take_text(self) -> tuple[str, Sequence[int]] | None:
        """Return the text and the tokens that are new; None if there is something else besides,
        which `take` returns with them.
        """
        has_more = self._parts or self._logprobs or self._ending is not None
        if has_more or self._kind is not RequestOutputKind.DELTA:
            return None
        new = "".join(self._text), self._token_ids
        self._text, self._token_ids = [], []
        self.has_output = False
        return new

    def take(self) -> RequestOutput:
        """Return all that is new; the last one is `finished`."""
        self._end_text()
        self.has_output = False
        parts = join_parts(self._parts)
        logprobs = LogprobsLists.join(self._logprobs) if self._logprobs else None
        completion = CompletionOutput(
            index=self._index,
            parts=parts,
            token_ids=tuple(self._token_ids),
            logprobs=logprobs,
            cumulative_logprob=self._cumulative_logprob,
            model_version=self.model_version,
        )
        output = RequestOutput(
            request_id=self._request.external_req_id or self._request.request_id,
            outputs=(completion,),
            seed=self._seed,
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

    def _end_text(self) -> None:
        if self._text:
            text = "".join(self._text)
            self._text.clear()
            if text:
                self._parts.append(Content(text))

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
        events=ending.events,
    )
    return dataclasses.replace(
        output,
        outputs=(completion,),
        finished=True,
        usage=ending.usage,
        metrics=ending.metrics,
    )
