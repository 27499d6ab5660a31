"""What a request's progress looks like to its front end."""

from collections import defaultdict
from typing import Any

from pdserve_common.types.engine import EngineCoreOutput, KVLost, LogprobsLists
from pdserve_engine.request.request import Request, RequestStatus

# Outputs by the client_index of the front end they go to.
ClientOutputs = dict[int, list[EngineCoreOutput]]


class Outputs:
    """What front ends have not been told yet."""

    def __init__(self) -> None:
        self._outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)

    def take(self) -> ClientOutputs:
        """Return what is new since the last call."""
        outputs, self._outputs = dict(self._outputs), defaultdict(list)
        return outputs

    def emit(
        self,
        request: Request,
        *,
        logprobs: LogprobsLists | None = None,
        prompt_logprobs: LogprobsLists | None = None,
        pooling_output: tuple[float, ...] | None = None,
        num_nans: int = 0,
        kv_lost: KVLost | None = None,
    ) -> None:
        """Add what is new of a request: tokens since its last output, and its end."""
        first = request.num_emitted_tokens
        new_token_ids = tuple(request.all_token_ids[request.num_prompt_tokens + first :])
        request.num_emitted_tokens = first + len(new_token_ids)
        # Most have nothing but tokens: all else is passed only where it is there.
        more: dict[str, Any] = {}
        if logprobs is not None:
            more["new_logprobs"] = _align(logprobs, len(new_token_ids))
        if prompt_logprobs is not None:
            more["new_prompt_logprobs"] = prompt_logprobs
        if pooling_output is not None:
            more["pooling_output"] = pooling_output
            more["prefill_stats"] = request.measure_prefill()
        if num_nans:
            more["num_nans_in_logits"] = num_nans
        if kv_lost is not None:
            more["kv_lost"] = kv_lost
        if request.events:
            more["events"] = request.take_events()
        if request.drafts.stats:
            more["draft_stats"] = request.drafts.take_stats()
        if new_token_ids and first == request.num_resumed_tokens:
            more["prefill_stats"] = request.measure_prefill()
        if new_token_ids and request.handoff.kv_transfer_stats is not None:
            more["kv_transfer_stats"] = request.handoff.take_kv_transfer_stats(
                request.clock(), request.first_scheduled_time
            )
        if request.status is not RequestStatus.RUNNING:
            more.update(_end_of(request))
        core_request = request.core_request
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            first_token_index=first,
            attempt=core_request.attempt,
            **more,
        )
        self._outputs[core_request.client_index].append(output)


def _end_of(request: Request) -> dict[str, Any]:
    """Return how the request ended; nothing if it has not."""
    if not request.status.is_finished:
        return {}
    return {
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "error": request.error,
        "trace_headers": request.core_request.trace_headers,
        "kv_transfer_params": request.kv_transfer_params if request.is_handed_off else None,
    }


def _align(logprobs: LogprobsLists, num_tokens: int) -> LogprobsLists | None:
    """One position per token: a token that decode repeats after prefill has an empty one here."""
    if num_tokens == 0:
        return None
    return LogprobsLists.unknown(num_tokens - len(logprobs)) + logprobs
