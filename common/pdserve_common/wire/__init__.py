"""The one place where dataclasses and protobuf meet: `to_proto` and `from_proto` for all that
crosses a network, but for what each token pays for, and for the KvLink's oneofs.

A peer's messages are checked for shape here (a oneof that must be set, an enum that must be
known): these raise InvalidRequestError naming the field. Values are checked in `validation.py`.
"""

from pdserve_common.wire.codec import from_proto, to_proto, verb_result_to_proto
from pdserve_common.wire.convert import enum_from_proto
from pdserve_common.wire.kv_link import (
    kv_link_request_from_proto,
    kv_link_request_to_proto,
    kv_link_response_from_proto,
    kv_link_response_to_proto,
)
from pdserve_common.wire.output import (
    engine_core_output_from_proto,
    engine_core_output_to_proto,
    engine_core_outputs_from_proto,
    engine_core_outputs_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
)

__all__ = [
    "engine_core_output_from_proto",
    "engine_core_output_to_proto",
    "engine_core_outputs_from_proto",
    "engine_core_outputs_to_proto",
    "enum_from_proto",
    "from_proto",
    "kv_link_request_from_proto",
    "kv_link_request_to_proto",
    "kv_link_response_from_proto",
    "kv_link_response_to_proto",
    "logprobs_from_proto",
    "logprobs_to_proto",
    "to_proto",
    "verb_result_to_proto",
]
