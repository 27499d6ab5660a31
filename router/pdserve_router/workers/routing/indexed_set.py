"""A set that can be drawn from: its members have places in a list."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class IndexedSet(Generic[T]):
    """Adding, removing and looking up take constant time; removing moves the last member."""

    __slots__ = ("_places", "items")

    def __init__(self) -> None:
        # For reading: draws are by place.
        self.items: list[T] = []
        self._places: dict[T, int] = {}

    def add(self, member: T) -> None:
        if member not in self._places:
            self._places[member] = len(self.items)
            self.items.append(member)

    def discard(self, member: T) -> None:
        place = self._places.pop(member, None)
        if place is None:
            return
        last = self.items.pop()
        if last is not member:
            self.items[place] = last
            self._places[last] = place

    def __contains__(self, member: object) -> bool:
        return member in self._places

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)
