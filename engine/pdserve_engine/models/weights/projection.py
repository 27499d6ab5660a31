"""A matrix product of a layer: what checkpoints call its weights, and a rank's part of them."""

from collections.abc import Iterator
from typing import NamedTuple

from pdserve_engine.models.weights.loader import WeightPart


class Projection(NamedTuple):
    """One matrix product; its weights may be several checkpoint entries, stacked by rows."""

    # The rows that there are of each weight, and this rank's part of them.
    parts: tuple[tuple[str, int, slice], ...]
    in_features: int
    has_bias: bool
    # This rank's part of the inputs, and in how many sums it adds them up.
    columns: slice = slice(None)
    num_sums: int = 1

    @property
    def num_inputs(self) -> int:
        """This rank's."""
        return len(range(self.in_features)[self.columns])

    @property
    def num_outputs(self) -> int:
        """This rank's."""
        return sum(rows.stop - rows.start for _, _, rows in self.parts)

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, num_rows, _ in self.parts:
            yield f"{prefix}{name}.weight", (num_rows, self.in_features)
            if self.has_bias:
                yield f"{prefix}{name}.bias", (num_rows,)

    def weights(self, prefix: str) -> list[tuple[WeightPart, tuple[int, int]]]:
        """Return this rank's parts, with the shapes of the whole weights."""
        return [
            (WeightPart(prefix + name, rows, self.columns), (num_rows, self.in_features))
            for name, num_rows, rows in self.parts
        ]

    def biases(self, prefix: str) -> list[WeightPart]:
        return [WeightPart(f"{prefix}{name}.bias", rows) for name, _, rows in self.parts]
