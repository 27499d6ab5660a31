"""EngineCoreRequest to and from protobuf. Ages and remaining times replace absolute times."""

import time
from typing import Any

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve_common.engine_types import (
    EngineCoreRequest,
    KVTransferParams,
    LoRARequest,
    MultiModalFeatureSpec,
    PoolingParams,
    TensorRef,
)
from pdserve_common.errors import InvalidRequestError
from pdserve_common.wire.convert import seconds_to_ns
from pdserve_common.wire.sampling import sampling_params_from_proto, sampling_params_to_proto


def kv_transfer_params_to_proto(params: KVTransferParams) -> core_pb2.KvTransferParams:
    return core_pb2.KvTransferParams(
        do_remote_decode=params.do_remote_decode,
        do_remote_prefill=params.do_remote_prefill,
        remote_engine_id=params.remote_engine_id,
        remote_host=params.remote_host,
        remote_port=params.remote_port,
    )


def kv_transfer_params_from_proto(message: core_pb2.KvTransferParams) -> KVTransferParams:
    return KVTransferParams(
        do_remote_decode=message.do_remote_decode,
        do_remote_prefill=message.do_remote_prefill,
        remote_engine_id=message.remote_engine_id,
        remote_host=message.remote_host,
        remote_port=message.remote_port,
    )


def _tensor_ref_to_proto(ref: TensorRef) -> core_pb2.TensorRef:
    return core_pb2.TensorRef(content_hash=ref.content_hash, dtype=ref.dtype, shape=ref.shape)


def _tensor_ref_from_proto(message: core_pb2.TensorRef) -> TensorRef:
    return TensorRef(
        content_hash=message.content_hash, dtype=message.dtype, shape=tuple(message.shape)
    )


def engine_core_request_to_proto(request: EngineCoreRequest) -> core_pb2.EngineCoreRequest:
    now = time.monotonic()
    message = core_pb2.EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        age_ns=seconds_to_ns(now - request.arrival_time),
        prompt_is_token_ids=request.prompt_is_token_ids,
        client_index=request.client_index,
        current_wave=request.current_wave,
        priority=request.priority,
        trace_headers=request.trace_headers,
        resumable=request.resumable,
        attempt=request.attempt,
        resume_output_token_ids=request.resume_output_token_ids,
    )
    for name in (
        "eos_token_id",
        "cache_salt",
        "data_parallel_rank",
        "external_req_id",
        "reasoning_ended",
        "fork_of",
    ):
        value = getattr(request, name)
        if value is not None:
            setattr(message, name, value)
    if request.sampling_params is not None:
        message.sampling_params.CopyFrom(sampling_params_to_proto(request.sampling_params))
    if request.pooling_params is not None:
        message.pooling_params.task = request.pooling_params.task
        if request.pooling_params.dimensions is not None:
            message.pooling_params.dimensions = request.pooling_params.dimensions
        if request.pooling_params.normalize is not None:
            message.pooling_params.normalize = request.pooling_params.normalize
    for feature in request.mm_features:
        added = message.mm_features.add(
            modality=feature.modality,
            identifier=feature.identifier,
            position=feature.position,
            length=feature.length,
        )
        if feature.data is not None:
            added.data.CopyFrom(_tensor_ref_to_proto(feature.data))
    if request.lora_request is not None:
        message.lora_request.lora_name = request.lora_request.lora_name
        message.lora_request.lora_int_id = request.lora_request.lora_int_id
        message.lora_request.lora_path = request.lora_request.lora_path
    if request.prompt_embeds is not None:
        message.prompt_embeds.CopyFrom(_tensor_ref_to_proto(request.prompt_embeds))
    for name, value in request.reasoning_parser_kwargs.items():
        message.reasoning_parser_kwargs.add(name=name, value=value)
    if request.kv_transfer_params is not None:
        message.kv_transfer_params.CopyFrom(kv_transfer_params_to_proto(request.kv_transfer_params))
    if request.deadline is not None:
        message.timeout_ns = seconds_to_ns(request.deadline - now)
    return message


def engine_core_request_from_proto(message: core_pb2.EngineCoreRequest) -> EngineCoreRequest:
    now = time.monotonic()
    values: dict[str, Any] = {}
    for name in (
        "eos_token_id",
        "cache_salt",
        "data_parallel_rank",
        "external_req_id",
        "reasoning_ended",
        "fork_of",
    ):
        if message.HasField(name):
            values[name] = getattr(message, name)
    params = message.WhichOneof("params")
    if params is None:
        raise InvalidRequestError(
            "request has neither sampling_params nor pooling_params", field="params"
        )
    if params == "sampling_params":
        values["sampling_params"] = sampling_params_from_proto(message.sampling_params)
    else:
        pooling = message.pooling_params
        values["pooling_params"] = PoolingParams(
            task=pooling.task,
            dimensions=pooling.dimensions if pooling.HasField("dimensions") else None,
            normalize=pooling.normalize if pooling.HasField("normalize") else None,
        )
    if message.HasField("lora_request"):
        values["lora_request"] = LoRARequest(
            lora_name=message.lora_request.lora_name,
            lora_int_id=message.lora_request.lora_int_id,
            lora_path=message.lora_request.lora_path,
        )
    if message.HasField("prompt_embeds"):
        values["prompt_embeds"] = _tensor_ref_from_proto(message.prompt_embeds)
    if message.HasField("kv_transfer_params"):
        values["kv_transfer_params"] = kv_transfer_params_from_proto(message.kv_transfer_params)
    if message.HasField("timeout_ns"):
        values["deadline"] = now + message.timeout_ns / 1e9
    return EngineCoreRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        mm_features=tuple(
            MultiModalFeatureSpec(
                modality=feature.modality,
                identifier=feature.identifier,
                position=feature.position,
                length=feature.length,
                data=_tensor_ref_from_proto(feature.data) if feature.HasField("data") else None,
            )
            for feature in message.mm_features
        ),
        arrival_time=now - message.age_ns / 1e9,
        prompt_is_token_ids=tuple(message.prompt_is_token_ids),
        client_index=message.client_index,
        current_wave=message.current_wave,
        priority=message.priority,
        trace_headers=dict(message.trace_headers),
        resumable=message.resumable,
        reasoning_parser_kwargs={kw.name: kw.value for kw in message.reasoning_parser_kwargs},
        attempt=message.attempt,
        resume_output_token_ids=tuple(message.resume_output_token_ids),
        **values,
    )
