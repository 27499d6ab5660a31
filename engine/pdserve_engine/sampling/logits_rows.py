"""Which output position of which request each row of a step's logits is for."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# Rows of the batch, token ids or positions.
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """n rows of logits. A request has none in a step, or one, or several.

    The first is for the position behind the request's output. Each further one is for the next
    position and assumes one token more: the rows of a request follow each other, in this order.
    """

    # [n] int64: the request's row of the batch.
    batch_rows: Rows
    # [n] int64: the token's index among the request's output tokens.
    positions: Rows
    # By row: the output tokens that are assumed to come before its position, behind those that the
    # request has. A row that is not in here assumes none.
    assumed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.batch_rows)

    def accepted(self, token_ids: Rows, broken: Set[int] = frozenset()) -> Rows:
        """Return the indexes, int64 [m], of the rows whose assumptions are what was sampled,
        token_ids, int64 [n].

        Of `broken` rows, which could not be sampled, only those that assume nothing are accepted:
        the others are tried again when what they assume has come. None behind a broken one is.
        """
        is_accepted = np.ones(len(self), dtype=np.bool_)
        for row, assumed in self.assumed.items():
            first = row - len(assumed)
            is_whole = broken.isdisjoint(range(first, row + 1))
            is_accepted[row] = is_whole and tuple(token_ids[first:row].tolist()) == assumed
        return np.flatnonzero(is_accepted)

    def select(self, indexes: Rows) -> "LogitsRows":
        """Return the rows with these indexes, int64 [m], which ascend."""
        assumed = self.assumed
        if assumed:
            assumed = {
                i: assumed[row] for i, row in enumerate(indexes.tolist()) if row in self.assumed
            }
        return LogitsRows(self.batch_rows[indexes], self.positions[indexes], assumed)
