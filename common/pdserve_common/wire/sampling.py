"""SamplingParams to and from protobuf."""

from typing import Any

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve_common.engine_types import (
    EarlyStopping,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from pdserve_common.errors import InvalidRequestError
from pdserve_common.wire.convert import enum_from_proto

# Fields that are `optional` in the proto and None or a default in the dataclass.
_OPTIONAL_SAMPLING_FIELDS = (
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "length_penalty",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_PLAIN_SAMPLING_FIELDS = (
    "use_beam_search",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
)
_REPEATED_SAMPLING_FIELDS = (
    "stop",
    "stop_token_ids",
    "logits_processors",
    "bad_words",
    "allowed_token_ids",
)


def sampling_params_to_proto(params: SamplingParams) -> core_pb2.SamplingParams:
    message = core_pb2.SamplingParams(early_stopping=int(params.early_stopping))  # type: ignore[arg-type]
    message.output_kind = int(params.output_kind)  # type: ignore[assignment]
    for name in _OPTIONAL_SAMPLING_FIELDS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    for name in _PLAIN_SAMPLING_FIELDS:
        setattr(message, name, getattr(params, name))
    for name in _REPEATED_SAMPLING_FIELDS:
        getattr(message, name).extend(getattr(params, name))
    for token_ids in params.bad_words_token_ids:
        message.bad_words_token_ids.add(token_ids=token_ids)
    message.logit_bias.update(params.logit_bias)
    if params.structured_outputs is not None:
        message.structured_outputs.CopyFrom(_structured_to_proto(params.structured_outputs))
    if params.repetition_detection is not None:
        message.repetition_detection.max_pattern_size = params.repetition_detection.max_pattern_size
        message.repetition_detection.min_pattern_size = params.repetition_detection.min_pattern_size
        message.repetition_detection.min_count = params.repetition_detection.min_count
    return message


def sampling_params_from_proto(message: core_pb2.SamplingParams) -> SamplingParams:
    values: dict[str, Any] = {}
    for name in _OPTIONAL_SAMPLING_FIELDS:
        if message.HasField(name):
            values[name] = getattr(message, name)
    for name in _PLAIN_SAMPLING_FIELDS:
        values[name] = getattr(message, name)
    for name in _REPEATED_SAMPLING_FIELDS:
        values[name] = tuple(getattr(message, name))
    values["bad_words_token_ids"] = tuple(
        tuple(sequence.token_ids) for sequence in message.bad_words_token_ids
    )
    values["logit_bias"] = dict(message.logit_bias)
    if message.early_stopping:
        values["early_stopping"] = enum_from_proto(
            EarlyStopping, message.early_stopping, "sampling_params.early_stopping"
        )
    if message.output_kind:
        values["output_kind"] = enum_from_proto(
            RequestOutputKind, message.output_kind, "sampling_params.output_kind"
        )
    if message.HasField("structured_outputs"):
        values["structured_outputs"] = _structured_from_proto(message.structured_outputs)
    if message.HasField("repetition_detection"):
        detection = message.repetition_detection
        values["repetition_detection"] = RepetitionDetectionParams(
            max_pattern_size=detection.max_pattern_size,
            min_pattern_size=detection.min_pattern_size
            if detection.HasField("min_pattern_size")
            else 1,
            min_count=detection.min_count if detection.HasField("min_count") else 2,
        )
    return SamplingParams(**values)


def _structured_to_proto(params: StructuredOutputsParams) -> core_pb2.StructuredOutputsParams:
    message = core_pb2.StructuredOutputsParams()
    if params.choice:
        message.choice.choices.extend(params.choice)
    for name in ("json_schema", "regex", "grammar"):
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    return message


def _structured_from_proto(message: core_pb2.StructuredOutputsParams) -> StructuredOutputsParams:
    kind = message.WhichOneof("constraint")
    if kind is None:
        raise InvalidRequestError(
            "structured_outputs is empty, set one of json_schema, regex, choice, grammar",
            field="structured_outputs",
        )
    if kind == "choice":
        return StructuredOutputsParams(choice=tuple(message.choice.choices))
    return StructuredOutputsParams(**{kind: getattr(message, kind)})
