"""Tensors that requests name and do not carry: their names, their sizes, and what may be one."""

import hashlib
import math
from collections.abc import Sequence

from pdserve_common.errors import FailedPreconditionError, InvalidRequestError
from pdserve_common.types.engine import ErrorFault, TensorRef

# Bytes of an element.
ITEM_SIZES = {"uint8": 1}
MAX_DIMENSIONS = 4
# 2364 pixels square, of three bytes each: far more than models of pictures see.
MAX_TENSOR_BYTES = 16 << 20
HASH_BYTES = 32
# One message has so many bytes; others of the connection go on between two.
CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 1 << 20


class TensorNotHeldError(FailedPreconditionError):
    """The worker does not hold a tensor of the request. Retryable: it is put again."""

    is_retryable = True
    # It would not fail anywhere. The worker is in order all the same.
    fault = ErrorFault.WORKER


def begin_hash(dtype: str, shape: Sequence[int]) -> "hashlib._Hash":
    """Return the SHA-256 that is a tensor's name once it has got its row-major bytes."""
    return hashlib.sha256(f"{dtype}:{','.join(map(str, shape))}:".encode())


def tensor_ref(dtype: str, shape: Sequence[int], data: bytes) -> TensorRef:
    """Return what requests name it by."""
    digest = begin_hash(dtype, shape)
    digest.update(data)
    return TensorRef(content_hash=digest.digest(), dtype=dtype, shape=tuple(shape))


def num_bytes(ref: TensorRef) -> int:
    """Return its size; `ref` is valid."""
    return ITEM_SIZES[ref.dtype] * math.prod(ref.shape)


def validate_tensor_ref(field: str, ref: TensorRef) -> None:
    """Raise InvalidRequestError, which names what of `field` it is, for one of an unknown dtype, of
    no elements or of too many.
    """
    if ref.dtype not in ITEM_SIZES:
        raise InvalidRequestError(
            f"{field}.dtype is {ref.dtype[:64]!r}, must be {', '.join(ITEM_SIZES)}",
            field=f"{field}.dtype",
        )
    if not 1 <= len(ref.shape) <= MAX_DIMENSIONS:
        raise InvalidRequestError(
            f"{field}.shape has {len(ref.shape)} dimensions, must be 1 to {MAX_DIMENSIONS}",
            field=f"{field}.shape",
        )
    if not 0 < num_bytes(ref) <= MAX_TENSOR_BYTES:
        raise InvalidRequestError(
            f"{field}.shape is {list(ref.shape)}, which are {num_bytes(ref)} bytes, must be 1 to "
            f"{MAX_TENSOR_BYTES}",
            field=f"{field}.shape",
        )
    if len(ref.content_hash) != HASH_BYTES:
        raise InvalidRequestError(
            f"{field}.content_hash has {len(ref.content_hash)} bytes, must be {HASH_BYTES}",
            field=f"{field}.content_hash",
        )
