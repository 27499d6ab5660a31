"""Dataclasses to protobuf messages and back, by their type hints and the messages' descriptors.

A dataclass crosses as the message of its name (`KVLayout` as `KvLayout`, the verb `Pause` as
`PauseRequest`), its field as the field of its name; seconds (`queue_s`) are nanoseconds there
(`queue_ns`). None is unset. What is unset, or an enum of 0 that has no member 0, takes the
dataclass's default. `_DIFFERENT` has the fields that differ in more than that.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import IntEnum
from functools import partial
from itertools import chain
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common.errors import InvalidRequestError
from pdserve_common.processes.calls import Call, ResultT
from pdserve_common.types import engine as engine_types
from pdserve_common.types import kv as kv_types
from pdserve_common.types import lora as lora_types
from pdserve_common.types import sampling_params
from pdserve_common.types.pooling_params import GENERATE
from pdserve_common.types.verbs import VERBS
from pdserve_common.wire.convert import enum_from_proto, ns_to_seconds, seconds_to_ns

T = TypeVar("T")
# None: as it is.
Convert = Callable[[Any], Any] | None

# Converted by hand in `output.py`, as each token pays for it, and in `kv_link.py`; and those whose
# fields stand among the ones of what holds them.
_NOT_HERE = (
    engine_types.LogprobsLists,
    engine_types.EngineCoreEvent,
    engine_types.EngineCoreOutput,
    engine_types.EngineCoreOutputs,
    kv_types.BlocksReady,
    kv_types.PrefixReady,
    kv_types.KVEndpoint,
    kv_types.KVShard,
)
_MESSAGES = {
    name.lower(): GetMessageClass(descriptor)
    for module in (core_pb2, service_pb2, kv_pb2, control_pb2)
    for name, descriptor in module.DESCRIPTOR.message_types_by_name.items()
}
# Where an enum stands, for the error that names it.
_PATHS: Mapping[type, str] = {
    sampling_params.SamplingParams: "sampling_params.",
    engine_types.EngineError: "error.",
    engine_types.EngineInfo: "info.",
    kv_types.KVGroup: "layout.groups.",
}
# A oneof that must be set: its name, the field that the error names, and its text.
_REQUIRED: Mapping[type, tuple[str, str, str]] = {
    sampling_params.StructuredOutputsParams: (
        "constraint",
        "structured_outputs",
        "structured_outputs is empty, set one of json_schema, regex, choice, grammar, json_object, "
        "structural_tag",
    ),
    engine_types.EngineCoreRequest: (
        "params",
        "params",
        "request has neither sampling_params nor pooling_params",
    ),
}


def _end_reason_from_proto(value: int) -> kv_types.SessionEndReason:
    try:
        return kv_types.SessionEndReason(value)
    except ValueError:
        # A loss, like any without a name: it must not take the link with it.
        return kv_types.SessionEndReason.UNSPECIFIED


def _kwargs_from_proto(
    messages: Sequence[core_pb2.EngineCoreRequest.ReasoningParserKwarg],
) -> dict[str, str]:
    kwargs = {message.name: message.value for message in messages}
    if len(kwargs) < len(messages):
        field = "reasoning_parser_kwargs"
        raise InvalidRequestError(f"{field} has a name more than once", field=field)
    return kwargs


# The field's name in the message, and its conversions.
_DIFFERENT: Mapping[tuple[type, str], tuple[str, Convert, Convert]] = {
    (engine_types.EngineError, "is_retryable"): ("retryable", None, None),
    (sampling_params.StructuredOutputsParams, "choice"): (
        "choice",
        lambda choice: core_pb2.StructuredOutputsParams.Choice(choices=choice) if choice else None,
        lambda message: tuple(message.choices),
    ),
    # False is nothing, and would take the place of another constraint.
    (sampling_params.StructuredOutputsParams, "json_object"): (
        "json_object",
        lambda is_wanted: is_wanted or None,
        None,
    ),
    (sampling_params.SamplingParams, "bad_words_token_ids"): (
        "bad_words_token_ids",
        lambda words: [core_pb2.TokenSequence(token_ids=token_ids) for token_ids in words],
        lambda messages: tuple(tuple(message.token_ids) for message in messages),
    ),
    # Points in time of this process: another one gets ages and remaining times.
    (engine_types.EngineCoreRequest, "arrival_time"): (
        "age_ns",
        lambda at: seconds_to_ns(time.monotonic() - at),
        lambda age_ns: time.monotonic() - age_ns / 1e9,
    ),
    (engine_types.EngineCoreRequest, "deadline"): (
        "timeout_ns",
        lambda at: seconds_to_ns(at - time.monotonic()),
        lambda timeout_ns: time.monotonic() + timeout_ns / 1e9,
    ),
    (engine_types.EngineCoreRequest, "reasoning_parser_kwargs"): (
        "reasoning_parser_kwargs",
        lambda kwargs: [
            core_pb2.EngineCoreRequest.ReasoningParserKwarg(name=name, value=value)
            for name, value in kwargs.items()
        ],
        _kwargs_from_proto,
    ),
    (kv_types.SessionEnded, "reason"): ("reason", None, _end_reason_from_proto),
    # Workers that know of no tasks generate.
    (engine_types.EngineInfo, "tasks"): ("tasks", None, lambda tasks: tuple(tasks) or (GENERATE,)),
}


def to_proto(value: Any) -> Any:
    """Return the message of a dataclass. Raises TypeError or ValueError if a value does not fit
    into its field.
    """
    return _CODECS[type(value)].to_proto(value)


def from_proto(cls: type[T], message: Message) -> T:
    """Return the dataclass of a message. Raises InvalidRequestError naming the field if an enum is
    unknown, or if nothing is set where something must be.
    """
    value: T = _CODECS[cls].from_proto(message)
    return value


def verb_result_to_proto(verb: type[Call[ResultT]], result: ResultT) -> Message:
    """Return the response to a verb, with its result in the only field; without one for None."""
    message_class = _MESSAGES[f"{verb.__name__}Response".lower()]
    if result is None:
        return message_class()
    (name,) = message_class.DESCRIPTOR.fields_by_name
    encode, _ = _converters(verb.result_type(), name)
    return message_class(**{name: result if encode is None else encode(result)})


class Codec:
    """Both directions of one dataclass."""

    def __init__(self, cls: type, message_class: type[Message]) -> None:
        self._cls = cls
        self._message_class = message_class
        self._required = _REQUIRED.get(cls)
        # By field: its name in the dataclass and in the message, and whether that knows it unset.
        self._fields: list[tuple[str, str, Convert, bool]] = []
        # Read if they are set; otherwise they have the dataclass's default, or None.
        self._if_set: dict[str, tuple[str, Convert]] = {}
        self._none: dict[str, None] = {}
        # Read in any case.
        self._always: list[tuple[str, str, Convert]] = []
        # One of several classes: by each the field of a oneof that it is, and the way there.
        self._kinds: dict[str, dict[type, tuple[str, Convert]]] = {}
        # Dataclasses whose fields stand among the message's own. None leaves them unset.
        self._flat: list[tuple[str, Codec]] = []
        hints = get_type_hints(cls)
        for field in fields(cls):
            self._add(field, hints[field.name])

    def _add(self, field: "Field[Any]", hint: Any) -> None:
        name, by_name = field.name, self._message_class.DESCRIPTOR.fields_by_name
        is_optional = NoneType in get_args(hint)
        if is_optional:
            (hint,) = set(get_args(hint)) - {NoneType}
        if get_origin(hint) is UnionType:
            self._kinds[name] = dict(self._add_kind(name, kind) for kind in get_args(hint))
            return
        key = name
        if (self._cls, name) in _DIFFERENT:
            key, encode, decode = _DIFFERENT[self._cls, name]
        elif name in by_name:
            encode, decode = _converters(hint, f"{_PATHS.get(self._cls, '')}{name}")
        elif hint is float and name.endswith("_s"):
            key, encode, decode = f"{name[:-2]}_ns", seconds_to_ns, ns_to_seconds
        elif isinstance(hint, type) and is_dataclass(hint):
            self._flat.append((name, Codec(hint, self._message_class)))
            return
        if key not in by_name:
            raise TypeError(f"{self._cls.__name__}.{name} has no field in the message")
        has_presence = by_name[key].has_presence
        self._fields.append((name, key, encode, has_presence))
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if is_optional or _is_left_out(default, has_presence=has_presence):
            self._if_set[key] = (name, decode)
            if default is MISSING:
                self._none[name] = None
        else:
            self._always.append((name, key, decode))

    def _add_kind(self, name: str, kind: type) -> tuple[type, tuple[str, Convert]]:
        """A class whose only field has the name of one in the oneof."""
        ((key, hint),) = get_type_hints(kind).items()
        encode, decode = _converters(hint, key)
        self._if_set[key] = name, lambda message: kind(decode(message) if decode else message)
        return kind, (key, encode)

    def values(self, value: Any) -> dict[str, Any]:
        """The message's fields, but for those that are zero or empty anyway."""
        values = {}
        for name, key, encode, has_presence in self._fields:
            field = getattr(value, name)
            if field is None and not has_presence:
                raise TypeError(f"{self._cls.__name__}.{name} is None")
            if field is not None and encode is not None:
                field = encode(field)
            if field or (has_presence and field is not None):
                values[key] = field
        for name, kinds in self._kinds.items():
            kind = getattr(value, name)
            key, encode = kinds[type(kind)]
            field = getattr(kind, key)
            values[key] = field if encode is None else encode(field)
        for name, codec in self._flat:
            part = getattr(value, name)
            values |= {} if part is None else codec.values(part)
        return values

    def to_proto(self, value: Any) -> Message:
        return self._message_class(**self.values(value))

    def from_proto(self, message: Message) -> Any:
        if self._required is not None and message.WhichOneof(self._required[0]) is None:
            raise InvalidRequestError(self._required[2], field=self._required[1])
        values: dict[str, Any] = dict(self._none)
        for name, key, decode in self._always:
            value = getattr(message, key)
            values[name] = value if decode is None else decode(value)
        if self._if_set:
            for descriptor, value in message.ListFields():
                known = self._if_set.get(descriptor.name)
                if known is not None:
                    name, decode = known
                    values[name] = value if decode is None else decode(value)
        for name, codec in self._flat:
            values[name] = codec.from_proto(message)
        return self._cls(**values)


def _converters(hint: Any, path: str) -> tuple[Convert, Convert]:
    """To and from protobuf; `path` names the field in errors."""
    if hint in (int, float, bool, str, bytes):
        return None, None
    if hint in _CODECS:
        return _CODECS[hint].to_proto, _CODECS[hint].from_proto
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return None, partial(enum_from_proto, hint, field=path)
    if get_origin(hint) is Mapping:
        return None, dict
    if get_origin(hint) is tuple:
        encode, decode = _converters(get_args(hint)[0], path)
        return _each(encode, list), tuple if decode is None else _each(decode, tuple)
    raise TypeError(f"{path} is a {hint}: no conversion is known")


def _each(convert: Convert, into: type[list[Any]] | type[tuple[Any, ...]]) -> Convert:
    return None if convert is None else lambda values: into(map(convert, values))


def _is_left_out(default: Any, *, has_presence: bool) -> bool:
    """The dataclass's default is right for a field that is unset."""
    if default is MISSING:
        return False
    is_of_no_zero = isinstance(default, IntEnum) and 0 not in list(type(default))
    return has_presence or is_of_no_zero or not default


_CODECS: dict[type, Codec] = {}
# In the order of their definition: what a dataclass holds comes before it.
for _cls in chain.from_iterable(
    vars(module).values() for module in (sampling_params, lora_types, engine_types, kv_types)
):
    if isinstance(_cls, type) and is_dataclass(_cls) and _cls not in _NOT_HERE:
        _CODECS[_cls] = Codec(_cls, _MESSAGES[_cls.__name__.lower()])
for _verb in VERBS:
    _CODECS[_verb] = Codec(_verb, _MESSAGES[f"{_verb.__name__}Request".lower()])
