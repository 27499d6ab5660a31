"""EngineCoreOutputs to and from protobuf, by hand: each token pays for it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve_common.types.engine import (
    DraftStats,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineError,
    FinishReason,
    KVLost,
    KVTransferParams,
    KVTransferStats,
    LogprobsLists,
    PrefillStats,
    SchedulerStats,
    UtilityOutput,
)
from pdserve_common.wire.codec import from_proto, to_proto
from pdserve_common.wire.convert import enum_from_proto, seconds_to_ns


def logprobs_to_proto(
    logprobs: LogprobsLists, *, token_text: Callable[[int], str] | None = None
) -> core_pb2.LogprobsLists:
    """`token_text` decodes a token; without it tokens go without their text."""
    message = core_pb2.LogprobsLists()
    rows = zip(
        logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks, strict=True
    )
    for token_ids, values, rank in rows:
        message.positions.add(
            token_ids=token_ids,
            logprobs=values,
            sampled_token_rank=rank,
            decoded_tokens=map(token_text, token_ids) if token_text is not None else (),
        )
    return message


def logprobs_from_proto(message: core_pb2.LogprobsLists) -> LogprobsLists:
    return LogprobsLists(
        logprob_token_ids=tuple(tuple(p.token_ids) for p in message.positions),
        logprobs=tuple(tuple(p.logprobs) for p in message.positions),
        sampled_token_ranks=tuple(p.sampled_token_rank for p in message.positions),
    )


def engine_core_output_to_proto(output: EngineCoreOutput) -> core_pb2.EngineCoreOutput:
    message = core_pb2.EngineCoreOutput(
        request_id=output.request_id,
        new_token_ids=output.new_token_ids,
        attempt=output.attempt,
        first_token_index=output.first_token_index,
        num_nans_in_logits=output.num_nans_in_logits,
    )
    if output.finish_reason is not None:
        message.finish_reason = int(output.finish_reason)  # type: ignore[assignment]
    if isinstance(output.stop_reason, str):
        message.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        message.stop_token_id = output.stop_reason
    if output.prefill_stats is not None:
        message.prefill_stats.CopyFrom(to_proto(output.prefill_stats))
    if output.kv_transfer_stats is not None:
        message.kv_transfer_stats.CopyFrom(to_proto(output.kv_transfer_stats))
    if output.kv_lost is not None:
        message.kv_lost.CopyFrom(to_proto(output.kv_lost))
    if output.error is not None:
        message.error.CopyFrom(to_proto(output.error))
    if output.kv_transfer_params is not None:
        message.kv_transfer_params.CopyFrom(to_proto(output.kv_transfer_params))
    if output.new_logprobs is not None:
        message.new_logprobs.CopyFrom(logprobs_to_proto(output.new_logprobs))
    if output.new_prompt_logprobs is not None:
        message.new_prompt_logprobs.CopyFrom(logprobs_to_proto(output.new_prompt_logprobs))
    for event in output.events:
        message.events.add(type=int(event.type), monotonic_ns=seconds_to_ns(event.timestamp))
    if output.trace_headers:
        message.trace_headers.update(output.trace_headers)
    if output.pooling_output is not None:
        message.pooling_output.extend(output.pooling_output)
    message.routed_experts.extend(output.routed_experts)
    message.draft_stats.extend(map(to_proto, output.draft_stats))
    return message


def engine_core_output_from_proto(message: core_pb2.EngineCoreOutput) -> EngineCoreOutput:
    values: dict[str, Any] = {}
    if message.finish_reason:
        values["finish_reason"] = enum_from_proto(
            FinishReason, message.finish_reason, "finish_reason"
        )
    stop = message.WhichOneof("stop_reason")
    if stop is not None:
        values["stop_reason"] = getattr(message, stop)
    if message.HasField("prefill_stats"):
        values["prefill_stats"] = from_proto(PrefillStats, message.prefill_stats)
    if message.HasField("kv_transfer_stats"):
        values["kv_transfer_stats"] = from_proto(KVTransferStats, message.kv_transfer_stats)
    if message.HasField("kv_lost"):
        values["kv_lost"] = from_proto(KVLost, message.kv_lost)
    if message.HasField("error"):
        values["error"] = from_proto(EngineError, message.error)
    if message.HasField("kv_transfer_params"):
        values["kv_transfer_params"] = from_proto(KVTransferParams, message.kv_transfer_params)
    if message.HasField("new_logprobs"):
        values["new_logprobs"] = logprobs_from_proto(message.new_logprobs)
    if message.HasField("new_prompt_logprobs"):
        values["new_prompt_logprobs"] = logprobs_from_proto(message.new_prompt_logprobs)
    if message.events:
        values["events"] = tuple(
            EngineCoreEvent(
                enum_from_proto(EngineCoreEventType, event.type, "events.type"),
                event.monotonic_ns / 1e9,
            )
            for event in message.events
        )
    if message.trace_headers:
        values["trace_headers"] = dict(message.trace_headers)
    if message.pooling_output:
        values["pooling_output"] = tuple(message.pooling_output)
    if message.routed_experts:
        values["routed_experts"] = tuple(message.routed_experts)
    if message.draft_stats:
        values["draft_stats"] = tuple(from_proto(DraftStats, each) for each in message.draft_stats)
    return EngineCoreOutput(
        request_id=message.request_id,
        new_token_ids=tuple(message.new_token_ids),
        num_nans_in_logits=message.num_nans_in_logits,
        attempt=message.attempt,
        first_token_index=message.first_token_index,
        **values,
    )


def _has_only_tokens(output: EngineCoreOutput) -> bool:
    """Does it say no more than TokenColumns do? The rest is all other fields, those of the future
    among them.
    """
    return output == EngineCoreOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        new_token_ids=output.new_token_ids,
        first_token_index=output.first_token_index,
    )


def _add_outputs(
    message: core_pb2.EngineCoreOutputs,
    outputs: EngineCoreOutputs,
    handles: Mapping[tuple[str, int], int],
) -> None:
    """Add those of attempts with a handle that have only tokens as columns, which costs a tenth of
    what whole ones cost. Columns are read first: of a request with several outputs those behind a
    whole one are whole, too.
    """
    whole: set[str] = set()
    rows: list[int] = []
    token_ids: list[int] = []
    token_indexes: list[int] = []
    for output in outputs.outputs:
        handle = handles.get((output.request_id, output.attempt))
        if handle is None or output.request_id in whole or not _has_only_tokens(output):
            whole.add(output.request_id)
            message.outputs.append(engine_core_output_to_proto(output))
            continue
        for index, token_id in enumerate(output.new_token_ids, output.first_token_index):
            rows.append(handle)
            token_ids.append(token_id)
            token_indexes.append(index)
    if rows:
        columns = message.tokens
        columns.handles.extend(rows)
        columns.token_ids.extend(token_ids)
        columns.token_indexes.extend(token_indexes)


def engine_core_outputs_to_proto(
    outputs: EngineCoreOutputs,
    *,
    step_seq: int = 0,
    handles: Mapping[tuple[str, int], int] = MappingProxyType({}),
) -> core_pb2.EngineCoreOutputs:
    """`handles` are those that the receiver has given to attempts of requests."""
    message = core_pb2.EngineCoreOutputs(
        engine_index=outputs.engine_index,
        monotonic_ns=seconds_to_ns(outputs.timestamp),
        finished_requests=sorted(outputs.finished_requests),
        step_seq=step_seq,
    )
    _add_outputs(message, outputs, handles)
    if outputs.scheduler_stats is not None:
        message.scheduler_stats.CopyFrom(to_proto(outputs.scheduler_stats))
    if outputs.utility_output is not None:
        message.utility_output.CopyFrom(to_proto(outputs.utility_output))
    if outputs.wave_complete is not None:
        message.wave_complete = outputs.wave_complete
    if outputs.start_wave is not None:
        message.start_wave = outputs.start_wave
    if outputs.engine_dead is not None:
        message.engine_dead.CopyFrom(to_proto(outputs.engine_dead))
    return message


def engine_core_outputs_from_proto(message: core_pb2.EngineCoreOutputs) -> EngineCoreOutputs:
    """Return all but `tokens`, whose handles only the receiver knows."""
    return EngineCoreOutputs(
        engine_index=message.engine_index,
        outputs=tuple(engine_core_output_from_proto(output) for output in message.outputs),
        scheduler_stats=from_proto(SchedulerStats, message.scheduler_stats)
        if message.HasField("scheduler_stats")
        else None,
        timestamp=message.monotonic_ns / 1e9,
        utility_output=from_proto(UtilityOutput, message.utility_output)
        if message.HasField("utility_output")
        else None,
        finished_requests=frozenset(message.finished_requests),
        wave_complete=message.wave_complete if message.HasField("wave_complete") else None,
        start_wave=message.start_wave if message.HasField("start_wave") else None,
        engine_dead=from_proto(EngineError, message.engine_dead)
        if message.HasField("engine_dead")
        else None,
    )
