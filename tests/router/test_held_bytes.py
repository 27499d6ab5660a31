"""Bytes of large requests that a router holds."""

import pytest

from pdserve_common.errors import OverloadedError
from pdserve_router.api.large_requests.held_bytes import HeldBytes


def test_a_client_and_all_clients_have_limits_of_their_own() -> None:
    held = HeldBytes(max_bytes=100, max_client_bytes=60)
    with held.hold("a") as a, held.hold("b") as b:
        a.grow(40)
        a.grow(60)
        a.grow(10)  # it has that already
        with pytest.raises(OverloadedError, match="of one client have 61 bytes, at most 60") as one:
            a.grow(61)
        assert one.value.retry_after_ms
        with held.hold("a") as more, pytest.raises(OverloadedError, match="one client have 61"):
            more.grow(1)
        with pytest.raises(OverloadedError, match="of all clients have 101 bytes, at most 100"):
            b.grow(41)
        b.grow(40)
        assert held.num_bytes == 100
    assert held.num_bytes == 0
    with held.hold("a") as a:
        a.grow(60)


def test_what_is_held_is_given_back_after_an_error() -> None:
    held = HeldBytes(max_bytes=100, max_client_bytes=60)

    def fail() -> None:
        with held.hold("a") as a:
            a.grow(60)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert held.num_bytes == 0
