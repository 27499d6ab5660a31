"""EngineCoreOutputs and EngineInfo to and from protobuf."""

from collections.abc import Callable
from typing import Any

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve_common.engine_types import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineError,
    EngineInfo,
    ErrorCode,
    ErrorFault,
    FinishReason,
    KVLost,
    KVTransferStats,
    LogprobsLists,
    PrefillStats,
    SchedulerStats,
    UtilityOutput,
    WorkerRole,
)
from pdserve_common.wire.convert import enum_from_proto, seconds_to_ns
from pdserve_common.wire.request import kv_transfer_params_from_proto, kv_transfer_params_to_proto


def engine_error_to_proto(error: EngineError) -> core_pb2.EngineError:
    message = core_pb2.EngineError(
        code=int(error.code),  # type: ignore[arg-type]
        message=error.message,
        retryable=error.is_retryable,
        fault=int(error.fault),  # type: ignore[arg-type]
    )
    if error.retry_after_ms is not None:
        message.retry_after_ms = error.retry_after_ms
    return message


def engine_error_from_proto(message: core_pb2.EngineError) -> EngineError:
    return EngineError(
        code=enum_from_proto(ErrorCode, message.code, "error.code"),
        message=message.message,
        is_retryable=message.retryable,
        retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
        fault=enum_from_proto(ErrorFault, message.fault, "error.fault"),
    )


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
        message.prefill_stats.CopyFrom(
            core_pb2.PrefillStats(
                num_prompt_tokens=output.prefill_stats.num_prompt_tokens,
                num_cached_tokens=output.prefill_stats.num_cached_tokens,
                queue_ns=seconds_to_ns(output.prefill_stats.queue_s),
                prefill_ns=seconds_to_ns(output.prefill_stats.prefill_s),
                decode_queue_ns=seconds_to_ns(output.prefill_stats.decode_queue_s),
            )
        )
    if output.kv_transfer_stats is not None:
        message.kv_transfer_stats.CopyFrom(_kv_stats_to_proto(output.kv_transfer_stats))
    if output.kv_lost is not None:
        message.kv_lost.CopyFrom(
            core_pb2.KvLost(
                num_confirmed_tokens=output.kv_lost.num_confirmed_tokens,
                reason=output.kv_lost.reason,
                message=output.kv_lost.message,
            )
        )
    if output.error is not None:
        message.error.CopyFrom(engine_error_to_proto(output.error))
    if output.kv_transfer_params is not None:
        message.kv_transfer_params.CopyFrom(kv_transfer_params_to_proto(output.kv_transfer_params))
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
        values["prefill_stats"] = PrefillStats(
            num_prompt_tokens=message.prefill_stats.num_prompt_tokens,
            num_cached_tokens=message.prefill_stats.num_cached_tokens,
            queue_s=message.prefill_stats.queue_ns / 1e9,
            prefill_s=message.prefill_stats.prefill_ns / 1e9,
            decode_queue_s=message.prefill_stats.decode_queue_ns / 1e9,
        )
    if message.HasField("kv_transfer_stats"):
        values["kv_transfer_stats"] = _kv_stats_from_proto(message.kv_transfer_stats)
    if message.HasField("kv_lost"):
        values["kv_lost"] = KVLost(
            num_confirmed_tokens=message.kv_lost.num_confirmed_tokens,
            reason=message.kv_lost.reason,
            message=message.kv_lost.message,
        )
    if message.HasField("error"):
        values["error"] = engine_error_from_proto(message.error)
    if message.HasField("kv_transfer_params"):
        values["kv_transfer_params"] = kv_transfer_params_from_proto(message.kv_transfer_params)
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
    return EngineCoreOutput(
        request_id=message.request_id,
        new_token_ids=tuple(message.new_token_ids),
        num_nans_in_logits=message.num_nans_in_logits,
        attempt=message.attempt,
        first_token_index=message.first_token_index,
        **values,
    )


_KV_STATS_TIMES = ("transfer", "exposed", "release_ack", "decode_admit", "first_decode_step")


def _kv_stats_to_proto(stats: KVTransferStats) -> core_pb2.KvTransferStats:
    times = {f"{name}_ns": seconds_to_ns(getattr(stats, f"{name}_s")) for name in _KV_STATS_TIMES}
    return core_pb2.KvTransferStats(
        num_bytes=stats.num_bytes,
        num_blocks=stats.num_blocks,
        num_reads=stats.num_reads,
        transport=stats.transport,
        **times,
    )


def _kv_stats_from_proto(message: core_pb2.KvTransferStats) -> KVTransferStats:
    return KVTransferStats(
        num_bytes=message.num_bytes,
        num_blocks=message.num_blocks,
        num_reads=message.num_reads,
        transport=message.transport,
        **{f"{name}_s": getattr(message, f"{name}_ns") / 1e9 for name in _KV_STATS_TIMES},
    )


_STATS_COUNTS = (
    "num_slots",
    "num_running_reqs",
    "num_waiting_reqs",
    "num_waiting_for_decode_reqs",
    "num_waiting_tokens",
    "num_total_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "num_open_kv_sessions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "num_common_prefix_blocks",
    "step_num_tokens",
)


def scheduler_stats_to_proto(stats: SchedulerStats) -> core_pb2.SchedulerStats:
    return core_pb2.SchedulerStats(
        step_duration_ns=seconds_to_ns(stats.step_duration_s),
        **{name: getattr(stats, name) for name in _STATS_COUNTS},
    )


def scheduler_stats_from_proto(message: core_pb2.SchedulerStats) -> SchedulerStats:
    return SchedulerStats(
        step_duration_s=message.step_duration_ns / 1e9,
        **{name: getattr(message, name) for name in _STATS_COUNTS},
    )


def engine_core_outputs_to_proto(
    outputs: EngineCoreOutputs, *, step_seq: int = 0
) -> core_pb2.EngineCoreOutputs:
    message = core_pb2.EngineCoreOutputs(
        engine_index=outputs.engine_index,
        outputs=[engine_core_output_to_proto(output) for output in outputs.outputs],
        monotonic_ns=seconds_to_ns(outputs.timestamp),
        finished_requests=sorted(outputs.finished_requests),
        step_seq=step_seq,
    )
    if outputs.scheduler_stats is not None:
        message.scheduler_stats.CopyFrom(scheduler_stats_to_proto(outputs.scheduler_stats))
    if outputs.utility_output is not None:
        message.utility_output.call_id = outputs.utility_output.call_id
        if outputs.utility_output.failure_message is not None:
            message.utility_output.failure_message = outputs.utility_output.failure_message
        if outputs.utility_output.result is not None:
            message.utility_output.result = outputs.utility_output.result
    if outputs.wave_complete is not None:
        message.wave_complete = outputs.wave_complete
    if outputs.start_wave is not None:
        message.start_wave = outputs.start_wave
    if outputs.engine_dead is not None:
        message.engine_dead.CopyFrom(engine_error_to_proto(outputs.engine_dead))
    return message


def engine_core_outputs_from_proto(message: core_pb2.EngineCoreOutputs) -> EngineCoreOutputs:
    utility = None
    if message.HasField("utility_output"):
        raw = message.utility_output
        utility = UtilityOutput(
            call_id=raw.call_id,
            failure_message=raw.failure_message if raw.HasField("failure_message") else None,
            result=raw.result if raw.HasField("result") else None,
        )
    return EngineCoreOutputs(
        engine_index=message.engine_index,
        outputs=tuple(engine_core_output_from_proto(output) for output in message.outputs),
        scheduler_stats=scheduler_stats_from_proto(message.scheduler_stats)
        if message.HasField("scheduler_stats")
        else None,
        timestamp=message.monotonic_ns / 1e9,
        utility_output=utility,
        finished_requests=frozenset(message.finished_requests),
        wave_complete=message.wave_complete if message.HasField("wave_complete") else None,
        start_wave=message.start_wave if message.HasField("start_wave") else None,
        engine_dead=engine_error_from_proto(message.engine_dead)
        if message.HasField("engine_dead")
        else None,
    )


_INFO_FIELDS = (
    "engine_id",
    "epoch",
    "model",
    "max_model_len",
    "vocab_size",
    "eos_token_ids",
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "dtype",
    "kv_compatibility_hash",
    "kv_transport",
    "determinism",
    "numerics_id",
    "version",
    "logits_processors",
    "kernels",
    "has_prefix_caching",
    "tokenizer_digest",
    "weights_digest",
    "started_at_ms",
)


def engine_info_to_proto(info: EngineInfo) -> service_pb2.EngineInfo:
    values = {name: getattr(info, name) for name in _INFO_FIELDS}
    return service_pb2.EngineInfo(role=int(info.role), **values)  # type: ignore[arg-type]


def engine_info_from_proto(message: service_pb2.EngineInfo) -> EngineInfo:
    values = {name: getattr(message, name) for name in _INFO_FIELDS}
    for name in ("eos_token_ids", "logits_processors"):
        values[name] = tuple(values[name])
    return EngineInfo(role=enum_from_proto(WorkerRole, message.role, "info.role"), **values)
