"""The KvLink's messages to and from protobuf."""

from dataclasses import replace
from typing import Any

from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common.errors import InvalidRequestError
from pdserve_common.types import kv as kv_types
from pdserve_common.wire.codec import from_proto, to_proto

# By their names in the oneofs of both directions.
_TYPES: dict[str, Any] = {
    "hello": kv_types.KVLinkHello,
    "cancel": kv_types.CancelRequest,
    "release": kv_types.Release,
    "granted": kv_types.Granted,
    "later": kv_types.Later,
    "revoke": kv_types.Revoke,
    "prefix_request": kv_types.PrefixRequest,
    "heartbeat": kv_types.KVLinkHeartbeat,
    "welcome": kv_types.KVLinkWelcome,
    "blocks_ready": kv_types.BlocksReady,
    "prefix_ready": kv_types.PrefixReady,
    "grant_request": kv_types.GrantRequest,
    "prefill_done": kv_types.PrefillDone,
    "release_ack": kv_types.ReleaseAck,
    "session_ended": kv_types.SessionEnded,
}
_NAMES = {cls: name for name, cls in _TYPES.items()}


def kv_link_request_to_proto(message: kv_types.KVLinkRequestMessage) -> kv_pb2.KvLinkRequest:
    """Decode to prefill."""
    return kv_pb2.KvLinkRequest(**{_NAMES[type(message)]: to_proto(message)})


def kv_link_request_from_proto(message: kv_pb2.KvLinkRequest) -> kv_types.KVLinkRequestMessage:
    """Decode to prefill. Raises InvalidRequestError on a message without content."""
    kind = message.WhichOneof("message")
    if kind is None:
        raise InvalidRequestError("KvLinkRequest has no message", field="message")
    request: kv_types.KVLinkRequestMessage = from_proto(_TYPES[kind], getattr(message, kind))
    return request


def kv_link_response_to_proto(message: kv_types.KVLinkResponseMessage) -> kv_pb2.KvLinkResponse:
    """Prefill to decode."""
    if isinstance(message, kv_types.BlocksReady):
        return kv_pb2.KvLinkResponse(blocks_ready=_blocks_ready_to_proto(message))
    if isinstance(message, kv_types.PrefixReady):
        return kv_pb2.KvLinkResponse(prefix_ready=_prefix_ready_to_proto(message))
    if isinstance(message, kv_types.KVLinkWelcome):
        return kv_pb2.KvLinkResponse(welcome=_welcome_to_proto(message))
    return kv_pb2.KvLinkResponse(**{_NAMES[type(message)]: to_proto(message)})


def kv_link_response_from_proto(message: kv_pb2.KvLinkResponse) -> kv_types.KVLinkResponseMessage:
    """Prefill to decode. Raises InvalidRequestError on a message without content."""
    kind = message.WhichOneof("message")
    if kind is None:
        raise InvalidRequestError("KvLinkResponse has no message", field="message")
    if kind == "blocks_ready":
        return _blocks_ready_from_proto(message.blocks_ready)
    if kind == "prefix_ready":
        return _prefix_ready_from_proto(message.prefix_ready)
    if kind == "welcome":
        return _welcome_from_proto(message.welcome)
    response: kv_types.KVLinkResponseMessage = from_proto(_TYPES[kind], getattr(message, kind))
    return response


def _welcome_to_proto(welcome: kv_types.KVLinkWelcome) -> kv_pb2.KvLinkWelcome:
    """An only rank's endpoint is where version 3 looks for it as well."""
    message: kv_pb2.KvLinkWelcome = to_proto(welcome)
    if len(message.ranks) == 1:
        (rank,) = message.ranks
        message.nixl_metadata = rank.nixl_metadata
        message.memory_type = rank.memory_type
        message.regions.extend(rank.regions)
    return message


def _welcome_from_proto(message: kv_pb2.KvLinkWelcome) -> kv_types.KVLinkWelcome:
    welcome = from_proto(kv_types.KVLinkWelcome, message)
    if welcome.protocol_version >= kv_types.RANKS_PROTOCOL_VERSION:
        return welcome
    rank = kv_types.KVRankEndpoint(
        memory_type=message.memory_type,
        regions=tuple(from_proto(kv_types.KVMemoryRegion, region) for region in message.regions),
        nixl_metadata=message.nixl_metadata,
    )
    return replace(welcome, endpoint=replace(welcome.endpoint, ranks=(rank,)))


def _blocks_ready_to_proto(ready: kv_types.BlocksReady) -> kv_pb2.BlocksReady:
    checksums = ready.checksums or ((),) * len(ready.block_ids)
    return kv_pb2.BlocksReady(
        session=to_proto(ready.session),
        first_block=ready.first_block,
        groups=[
            kv_pb2.BlockIds(block_ids=ids, checksums=sums)
            for ids, sums in zip(ready.block_ids, checksums, strict=True)
        ],
    )


def _blocks_ready_from_proto(message: kv_pb2.BlocksReady) -> kv_types.BlocksReady:
    checksums = tuple(tuple(group.checksums) for group in message.groups)
    return kv_types.BlocksReady(
        session=from_proto(kv_types.KVSessionId, message.session),
        first_block=message.first_block,
        block_ids=tuple(tuple(group.block_ids) for group in message.groups),
        checksums=checksums if any(checksums) else (),
    )


def _prefix_ready_to_proto(ready: kv_types.PrefixReady) -> kv_pb2.PrefixReady:
    return kv_pb2.PrefixReady(
        request_id=ready.request_id,
        attempt=ready.attempt,
        blocks=_blocks_ready_to_proto(ready.blocks),
    )


def _prefix_ready_from_proto(message: kv_pb2.PrefixReady) -> kv_types.PrefixReady:
    return kv_types.PrefixReady(
        request_id=message.request_id,
        attempt=message.attempt,
        blocks=_blocks_ready_from_proto(message.blocks),
    )
