"""Which proposer an engine has."""

from pdserve_engine.config import Speculation
from pdserve_engine.spec_decode.cached_requests import CachedRequestProposer
from pdserve_engine.spec_decode.composite import CompositeProposer
from pdserve_engine.spec_decode.draft_model_proposer import DraftModelProposer
from pdserve_engine.spec_decode.proposer import Proposer
from pdserve_engine.spec_decode.suffix import SuffixProposer


def make_proposer(speculation: Speculation, max_cached_requests: int = 0) -> Proposer | None:
    """Return the proposer; None: there are no drafts. Texts serve while a draft model has not
    caught up with a request: first those of finished ones, if any are kept.
    """
    if speculation == "none":
        return None
    sources: list[Proposer] = [DraftModelProposer()] if speculation == "draft_model" else []
    if max_cached_requests:
        sources.append(CachedRequestProposer(max_cached_requests))
    return CompositeProposer([*sources, SuffixProposer()])
