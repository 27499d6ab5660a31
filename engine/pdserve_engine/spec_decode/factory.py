"""Which proposer an engine has."""

from pdserve_engine.config import Speculation
from pdserve_engine.spec_decode.proposer import Proposer
from pdserve_engine.spec_decode.suffix import SuffixProposer


def make_proposer(speculation: Speculation) -> Proposer | None:
    """Return the proposer; None: there are no drafts."""
    return SuffixProposer() if speculation == "suffix" else None
