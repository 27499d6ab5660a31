"""A request that a beam search answers, one short request per beam and step."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from pdserve_common.errors import EngineDeadError, InvalidRequestError, NoWorkerError
from pdserve_common.limits.validation import MAX_LOGPROBS
from pdserve_common.observability.logging import log_request
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorFault,
    FinishReason,
    Generate,
    LogprobsLists,
    PrefillStats,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.beam_search import Beam, BeamSearch
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.live_request import LiveRequest, Services
from pdserve_router.requests.output.answer_parser import answer_parser, silent_token_ids
from pdserve_router.requests.output.outputs import CompletionOutput, Ending, RequestOutput, Usage
from pdserve_router.requests.records.request_metrics import RequestMetrics, measure
from pdserve_router.requests.records.request_spans import add_stages
from pdserve_router.requests.redrive import Recovery
from pdserve_router.text.parts import OutputPart, join_parts
from pdserve_router.workers.model_version import ModelVersion, joined
from pdserve_router.workers.routing.route_chooser import AnyRoute, Route
from pdserve_router.workers.worker import Worker

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Span

logger = logging.getLogger(__name__)

# A step needs the 2 * width likeliest tokens of each beam: half of them may end it.
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0

# What changes or ends single completions and has no meaning for the search: the values that ask
# for nothing.
_UNUSED = SamplingParams()
_FIELDS_WITHOUT_BEAMS = (
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "logits_processors",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "structured_outputs",
    "repetition_detection",
)


class BeamSearchRequest(LiveRequest):
    """A request whose answers a BeamSearch finds. Each step asks one decode worker for one token
    behind every beam; its prefix cache makes the beams' common beginnings cheap. When the worker
    fails a step the whole step is sent again. There is one output, the last. Raises
    InvalidRequestError for parameters that beams cannot follow.
    """

    def __init__(
        self,
        processed: ProcessedInput,
        params: SamplingParams,
        route: Route,
        services: Services,
        span: "Span | None" = None,
    ) -> None:
        super().__init__(processed, services, span)
        assert params.max_tokens is not None, "the input processor fills it in"
        self._params = params
        self.recovery = Recovery()
        # The versions of every worker that took part in the search.
        self.versions: set[ModelVersion] = set()
        self._route = route
        self._tokenizer = services.tokenizer
        self._parsing = processed.parsing
        self._timeline = processed.begin_timeline()
        self._search = BeamSearch(
            params, max_tokens=params.max_tokens, stop_token_ids=self._stop_token_ids
        )
        _validate(params, self._search)
        # What was asked in this step and is not answered, and the answers by beam.
        self._asked: set[str] = set()
        self._tops: dict[int, LogprobsLists] = {}
        self._prefill_stats: PrefillStats | None = None
        self._ending: Ending | None = None
        self._is_over = asyncio.Event()

    @property
    def ending(self) -> Ending | None:
        return self._ending

    @property
    def route(self) -> Route:
        return self._route

    @property
    def begun_versions(self) -> Set[ModelVersion]:
        return self.versions if self._search.num_tokens else frozenset()

    @property
    def next_request(self) -> EngineCoreRequest:
        """One for all beams of the next attempt, whose tokens differ but not their number."""
        return dataclasses.replace(
            self.core_request,
            attempt=self.recovery.num_redrives + 1,
            resume_output_token_ids=self._search.running[0].token_ids,
        )

    @property
    def _stop_token_ids(self) -> frozenset[int]:
        stop_token_ids = frozenset(self._params.stop_token_ids)
        eos_token_id = self.core_request.eos_token_id
        if self._params.ignore_eos or eos_token_id is None:
            return stop_token_ids
        return stop_token_ids | {eos_token_id}

    @property
    def _worker(self) -> Worker:
        return self._route.decode

    def start(self) -> None:
        self._watch_deadline()
        self._step()
        self._timeline.dispatched_ns = self._runtime.now_ns()

    def cut(self, finish_reason: FinishReason, error: EngineError) -> None:
        self._end(finish_reason, error=error)

    def resend(self, route: AnyRoute) -> None:
        """Ask for the step that was lost again; nothing of it has counted."""
        assert isinstance(route, Route), "of a request that generates"
        if not self._search.num_tokens:
            self.versions.clear()
        self.recovery.begin_attempt()
        self._route = route
        text = "it goes on after %d tokens at %s"
        self._log(logging.INFO, text, self._search.num_tokens, self._worker.address)
        self._step(attempt=self.recovery.num_redrives)

    def give_up(self, error: EngineError | None = None) -> None:
        self._log(logging.WARNING, "nobody is left to go on with: it fails")
        self._end(FinishReason.ERROR, error=error or self.recovery.error)

    async def _next_output(self) -> RequestOutput:
        await self._is_over.wait()
        assert self._ending is not None
        if self._ending.error is not None:
            failed = CompletionOutput(
                finish_reason=self._ending.finish_reason, error=self._ending.error
            )
            completions = [failed]
        else:
            completions = [
                await self._completion(index, beam) for index, beam in enumerate(self._best)
            ]
        return RequestOutput(
            request_id=self.core_request.external_req_id or self.core_request.request_id,
            outputs=tuple(completions),
            seed=self._params.seed or 0,
            prompt_token_ids=self.core_request.prompt_token_ids,
            finished=True,
            usage=self._ending.usage,
            metrics=self._ending.metrics,
        )

    @property
    def _best(self) -> Sequence[Beam]:
        return self._search.finished[: self._params.n]

    async def _completion(self, index: int, beam: Beam) -> CompletionOutput:
        wants_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            index=index,
            parts=self._parts(await self._text(beam), index),
            token_ids=beam.token_ids,
            logprobs=beam.logprobs if wants_logprobs else None,
            cumulative_logprob=beam.cumulative_logprob,
            finish_reason=self._finish_reason(beam),
            stop_reason=self._stop_reason(beam),
        )

    async def _text(self, beam: Beam) -> str:
        if not self._params.detokenize:
            return ""
        is_cut = self._search.is_stopped(beam) and not self._params.include_stop_str_in_output
        token_ids = beam.token_ids[:-1] if is_cut else beam.token_ids
        skipped = silent_token_ids(self._tokenizer, self._params, self._parsing)
        return await self._tokenizer.decode_answer(
            token_ids, prompt_token_ids=self.core_request.prompt_token_ids, skipped=skipped
        )

    def _parts(self, text: str, index: int) -> tuple[OutputPart, ...]:
        parser = answer_parser(self._parsing, self.core_request, index)
        return join_parts([*parser.push(text), *parser.finish()])

    def _finish_reason(self, beam: Beam) -> FinishReason:
        return FinishReason.STOP if self._search.is_stopped(beam) else FinishReason.LENGTH

    def _stop_reason(self, beam: Beam) -> int | None:
        last = beam.token_ids[-1]
        is_named = self._search.is_stopped(beam) and last != self.core_request.eos_token_id
        return last if is_named else None

    def _step(self, *, attempt: int = 0) -> None:
        try:
            self._ask(attempt)
        except NoWorkerError as error:
            self._lose(error.to_engine_error())

    def _ask(self, attempt: int) -> None:
        """Send a step's requests. Raises NoWorkerError if the worker is gone."""
        for index, beam in enumerate(self._search.running):
            request = self._step_request(index, beam, attempt)
            on_output = functools.partial(self._on_output, index)
            self._worker.add_request(request, on_output, self.on_defect)
            self._asked.add(request.request_id)
        self.versions.add(self._worker.model_version)

    def _step_request(self, index: int, beam: Beam, attempt: int) -> EngineCoreRequest:
        return dataclasses.replace(
            self.core_request,
            request_id=f"{self._search.num_tokens}.{index}_{self.core_request.request_id}",
            attempt=attempt,
            # A span for each token of each beam would say nothing.
            trace_headers={},
            prompt_token_ids=self.core_request.prompt_token_ids + beam.token_ids,
            task=Generate(
                SamplingParams(
                    temperature=0.0,
                    max_tokens=1,
                    seed=self._params.seed,
                    logprobs=self._search.num_top_tokens,
                )
            ),
        )

    def _on_output(self, index: int, output: EngineCoreOutput) -> None:
        self._prefill_stats = self._prefill_stats or output.prefill_stats
        if output.new_logprobs is not None:
            self._tops[index] = output.new_logprobs
        if not output.finished:
            return
        self._asked.discard(output.request_id)
        if (error := self._problem(index, output)) is not None:
            self._on_failed(error)
        elif not self._asked:
            self._advance()

    def _on_failed(self, error: EngineError) -> None:
        self._redrives.blame(self._route, self._worker, error)
        if error.is_retryable and error.fault is not ErrorFault.REQUEST:
            self._lose(error)
        else:
            self._log(logging.WARNING, "%s: %s; it fails", self._worker.address, error.message)
            self._end(FinishReason.ERROR, error=error)

    def _problem(self, index: int, output: EngineCoreOutput) -> EngineError | None:
        if output.error is not None:
            return output.error
        if index in self._tops:
            return None
        return EngineDeadError(
            f"worker {self._worker.address} ended a beam's step without logprobs: "
            f"{output.finish_reason!s}"
        ).to_engine_error()

    def _advance(self) -> None:
        self._redrives.on_answer(self, self._route, self._worker)
        self._redrives.on_token(self)
        self.recovery.note_tokens(1)
        tops = [self._tops[index] for index in range(len(self._tops))]
        self._tops = {}
        self._timeline.on_tokens(
            self._runtime.now_ns(), num_before=self._search.num_tokens, num_new=1
        )
        self._search.advance(tops)
        self._on_tokens(self, len(tops))
        if self._search.is_done:
            self._redrives.pool.report_success(self._worker)
            self._end(self._finish_reason(self._best[0]))
            return
        self._step()

    def _lose(self, error: EngineError) -> None:
        """The worker cannot go on: have the step done again."""
        self._abort_step()
        reason = error.code.name.lower()
        self._redrives.lose(self, self._route, self._worker, error, reason=reason)
        if self._redrives.is_spent(self) and not self.recovery.is_by_death:
            self.give_up()
        else:
            self._redrives.add(self)

    def _abort_step(self) -> None:
        for request_id in self._asked:
            self._worker.abort(request_id)
        self._asked.clear()
        self._tops = {}

    def _log(self, level: int, text: str, *args: object) -> None:
        attempt = self.recovery.num_redrives
        log_request(logger, level, self.core_request.request_id, attempt, text, *args)

    def _end(self, finish_reason: FinishReason, *, error: EngineError | None = None) -> None:
        if self._ending is not None:
            return
        self._stop_deadline()
        self._redrives.discard(self)
        self._abort_step()
        self._timeline.finished_ns = self._runtime.now_ns()
        self._ending = Ending(
            finish_reason=finish_reason,
            error=error,
            usage=self._usage(is_answered=error is None),
            metrics=self.measure(),
        )
        if self.recovery.num_redrives:
            self._metrics.recovered_requests.labels(outcome=str(finish_reason)).inc()
        self._is_over.set()
        self._on_end(self)
        if self.span is not None:
            add_stages(self.span, self._timeline)

    def _usage(self, *, is_answered: bool) -> Usage:
        stats = self._prefill_stats
        return Usage(
            num_prompt_tokens=len(self.core_request.prompt_token_ids),
            num_cached_tokens=stats.num_cached_tokens if stats is not None else 0,
            num_output_tokens=sum(len(beam.token_ids) for beam in self._best) if is_answered else 0,
        )

    def measure(self) -> RequestMetrics:
        return measure(
            self._timeline,
            num_tokens=self._search.num_tokens,
            prefill=self._prefill_stats,
            transfer=None,
            path=self._route.path,
            route_reason=self._route.reason,
            prefill_engine_id="",
            decode_engine_id=self._worker.engine_id,
            determinism=joined(self.versions).determinism,
            num_redrives=self.recovery.num_redrives,
        )


def _validate(params: SamplingParams, search: BeamSearch) -> None:
    if search.width > MAX_BEAM_WIDTH:
        field = "n" if params.best_of is None else "best_of"
        raise InvalidRequestError(
            f"{field} is {search.width}, at most {MAX_BEAM_WIDTH} with use_beam_search",
            field=field,
        )
    if search.num_top_tokens > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"stop_token_ids and EOS are {search.num_top_tokens - search.width} tokens, with "
            f"use_beam_search and a width of {search.width} at most {MAX_LOGPROBS - search.width}",
            field="stop_token_ids",
        )
    if abs(params.length_penalty) > MAX_LENGTH_PENALTY:
        raise InvalidRequestError(
            f"length_penalty is {params.length_penalty:g}, must be -{MAX_LENGTH_PENALTY:g} to "
            f"{MAX_LENGTH_PENALTY:g}",
            field="length_penalty",
        )
    for name in _FIELDS_WITHOUT_BEAMS:
        if getattr(params, name) != getattr(_UNUSED, name):
            raise InvalidRequestError(
                f"{name} is set: not served with use_beam_search, leave it unset", field=name
            )
