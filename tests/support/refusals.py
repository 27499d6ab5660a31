"""How a server refuses a call."""

import contextlib
from collections.abc import Iterator

import grpc
import pytest


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *texts: str) -> Iterator[None]:
    """The call within it ends with this status, whose details have these texts."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        yield
    assert error.value.code() is code
    for text in texts:
        assert text in (error.value.details() or "")
