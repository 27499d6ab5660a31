"""What a step that is over brings: tokens, log-probabilities, errors; blocks that others may have
now; and the end of a request.
"""

from collections.abc import Callable, Sequence

from pdserve_common.errors import RequestFailedError
from pdserve_common.types.engine import DraftStats, EngineError, LogprobsLists
from pdserve_engine.core.admission import Admission
from pdserve_engine.core.request_containers import RequestContainers
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.outputs import Outputs
from pdserve_engine.request.progress import ScheduledTokens
from pdserve_engine.request.request import Request, RequestStatus
from pdserve_engine.request.sched_output import ModelRunnerOutput
from pdserve_engine.request.stop import check_stop


class Results:
    """Applies results to requests, and tells their clients."""

    def __init__(
        self,
        kv: KVCacheManager,
        containers: RequestContainers,
        admission: Admission,
        outputs: Outputs,
        *,
        on_draft: Callable[[Request, DraftStats], None],
    ) -> None:
        """`on_draft` is told of each draft that was checked."""
        self._kv = kv
        self._containers = containers
        self._admission = admission
        self._outputs = outputs
        self._on_draft = on_draft

    def apply_step(
        self,
        request: Request,
        scheduled: ScheduledTokens,
        token_ids: Sequence[int],
        result: ModelRunnerOutput,
    ) -> None:
        """A step that computed `scheduled` of a request is over and counts."""
        if request.pooling_params is not None:
            self._apply_pooled(request, scheduled, result)
            return
        start = request.progress.num_finished_tokens - scheduled.num_tokens
        num_before = request.num_tokens
        status: RequestStatus | None = RequestStatus.FINISHED_ERROR
        request.count_chunk()
        request.error = _error_of(request, result)
        if request.error is None:
            status = _append_tokens(request, token_ids)
        num_new = request.num_tokens - num_before
        drafts = request.drafts
        drafts.spec_token_ids = result.draft_token_ids.get(request.request_id, ())
        drafts.forced_token_ids = result.forced_token_ids.get(request.request_id, ())
        if scheduled.num_sampled_tokens:
            self._settle_length(request, scheduled, num_new)
        if scheduled.draft_source is not None:
            stats = DraftStats(
                source=scheduled.draft_source,
                num_draft_tokens=scheduled.num_sampled_tokens - 1,
                # The last of the tokens that count is no draft, unless an end came before it.
                num_accepted_tokens=max(0, min(num_new, len(token_ids) - 1)),
            )
            drafts.stats.append(stats)
            self._on_draft(request, stats)
        self._settle_blocks(request, result)
        self._emit_result(request, status, num_new, result, start)

    def _apply_pooled(
        self, request: Request, scheduled: ScheduledTokens, result: ModelRunnerOutput
    ) -> None:
        """The end of a prompt that is pooled is the request's, and its answer is all there is."""
        if num_sampled := scheduled.num_sampled_tokens:
            request.progress.sampled(num_sampled, num_sampled)
        request.count_chunk()
        request.error = _error_of(request, result)
        self._settle_blocks(request, result)
        answer = result.pooler_outputs.get(request.request_id)
        if request.error is not None:
            self.finish(request, RequestStatus.FINISHED_ERROR, request.error)
        elif answer is not None:
            self._containers.finish(request, RequestStatus.FINISHED_STOPPED)
            self._outputs.emit(request, pooling_output=answer)

    def apply_token(self, request: Request, token_id: int) -> None:
        """As `apply_step`, in a fraction of the time, of a decode that has brought a token and
        nothing else, whose request nobody waits for: no fork, other worker or isolated request.
        """
        progress, drafts = request.progress, request.drafts
        request.count_chunk()
        request.append_output_token_ids((token_id,))
        progress.sampled(1, 1)
        drafts.spec_token_ids = drafts.forced_token_ids = ()
        status = check_stop(request)
        num_finished = progress.num_finished_tokens
        if num_finished % self._kv.block_size == 0:
            self._kv.cache_blocks(request, num_finished)
        self._kv.remove_skipped_blocks(request, num_finished)
        if status is not None:
            self._containers.decode_slots.on_end(request)
            self._containers.finish(request, status)
        self._outputs.emit(request)

    def apply_pulled_tokens(self, request: Request) -> None:
        """Decode: prefill's tokens are the request's own now; one of them may end it."""
        pulled = request.handoff.take_pulled_token_ids()
        request.progress.sampled(len(pulled), len(pulled))
        status = _append_tokens(request, pulled)
        if status is not None:
            self.finish(request, status)

    def finish(
        self, request: Request, status: RequestStatus, error: EngineError | None = None
    ) -> None:
        """End a request and tell its client."""
        request.error = error
        self._containers.finish(request, status)
        self._outputs.emit(request)

    def release_forks(self, source: Request) -> None:
        """The source's prompt is computed: its forks share the full blocks, and compute what comes
        behind those, if there is room; else they wait like any other request.
        """
        forks = self._containers.forks
        for fork in forks.take(source):
            if self._admission.has_room_for_fork(source) and forks.share(source, fork):
                self._containers.kv_ready.add(fork)
            else:
                self._containers.waiting.add_request(fork)

    def _settle_blocks(self, request: Request, result: ModelRunnerOutput) -> None:
        """What is computed may be had by others, unless it has brought NaN; what is out of all
        windows is given back.
        """
        if result.num_nans_in_logits.get(request.request_id):
            self._kv.forget_blocks(request)
        else:
            self._share_blocks(request)
        self._kv.remove_skipped_blocks(request, request.progress.num_finished_tokens)

    def _share_blocks(self, request: Request) -> None:
        """What is computed may be had by others."""
        self._kv.cache_blocks(request, request.progress.num_finished_tokens)
        self._containers.remote_decodes.announce(request)
        if request.is_prompt_computed:
            self.release_forks(request)

    def _settle_length(self, request: Request, scheduled: ScheduledTokens, num_new: int) -> None:
        """A step that was to bring tokens has brought `num_new`; none if its grammar was late."""
        num_kept = 1 if request.error is not None else num_new
        request.progress.sampled(scheduled.num_sampled_tokens, num_kept)
        self._containers.num_late_masks += num_kept == 0

    def _emit_result(
        self,
        request: Request,
        status: RequestStatus | None,
        num_new: int,
        result: ModelRunnerOutput,
        start: int,
    ) -> None:
        """`status`, if any, is that of the request's end; `start` the first token that the step
        computed.
        """
        prompt_logprobs = result.prompt_logprobs.get(request.request_id)
        if prompt_logprobs is not None:
            prompt_logprobs = _new_prompt_logprobs(request, prompt_logprobs, start)
        if num_new:
            self._containers.isolated.remove(request)
            if status is None and request.num_output_tokens >= request.output_limit:
                # Prefill's part ends with the first token; is_handed_off tells this from a real
                # end.
                status = RequestStatus.FINISHED_LENGTH_CAPPED
        if status is not None:
            self._containers.decode_slots.on_end(request)
            self._containers.finish(request, status)
        elif not num_new and prompt_logprobs is None:
            return
        logprobs = result.logprobs.get(request.request_id)
        if logprobs is not None and len(logprobs) > num_new:  # it has stopped before the last one
            logprobs = logprobs[:num_new]
        self._outputs.emit(
            request,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_nans=result.num_nans_in_logits.get(request.request_id, 0),
        )


def _error_of(request: Request, result: ModelRunnerOutput) -> EngineError | None:
    num_nans = result.num_nans_in_logits.get(request.request_id)
    if num_nans:
        return RequestFailedError(f"logits had {num_nans} NaN values").to_engine_error()
    return result.errors.get(request.request_id)


def _append_tokens(request: Request, token_ids: Sequence[int]) -> RequestStatus | None:
    """Add output tokens; return the status of the request's end if one of them is the last."""
    for token_id in token_ids:
        request.append_output_token_ids((token_id,))
        status = check_stop(request)
        if status is not None:
            return status
    return None


def _new_prompt_logprobs(
    request: Request, logprobs: LogprobsLists, start: int
) -> LogprobsLists | None:
    """Return those not emitted before, of a chunk that begins at token `start`.

    After a preemption the prompt is computed again.
    """
    num_known = request.num_emitted_prompt_logprobs - start
    if num_known >= len(logprobs):
        return None
    request.num_emitted_prompt_logprobs = start + len(logprobs)
    return logprobs[max(num_known, 0) :]
