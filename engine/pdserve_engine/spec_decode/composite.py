"""Drafts of several sources: what a grammar forces comes first."""

from collections.abc import Mapping, Sequence

from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.proposer import Draft, Proposer


class CompositeProposer:
    """Has a request's draft of the first source that has one. It gives way to what the request's
    grammar forces, unless it begins with that.
    """

    def __init__(self, sources: Sequence[Proposer]) -> None:
        """Those that come first have first choice."""
        self._sources = sources

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        """See `Proposer`."""
        drafts: dict[Request, Draft] = {}
        left = dict(candidates)
        for source in self._sources:
            drafts |= source.propose(left)
            left = {request: limit for request, limit in left.items() if request not in drafts}
        for request, limit in candidates.items():
            forced = request.drafts.forced_token_ids[:limit]
            if forced and not _begins_with(drafts.get(request), forced):
                drafts[request] = Draft("grammar", forced)
        return drafts


def _begins_with(draft: Draft | None, token_ids: tuple[int, ...]) -> bool:
    return draft is not None and tuple(draft.token_ids[: len(token_ids)]) == token_ids
