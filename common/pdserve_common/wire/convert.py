"""Small conversions that all of `wire` shares."""

from enum import IntEnum
from typing import TypeVar

from pdserve_common.errors import InvalidRequestError

E = TypeVar("E", bound=IntEnum)


def seconds_to_ns(seconds: float) -> int:
    """Durations are never negative on the wire."""
    return max(0, round(seconds * 1e9))


def ns_to_seconds(ns: int) -> float:
    return ns / 1e9


def enum_from_proto(cls: type[E], value: int, field: str) -> E:
    """Return the member. Raises InvalidRequestError naming the field and the known values."""
    try:
        return cls(value)
    except ValueError:
        known = ", ".join(f"{member.value} ({member.name})" for member in cls)
        raise InvalidRequestError(
            f"{field} is {value}, known values are {known}", field=field
        ) from None
