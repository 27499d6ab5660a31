"""Whose draft a request has."""

from collections.abc import Mapping

from pdserve_common.types.engine import DraftSource
from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.composite import CompositeProposer
from pdserve_engine.spec_decode.factory import make_proposer
from pdserve_engine.spec_decode.proposer import Draft
from support.requests import held_request

LIMIT = 3


class Scripted:
    """Has drafts of some requests, and says whom it was asked about."""

    def __init__(self, source: DraftSource, drafts: Mapping[Request, list[int]]) -> None:
        self._source = source
        self._drafts = drafts
        self.asked: list[Request] = []

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        self.asked = list(candidates)
        return {r: Draft(self._source, d) for r, d in self._drafts.items() if r in candidates}


def make_request(name: str, prompt: tuple[int, ...] = (1, 2), **draft: tuple[int, ...]) -> Request:
    request = held_request(name, prompt)
    request.drafts.forced_token_ids = draft.get("forced", ())
    request.drafts.spec_token_ids = draft.get("spec", ())
    return request


def test_the_first_source_that_has_a_draft_has_it() -> None:
    one, two, three = map(make_request, ("one", "two", "three"))
    first = Scripted("draft_model", {one: [1]})
    second = Scripted("suffix", {one: [2], two: [3]})
    proposer = CompositeProposer([first, second])
    drafts = proposer.propose(dict.fromkeys((one, two, three), LIMIT))
    assert drafts == {one: Draft("draft_model", [1]), two: Draft("suffix", [3])}
    assert second.asked == [two, three]


def test_what_is_forced_comes_before_others_unless_they_go_on_from_it() -> None:
    disagrees = make_request("disagrees", forced=(5, 6))
    agrees = make_request("agrees", forced=(5, 6))
    shorter = make_request("shorter", forced=(5, 6))
    nothing_else = make_request("nothing else", forced=(5, 6, 7, 8))
    requests = (disagrees, agrees, shorter, nothing_else)
    suffixes = Scripted("suffix", {disagrees: [5, 7, 8], agrees: [5, 6, 9], shorter: [5]})
    drafts = CompositeProposer([suffixes]).propose(dict.fromkeys(requests, LIMIT))
    assert drafts == {
        disagrees: Draft("grammar", (5, 6)),
        agrees: Draft("suffix", [5, 6, 9]),
        shorter: Draft("grammar", (5, 6)),
        nothing_else: Draft("grammar", (5, 6, 7)),
    }


def test_suffixes_serve_until_a_draft_model_has_caught_up() -> None:
    proposer = make_proposer("draft_model")
    assert proposer is not None
    request = make_request("r", (1, 2, 3, 1, 2))
    assert proposer.propose({request: LIMIT})[request].source == "suffix"
    request.drafts.spec_token_ids = (7,)
    assert proposer.propose({request: LIMIT})[request] == Draft("draft_model", (7,))
    request.drafts.forced_token_ids = (8,)
    assert proposer.propose({request: LIMIT})[request] == Draft("grammar", (8,))
    assert make_proposer("none") is None
