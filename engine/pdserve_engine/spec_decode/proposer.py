"""Who guesses what comes next."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pdserve_engine.request.request import Request


class Proposer(Protocol):
    """Proposes drafts. They are only compared with the tokens that are sampled in any case: a bad
    one costs time, and none changes a token. So it may look at a clock. Owned by the engine thread.
    """

    def propose(
        self, candidates: Mapping[Request, int], num_rows: int
    ) -> Mapping[Request, Sequence[int]]:
        """Return drafts, ids of the model's vocabulary, for some of `candidates`: at most so many
        for each, what may follow its last token. The step computes `num_rows` tokens besides.
        """
        ...

    def observe(self, num_rows: int, duration_s: float) -> None:
        """A step that computed so many tokens, of decodes and drafts alone, took so long."""
        ...
