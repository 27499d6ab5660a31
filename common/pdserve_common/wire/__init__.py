"""The one place where dataclasses and protobuf meet: `x_to_proto` and `x_from_proto` for all that
crosses a network.

A peer's messages are checked for shape here (a oneof that must be set, an enum that must be
known): these raise InvalidRequestError naming the field. Values are checked in `validation.py`.
"""

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
    engine_error_from_proto,
    engine_error_to_proto,
    engine_info_from_proto,
    engine_info_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    scheduler_stats_from_proto,
    scheduler_stats_to_proto,
)
from pdserve_common.wire.request import (
    engine_core_request_from_proto,
    engine_core_request_to_proto,
)
from pdserve_common.wire.sampling import sampling_params_from_proto, sampling_params_to_proto

__all__ = [
    "engine_core_output_from_proto",
    "engine_core_output_to_proto",
    "engine_core_outputs_from_proto",
    "engine_core_outputs_to_proto",
    "engine_core_request_from_proto",
    "engine_core_request_to_proto",
    "engine_error_from_proto",
    "engine_error_to_proto",
    "engine_info_from_proto",
    "engine_info_to_proto",
    "kv_link_request_from_proto",
    "kv_link_request_to_proto",
    "kv_link_response_from_proto",
    "kv_link_response_to_proto",
    "logprobs_from_proto",
    "logprobs_to_proto",
    "sampling_params_from_proto",
    "sampling_params_to_proto",
    "scheduler_stats_from_proto",
    "scheduler_stats_to_proto",
]
