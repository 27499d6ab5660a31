"""What a request's progress looks like to its front end."""

from pdserve_common.engine_types import EngineCoreOutput, KVLost, LogprobsLists, PrefillStats
from pdserve_engine.request.request import Request

# Outputs by the client_index of the front end they go to.
ClientOutputs = dict[int, list[EngineCoreOutput]]


class Outputs:
    """What front ends have not been told yet."""

    def __init__(self) -> None:
        self._outputs: ClientOutputs = {}

    def take(self) -> ClientOutputs:
        """Return what is new since the last call."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def emit(
        self,
        request: Request,
        *,
        logprobs: LogprobsLists | None = None,
        prompt_logprobs: LogprobsLists | None = None,
        num_nans: int = 0,
        kv_lost: KVLost | None = None,
    ) -> None:
        """Add what is new of a request: tokens since its last output, and its end."""
        first = request.num_emitted_tokens
        request.num_emitted_tokens = request.num_output_tokens
        new_token_ids = tuple(request.all_token_ids[request.num_prompt_tokens + first :])
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            new_logprobs=_align(logprobs, len(new_token_ids)) if logprobs is not None else None,
            new_prompt_logprobs=prompt_logprobs,
            first_token_index=first,
            attempt=request.core_request.attempt,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            events=request.take_events(),
            trace_headers=request.core_request.trace_headers if request.status.is_finished else {},
            num_nans_in_logits=num_nans,
            kv_lost=kv_lost,
            draft_stats=request.take_draft_stats(),
            kv_transfer_params=request.kv_transfer_params if request.is_handed_off else None,
            prefill_stats=_prefill_stats(request, first) if new_token_ids else None,
            kv_transfer_stats=request.take_kv_transfer_stats() if new_token_ids else None,
        )
        self._outputs.setdefault(request.core_request.client_index, []).append(output)


def _align(logprobs: LogprobsLists, num_tokens: int) -> LogprobsLists | None:
    """One position per token: a token that D repeats after P has an empty one here."""
    if num_tokens == 0:
        return None
    return LogprobsLists.unknown(num_tokens - len(logprobs)) + logprobs


def _prefill_stats(request: Request, first_token_index: int) -> PrefillStats | None:
    """Of the first token of this engine. None on D after a pull: P has sent its own."""
    is_first = first_token_index == len(request.core_request.resume_output_token_ids)
    if not is_first or request.is_kv_loaded or request.first_scheduled_time is None:
        return None
    queue_s = request.first_scheduled_time - request.queued_time
    return PrefillStats(
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        queue_s=queue_s,
        prefill_s=request.clock() - request.first_scheduled_time,
        # What is not P's is D's: no other worker has it.
        decode_queue_s=request.decode_queue_s if request.do_remote_decode else queue_s,
    )
