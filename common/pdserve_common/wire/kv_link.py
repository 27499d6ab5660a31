"""The KvLink's messages to and from protobuf."""

from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common.errors import InvalidRequestError
from pdserve_common.kv_types import (
    BlocksReady,
    CancelRequest,
    Granted,
    GrantRequest,
    KVEndpoint,
    KVGroup,
    KVGroupKind,
    KVLayout,
    KVLinkHeartbeat,
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
    KVMemoryRegion,
    KVSessionId,
    Later,
    PrefillDone,
    Release,
    ReleaseAck,
    Revoke,
    SessionEnded,
    SessionEndReason,
)
from pdserve_common.wire.convert import enum_from_proto, seconds_to_ns


def kv_link_request_to_proto(message: KVLinkRequestMessage) -> kv_pb2.KvLinkRequest:
    """D to P."""
    if isinstance(message, KVLinkHello):
        hello = kv_pb2.KvLinkHello(
            min_protocol_version=message.min_protocol_version,
            max_protocol_version=message.max_protocol_version,
            engine_id=message.engine_id,
            epoch=message.epoch,
            compatibility_hash=message.compatibility_hash,
            layout=_layout_to_proto(message.layout),
            connector=message.connector,
        )
        return kv_pb2.KvLinkRequest(hello=hello)
    if isinstance(message, CancelRequest):
        cancel = kv_pb2.CancelRequest(
            request_id=message.request_id, attempt=message.attempt, reason=message.reason
        )
        return kv_pb2.KvLinkRequest(cancel=cancel)
    if isinstance(message, Release):
        release = kv_pb2.Release(
            session=_session_to_proto(message.session), through_block=message.through_block
        )
        return kv_pb2.KvLinkRequest(release=release)
    if isinstance(message, Granted):
        granted = kv_pb2.Granted(
            session=_session_to_proto(message.session), first_block=message.first_block
        )
        return kv_pb2.KvLinkRequest(granted=granted)
    if isinstance(message, Later):
        later = kv_pb2.Later(session=_session_to_proto(message.session))
        return kv_pb2.KvLinkRequest(later=later)
    if isinstance(message, Revoke):
        revoke = kv_pb2.Revoke(session=_session_to_proto(message.session))
        return kv_pb2.KvLinkRequest(revoke=revoke)
    return kv_pb2.KvLinkRequest(heartbeat=kv_pb2.KvLinkHeartbeat(step_seq=message.step_seq))


def kv_link_request_from_proto(message: kv_pb2.KvLinkRequest) -> KVLinkRequestMessage:
    """D to P. Raises InvalidRequestError on a message without content."""
    kind = message.WhichOneof("message")
    if kind == "hello":
        return KVLinkHello(
            min_protocol_version=message.hello.min_protocol_version,
            max_protocol_version=message.hello.max_protocol_version,
            engine_id=message.hello.engine_id,
            epoch=message.hello.epoch,
            compatibility_hash=message.hello.compatibility_hash,
            layout=_layout_from_proto(message.hello.layout),
            connector=message.hello.connector,
        )
    if kind == "cancel":
        return CancelRequest(
            request_id=message.cancel.request_id,
            attempt=message.cancel.attempt,
            reason=message.cancel.reason,
        )
    if kind == "release":
        return Release(
            session=_session_from_proto(message.release.session),
            through_block=message.release.through_block,
        )
    if kind == "granted":
        return Granted(
            session=_session_from_proto(message.granted.session),
            first_block=message.granted.first_block,
        )
    if kind == "later":
        return Later(session=_session_from_proto(message.later.session))
    if kind == "revoke":
        return Revoke(session=_session_from_proto(message.revoke.session))
    if kind == "heartbeat":
        return KVLinkHeartbeat(step_seq=message.heartbeat.step_seq)
    raise InvalidRequestError("KvLinkRequest has no message", field="message")


def kv_link_response_to_proto(message: KVLinkResponseMessage) -> kv_pb2.KvLinkResponse:
    """P to D."""
    if isinstance(message, KVLinkWelcome):
        return kv_pb2.KvLinkResponse(welcome=_welcome_to_proto(message))
    if isinstance(message, GrantRequest):
        grant = kv_pb2.GrantRequest(
            session=_session_to_proto(message.session),
            request_id=message.request_id,
            attempt=message.attempt,
            num_tokens=message.num_tokens,
        )
        return kv_pb2.KvLinkResponse(grant_request=grant)
    if isinstance(message, BlocksReady):
        ready = kv_pb2.BlocksReady(
            session=_session_to_proto(message.session),
            first_block=message.first_block,
            groups=_block_ids_to_proto(message),
        )
        return kv_pb2.KvLinkResponse(blocks_ready=ready)
    if isinstance(message, PrefillDone):
        done = kv_pb2.PrefillDone(
            session=_session_to_proto(message.session),
            num_tokens=message.num_tokens,
            output_token_ids=message.output_token_ids,
            timeout_ns=seconds_to_ns(message.timeout_s),
        )
        return kv_pb2.KvLinkResponse(prefill_done=done)
    if isinstance(message, ReleaseAck):
        ack = kv_pb2.ReleaseAck(
            session=_session_to_proto(message.session),
            through_block=message.through_block,
            valid=message.valid,
        )
        return kv_pb2.KvLinkResponse(release_ack=ack)
    if isinstance(message, SessionEnded):
        ended = kv_pb2.SessionEnded(
            session=_session_to_proto(message.session) if message.session else None,
            request_id=message.request_id,
            attempt=message.attempt,
            message=message.message,
            reason=int(message.reason),  # type: ignore[arg-type]
        )
        return kv_pb2.KvLinkResponse(session_ended=ended)
    return kv_pb2.KvLinkResponse(heartbeat=kv_pb2.KvLinkHeartbeat(step_seq=message.step_seq))


def kv_link_response_from_proto(message: kv_pb2.KvLinkResponse) -> KVLinkResponseMessage:
    """P to D. Raises InvalidRequestError on a message without content."""
    kind = message.WhichOneof("message")
    if kind == "welcome":
        return _welcome_from_proto(message.welcome)
    if kind == "blocks_ready":
        ready = message.blocks_ready
        return BlocksReady(
            session=_session_from_proto(ready.session),
            first_block=ready.first_block,
            block_ids=tuple(tuple(group.block_ids) for group in ready.groups),
            checksums=_checksums_from_proto(ready),
        )
    if kind == "grant_request":
        grant = message.grant_request
        return GrantRequest(
            session=_session_from_proto(grant.session),
            request_id=grant.request_id,
            attempt=grant.attempt,
            num_tokens=grant.num_tokens,
        )
    if kind == "prefill_done":
        done = message.prefill_done
        return PrefillDone(
            session=_session_from_proto(done.session),
            num_tokens=done.num_tokens,
            output_token_ids=tuple(done.output_token_ids),
            timeout_s=done.timeout_ns / 1e9,
        )
    if kind == "release_ack":
        ack = message.release_ack
        return ReleaseAck(
            session=_session_from_proto(ack.session),
            through_block=ack.through_block,
            valid=ack.valid,
        )
    if kind == "session_ended":
        ended = message.session_ended
        return SessionEnded(
            session=_session_from_proto(ended.session) if ended.HasField("session") else None,
            request_id=ended.request_id,
            attempt=ended.attempt,
            reason=_end_reason_from_proto(ended.reason),
            message=ended.message,
        )
    if kind == "heartbeat":
        return KVLinkHeartbeat(step_seq=message.heartbeat.step_seq)
    raise InvalidRequestError("KvLinkResponse has no message", field="message")


def _end_reason_from_proto(value: int) -> SessionEndReason:
    try:
        return SessionEndReason(value)
    except ValueError:
        # A loss, like any without a name: it must not take the link with it.
        return SessionEndReason.UNSPECIFIED


def _block_ids_to_proto(message: BlocksReady) -> list[kv_pb2.BlockIds]:
    checksums = message.checksums or ((),) * len(message.block_ids)
    return [
        kv_pb2.BlockIds(block_ids=ids, checksums=sums)
        for ids, sums in zip(message.block_ids, checksums, strict=True)
    ]


def _checksums_from_proto(message: kv_pb2.BlocksReady) -> tuple[tuple[int, ...], ...]:
    if not any(group.checksums for group in message.groups):
        return ()
    return tuple(tuple(group.checksums) for group in message.groups)


def _session_to_proto(session: KVSessionId) -> kv_pb2.KvSessionId:
    return kv_pb2.KvSessionId(
        p_epoch=session.p_epoch, d_epoch=session.d_epoch, link=session.link, seq=session.seq
    )


def _session_from_proto(message: kv_pb2.KvSessionId) -> KVSessionId:
    return KVSessionId(
        p_epoch=message.p_epoch, d_epoch=message.d_epoch, link=message.link, seq=message.seq
    )


def _layout_to_proto(layout: KVLayout) -> kv_pb2.KvLayout:
    groups = [
        kv_pb2.KvGroup(
            id=group.id,
            layers=group.layers,
            kind=int(group.kind),  # type: ignore[arg-type]
            window=group.window,
        )
        for group in layout.groups
    ]
    return kv_pb2.KvLayout(
        groups=groups,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        tile_format=layout.tile_format,
    )


def _layout_from_proto(message: kv_pb2.KvLayout) -> KVLayout:
    groups = tuple(
        KVGroup(
            id=group.id,
            layers=tuple(group.layers),
            kind=enum_from_proto(KVGroupKind, group.kind, "layout.groups.kind"),
            window=group.window,
        )
        for group in message.groups
    )
    return KVLayout(
        groups=groups,
        block_size=message.block_size,
        block_bytes=message.block_bytes,
        tile_format=message.tile_format,
    )


def _welcome_to_proto(welcome: KVLinkWelcome) -> kv_pb2.KvLinkWelcome:
    endpoint = welcome.endpoint
    return kv_pb2.KvLinkWelcome(
        protocol_version=welcome.protocol_version,
        engine_id=welcome.engine_id,
        epoch=welcome.epoch,
        compatibility_hash=welcome.compatibility_hash,
        link=welcome.link,
        nixl_metadata=endpoint.nixl_metadata,
        memory_type=endpoint.memory_type,
        regions=[
            kv_pb2.KvMemoryRegion(
                base_address=region.base_address,
                first_block=region.first_block,
                num_blocks=region.num_blocks,
                device_id=region.device_id,
            )
            for region in endpoint.regions
        ],
        transport=endpoint.transport,
    )


def _welcome_from_proto(message: kv_pb2.KvLinkWelcome) -> KVLinkWelcome:
    endpoint = KVEndpoint(
        nixl_metadata=message.nixl_metadata,
        memory_type=message.memory_type,
        regions=tuple(
            KVMemoryRegion(
                base_address=region.base_address,
                first_block=region.first_block,
                num_blocks=region.num_blocks,
                device_id=region.device_id,
            )
            for region in message.regions
        ),
        transport=message.transport,
    )
    return KVLinkWelcome(
        protocol_version=message.protocol_version,
        engine_id=message.engine_id,
        epoch=message.epoch,
        compatibility_hash=message.compatibility_hash,
        link=message.link,
        endpoint=endpoint,
    )
