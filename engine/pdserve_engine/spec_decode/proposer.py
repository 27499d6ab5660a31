"""Who guesses what comes next."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from pdserve_common.types.engine import DraftSource
from pdserve_engine.request.request import Request


class Draft(NamedTuple):
    """Tokens that may follow a request's last one, ids of the model's vocabulary."""

    source: DraftSource
    token_ids: Sequence[int]


class Proposer(Protocol):
    """Proposes drafts. They are only compared with the tokens that are sampled in any case: a bad
    one costs time, and none changes a token. So it may look at a clock. Owned by the engine thread.
    """

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        """Return drafts for some of `candidates`, of at most so many tokens each."""
        ...
