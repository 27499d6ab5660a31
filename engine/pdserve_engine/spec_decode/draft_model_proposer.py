"""Drafts of a draft model, which the model runner brings with the results of steps."""

from collections.abc import Mapping

from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.proposer import Draft


class DraftModelProposer:
    """Hands out what was guessed behind the last token of each request, as vLLM V1 does with the
    drafts that its runner proposes after sampling.
    """

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        """See `Proposer`."""
        return {
            request: Draft("draft_model", request.drafts.spec_token_ids[:limit])
            for request, limit in candidates.items()
            if request.drafts.spec_token_ids
        }
