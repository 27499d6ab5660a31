"""Which proposer an engine has."""

from pdserve_engine.config import Speculation
from pdserve_engine.spec_decode.composite import CompositeProposer
from pdserve_engine.spec_decode.draft_model import DraftModelProposer
from pdserve_engine.spec_decode.proposer import Proposer
from pdserve_engine.spec_decode.suffix import SuffixProposer


def make_proposer(speculation: Speculation) -> Proposer | None:
    """Return the proposer; None: there are no drafts. Suffixes serve while a draft model has not
    caught up with a request.
    """
    if speculation == "none":
        return None
    suffixes = SuffixProposer()
    if speculation == "draft_model":
        return CompositeProposer([DraftModelProposer(), suffixes])
    return CompositeProposer([suffixes])
