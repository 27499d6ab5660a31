"""Which proposer an engine has."""

from pdserve_engine.config import Speculation
from pdserve_engine.spec_decode.draft_model import DraftModelProposer
from pdserve_engine.spec_decode.proposer import Proposer
from pdserve_engine.spec_decode.suffix import SuffixProposer


def make_proposer(speculation: Speculation) -> Proposer | None:
    """Return the proposer; None: there are no drafts."""
    if speculation == "suffix":
        return SuffixProposer()
    return DraftModelProposer() if speculation == "draft_model" else None
