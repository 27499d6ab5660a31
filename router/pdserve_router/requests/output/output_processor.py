"""From engine outputs to what clients get: rule K7, text and parts."""

import asyncio
from collections.abc import Sequence

from pdserve_common.errors import PdserveError
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.tokens.token_end import TokenEnd, token_end
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.chat_formats.base import ParserOptions, TextParser
from pdserve_router.requests.output.answer_parser import answer_detokenizer, answer_parser
from pdserve_router.requests.output.outputs import Ending, RequestOutputCollector
from pdserve_router.requests.output.resume import ResumedCompletion
from pdserve_router.requests.records.request_metrics import Timeline
from pdserve_router.text.parts import OutputPart
from pdserve_router.text.tokenizer import Tokenizer
from pdserve_router.workers.clients.legs import has_failed

# Nothing precedes a prompt's first token.
_NO_POSITION = LogprobsLists.unknown(1)


class RequestState:
    """The router's view of one live request: every token so far, its text and its reader."""

    __slots__ = (
        "_detokenizer",
        "_has_text_alone",
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
        "takes_tokens",
        "timeline",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
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
        # The part of these that another stream has brought.
        self.num_resumed = 0
        # How that ended the answer, if it did.
        self.resumed_end: TokenEnd | None = None
        self._is_end_known = False
        self.ending: Ending | None = None
        self._params = params
        self._metrics = metrics
        # Slices of them, until the first token.
        self._prompt_logprobs: list[LogprobsLists] = []
        self._detokenizer = (
            answer_detokenizer(tokenizer, request.prompt_token_ids, params, parsing)
            if params.detokenize
            else None
        )
        self._parser = answer_parser(parsing, request, index)
        # Tokens bring text that nobody looks at, and nothing else.
        self._has_text_alone = (
            self._detokenizer is not None
            and not params.stop
            and not self.wants_logprobs
            and isinstance(self._parser, TextParser)
        )
        # Set while nothing but `take_token` has to know of a token.
        self.takes_tokens = False
        # Reasoning among the tokens so far.
        self.num_reasoning_tokens = 0
        self.collector = RequestOutputCollector(request, params, index=index, wake=wake)
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
        self.takes_tokens = False
        # They come again, from the first on.
        self._prompt_logprobs.clear()

    def take_token(self, token_id: int, index: int, now_ns: int) -> bool:
        """`accept` for the most frequent output: the next token, with nothing beside it. Returns
        False, and does nothing, if it is not that. Most of what `accept` and its callers do (10 us)
        has no effect then; this takes less than 1 us.
        """
        if not self.takes_tokens or index != len(self.token_ids) or not self._has_text_alone:
            return False
        assert self._detokenizer is not None
        self.token_ids.append(token_id)
        self.timeline.last_token_ns = now_ns
        self.collector.put_text(self._detokenizer.push(token_id), token_id)
        return True

    def accept(self, output: EngineCoreOutput, now_ns: int) -> str | None:
        """Take the new tokens of an output of the current attempt, by rule K7, and pass their text
        on. Returns the stop string if one ended the request. Raises PdserveError if tokens or
        logprobs are missing or tokens contradict those already delivered.
        """
        if output.attempt != self.attempt:
            return None
        if output.new_prompt_logprobs is not None and not self.token_ids:
            _check_positions(output.new_prompt_logprobs)
            self._prompt_logprobs.append(output.new_prompt_logprobs)
        if not output.new_token_ids and has_failed(output):
            # Its index counts tokens that may not have been taken. They are computed again.
            return None
        new = self._fresh(output.new_token_ids, output.first_token_index)
        if not new:
            return None
        logprobs = self._logprobs_of(new, output)
        if not self.token_ids and self._params.prompt_logprobs is not None:
            self.collector.put_prompt_logprobs(self._all_prompt_logprobs())
        self.timeline.on_tokens(now_ns, num_before=self.num_new_tokens, num_new=len(new))
        end = None if output.finish_reason is None else TokenEnd(output.finish_reason)
        return self._deliver(new, logprobs, num_silent=self._num_silent(end))

    def finish(self, ending: Ending) -> None:
        """Pass on what is held back, and the end. Later outputs must not come. If it raises it may
        be called again, and passes on the end alone.
        """
        self.takes_tokens = False
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
        """Return the logprobs of an output's last tokens, the new ones. For the token of prefill
        that it repeats decode has none, or an empty position.
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
