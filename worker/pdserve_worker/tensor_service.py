"""PutTensor's messages to a tensor: checked before anything is kept, and bounded in time."""

import asyncio
from collections.abc import AsyncIterator

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve_common.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from pdserve_common.types.engine import TensorRef
from pdserve_common.types.tensors import MAX_CHUNK_BYTES, begin_hash, num_bytes, validate_tensor_ref
from pdserve_common.wire import from_proto
from pdserve_worker.tensor_store import TensorStore

# 16 MiB in that time are 14 Mbit/s.
UPLOAD_TIMEOUT_S = 10.0

Messages = AsyncIterator[service_pb2.PutTensorRequest]


async def receive_tensor(
    messages: Messages,
    store: TensorStore,
    *,
    client: str,
    timeout_s: float = UPLOAD_TIMEOUT_S,
) -> float:
    """Store what a connection puts, and return for how long (s). Raises InvalidRequestError for
    what is no tensor or another than its reference says, OverloadedError if there is no room, and
    DeadlineExceededError.
    """
    try:
        await asyncio.wait_for(_receive(messages, store, client), timeout_s)
    except OverloadedError:
        store.metrics.on_put("no_room")
        raise
    except asyncio.TimeoutError:
        store.metrics.on_put("refused")
        raise DeadlineExceededError(f"the tensor did not come within {timeout_s:g} s") from None
    except BaseException:  # counted, also when its router has left
        store.metrics.on_put("refused")
        raise
    return store.lease_s


async def _receive(messages: Messages, store: TensorStore, client: str) -> None:
    first = await anext(messages, None)
    if first is None or not first.HasField("ref"):
        raise InvalidRequestError("the first message has no ref", field="ref")
    ref = from_proto(TensorRef, first.ref)
    validate_tensor_ref("ref", ref)
    if store.renew(ref, client):
        store.metrics.on_put("held")
        return
    with store.reserve(ref, client) as put:
        data = await _read_data(first, messages, ref)
        put(data)
    store.metrics.on_put("stored", len(data))


async def _read_data(
    message: service_pb2.PutTensorRequest | None, messages: Messages, ref: TensorRef
) -> bytes:
    """Return the bytes that `ref` names. `message` is the first one."""
    size = num_bytes(ref)
    digest = begin_hash(ref.dtype, ref.shape)
    chunks: list[bytes] = []
    num_received = 0
    while message is not None:
        num_received += len(message.chunk)
        if len(message.chunk) > MAX_CHUNK_BYTES:
            raise InvalidRequestError(
                f"chunk has {len(message.chunk)} bytes, at most {MAX_CHUNK_BYTES}", field="chunk"
            )
        if num_received > size:
            break
        digest.update(message.chunk)
        chunks.append(message.chunk)
        message = await anext(messages, None)
    if num_received != size:
        raise InvalidRequestError(
            f"the chunks have {num_received} bytes{' or more' * (num_received > size)}, the shape "
            f"{list(ref.shape)} of {ref.dtype} has {size}",
            field="chunk",
        )
    if digest.digest() != ref.content_hash:
        raise InvalidRequestError(
            f"ref.content_hash is {ref.content_hash.hex()}, that of the bytes is "
            f"{digest.hexdigest()}",
            field="ref.content_hash",
        )
    return b"".join(chunks)
