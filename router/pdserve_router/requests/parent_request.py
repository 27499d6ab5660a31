"""n and best_of: one request of a client, several completions of one prompt."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve_common.limits.validation import MAX_SEED
from pdserve_common.types.engine import EngineError, FinishReason, Generate
from pdserve_common.types.sampling_params import RequestOutputKind, SamplingParams
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.live_request import LiveRequest, Services
from pdserve_router.requests.output.outputs import CompletionOutput, Ending, RequestOutput, Usage
from pdserve_router.requests.records.request_metrics import RequestMetrics, Timeline
from pdserve_router.requests.single_completion import SingleCompletion
from pdserve_router.workers.routing.route_chooser import Route

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Span


class ParentRequest(LiveRequest):
    """A request of `n` completions, each of them a child request. The first child gets the prompt
    computed, on whatever route; the others are its forks on the same decode worker, which shares
    the prompt's blocks among them. A child that loses its workers goes on alone on others; if it
    cannot, its failure ends them all.
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
        self._params = params
        self._is_silent = params.is_ranked or params.output_kind is RequestOutputKind.FINAL_ONLY
        self._wake = asyncio.Event()
        services = replace(services, on_tokens=self._on_child_tokens, on_end=self._on_child_end)
        fork_route = Route(decode=route.decode, reason="fork")
        resumed = {each.index for each in processed.resume if each.token_ids}
        self._children: list[SingleCompletion] = []
        self._children.extend(
            SingleCompletion(
                _child(processed, child_params, index),
                child_params,
                # What is resumed is no fork: it shares the prompt with none that stands elsewhere.
                fork_route if index and index not in resumed else route,
                services,
                span,
                index=index,
                wake=self._wake,
                siblings=self._children,
            )
            for index, child_params in enumerate(_params_of_children(params))
        )
        self._is_cut = False
        # A resumed stream of deltas has had its first output elsewhere.
        self._is_first = not resumed or params.output_kind is not RequestOutputKind.DELTA
        self._ending: Ending | None = None

    @property
    def ending(self) -> Ending | None:
        return self._ending

    @property
    def route(self) -> Route:
        return self._children[0].route

    def start(self) -> None:
        # In order: forks have to find the first child. Nothing else runs meanwhile, so a worker
        # that takes the first takes them all.
        for child in self._children:
            child.start()

    def cut(self, finish_reason: FinishReason, error: EngineError) -> None:
        self._is_cut = True
        for child in self._children:
            child.cut(finish_reason, error)

    def measure(self) -> RequestMetrics:
        first, *others = self._children
        return first.measure(self._timeline(first.state.timeline), siblings=others)

    async def _next_output(self) -> RequestOutput:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._ending is not None or (self._has_output and self._may_emit):
                return self._take()

    @property
    def _has_output(self) -> bool:
        return any(child.state.collector.has_output for child in self._children)

    @property
    def _may_emit(self) -> bool:
        """False while what is new has to wait for more."""
        if self._is_first and self._params.prompt_logprobs is not None:
            # The first output has them, and the first child brings them; a fork may be faster.
            return not self._is_silent and self._children[0].state.collector.has_output
        return not self._is_silent

    def _take(self) -> RequestOutput:
        collectors = [child.state.collector for child in self._children]
        new = [collector.take() for collector in collectors if collector.has_output]
        completions = tuple(completion for output in new for completion in output.outputs)
        is_first, self._is_first = self._is_first, False
        ending = self._ending
        return RequestOutput(
            request_id=self.core_request.external_req_id or self.core_request.request_id,
            outputs=self._best(completions) if self._params.is_ranked else completions,
            seed=self._params.seed or 0,
            prompt_token_ids=self.core_request.prompt_token_ids if is_first else (),
            prompt_logprobs=new[0].prompt_logprobs if new else None,
            finished=ending is not None,
            usage=ending.usage if ending is not None else None,
            metrics=ending.metrics if ending is not None else None,
        )

    def _best(self, completions: Sequence[CompletionOutput]) -> tuple[CompletionOutput, ...]:
        failed = [completion for completion in completions if completion.error is not None]
        ranked = failed or sorted(completions, key=_total_logprob, reverse=True)
        if self._params.logprobs is None:
            ranked = [replace(item, logprobs=None, cumulative_logprob=None) for item in ranked]
        return tuple(
            replace(item, index=index) for index, item in enumerate(ranked[: self._params.n])
        )

    def _on_child_tokens(self, child: LiveRequest, num_new: int) -> None:
        self._on_tokens(self, num_new)

    def _on_child_end(self, child: LiveRequest) -> None:
        assert child.ending is not None
        if child.ending.error is not None and not self._is_cut:
            self.cut(FinishReason.ERROR, child.ending.error)
        endings = [each.ending for each in self._children if each.ending is not None]
        if self._ending is None and len(endings) == len(self._children):
            self._ending = self._merge(endings)
            self._on_end(self)

    def _merge(self, endings: Sequence[Ending]) -> Ending:
        """Of several ways to end, an error is told, else the first child's."""
        failed = (ending for ending in endings if ending.error is not None)
        return replace(
            next(failed, endings[0]),
            usage=replace(
                Usage.total(ending.usage for ending in endings),
                num_prompt_tokens=endings[0].usage.num_prompt_tokens,
                num_cached_tokens=endings[0].usage.num_cached_tokens,
            ),
            num_resumed_tokens=sum(ending.num_resumed_tokens for ending in endings),
            metrics=self.measure(),
        )

    def _timeline(self, first: Timeline) -> Timeline:
        """The first child's, from the first token of any child to the end of all."""
        timelines = [child.state.timeline for child in self._children]
        first_tokens = [each.first_token_ns for each in timelines if each.first_token_ns]
        return replace(
            first, first_token_ns=min(first_tokens, default=0), finished_ns=self._runtime.now_ns()
        )


def _params_of_children(params: SamplingParams) -> Iterator[SamplingParams]:
    shared = replace(params, n=1, best_of=None)
    if params.is_ranked:
        logprobs = 0 if params.logprobs is None else params.logprobs
        shared = replace(shared, logprobs=logprobs, output_kind=RequestOutputKind.FINAL_ONLY)
    for index in range(params.best_of or params.n):
        yield replace(
            shared,
            seed=((params.seed or 0) + index) & MAX_SEED,
            # One prompt: its logprobs are the same for all.
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        )


def _child(processed: ProcessedInput, params: SamplingParams, index: int) -> ProcessedInput:
    request = processed.core_request
    request = replace(
        request,
        request_id=f"{index}_{request.request_id}",
        task=Generate(params),
        fork_of=None if index == 0 else f"0_{request.request_id}",
    )
    return replace(processed, core_request=request)


def _total_logprob(completion: CompletionOutput) -> float:
    total = completion.cumulative_logprob
    return -math.inf if total is None else total
