"""Which of the listed workers are a router's own: those of its cell.

A worker sends each of its routers a message a step, and a router keeps what every worker has
cached: with a thousand workers neither can have all of the other. So the list is cut into cells.
All routers cut the same list in the same way, and nothing is shared between cells.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from pdserve_common.types.engine import WorkerRole

logger = logging.getLogger(__name__)

Lists = Mapping[WorkerRole, Sequence[str]]
# As a StatefulSet names its Pods.
_ORDINAL = re.compile(r".*-(\d+)")


class Cell:
    """The cell of one router."""

    def __init__(self, name: str, size: int) -> None:
        """Routers of the same `name` have the same cell, of about `size` workers; 0: of all. Names
        that end in -0, -1, ... take the cells in turn, others by their hash.
        """
        self._name = name
        self._size = size
        self._shown = ""

    def members(self, lists: Lists) -> dict[WorkerRole, tuple[str, ...]]:
        """Return the cell's addresses of each role, in the order of `lists`.

        Cells differ by one worker of a role at most, so each has the ratio of the roles, and at
        least one of each that there is. While their number stays, a worker that comes or goes
        changes three places of a cell at most.
        """
        number = self._num_cells(lists)
        index = self._place() % number
        members = {role: _share(addresses, index, number) for role, addresses in lists.items()}
        sizes = ", ".join(f"{len(own)} {role.name.lower()}" for role, own in members.items())
        shown = f"cell {index} of {number}: {sizes}"
        if number > 1 and shown != self._shown:
            logger.info("%s", shown)
        self._shown = shown
        return members

    def _num_cells(self, lists: Lists) -> int:
        numbers = [len(addresses) for addresses in lists.values() if addresses]
        if not self._size or not numbers:
            return 1
        return min(-(-sum(numbers) // self._size), *numbers)

    def _place(self) -> int:
        match = _ORDINAL.fullmatch(self._name)
        return int(match[1]) if match else _hash(self._name)


def _share(addresses: Sequence[str], index: int, number: int) -> tuple[str, ...]:
    """Return the `index`th of `number` runs of equal length, in the order of the hashes."""
    ranked = sorted(addresses, key=_hash)
    first, end = (len(ranked) * place // number for place in (index, index + 1))
    own = set(ranked[first:end])
    return tuple(address for address in addresses if address in own)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
