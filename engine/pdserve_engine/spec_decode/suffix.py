"""Drafts from a request's own text: what came behind its last tokens when they were there before.

A text's pairs of tokens are chained from the last to the first, as Lempel-Ziv compressors do it
(Deutsch, RFC 1951, section 4). The longest of some matches is followed as long as it goes on:
nothing is looked up meanwhile.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from weakref import WeakKeyDictionary

from pdserve_common.types.engine import DraftSource
from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.proposer import Draft

# Earlier places of the last two tokens that are compared, the last first, and how far back.
MAX_CANDIDATES = 16
MAX_MATCH = 32
# Behind a place where a match has ended, so many tokens may be new or left out before it goes on.
MAX_GAP = 8
# A match where the last one has ended is as good as one elsewhere that is so much longer.
GAP_BONUS = 2
NOWHERE = -1


class SuffixProposer:
    """Looks for drafts in prompt, prediction and answer of each request."""

    def __init__(self) -> None:
        # They go with their requests.
        self._texts: WeakKeyDictionary[Request, SuffixText] = WeakKeyDictionary()

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        """Return what came behind the longest suffix that was there before, if one was."""
        drafts = {}
        for request, num_tokens in candidates.items():
            text = self._text(request)
            if token_ids := text.continuation(num_tokens):
                drafts[request] = Draft(_source(request, text), token_ids)
        return drafts

    def _text(self, request: Request) -> "SuffixText":
        prediction = request.core_request.prediction_token_ids
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = SuffixText()
            text.extend(request.all_token_ids[: request.num_prompt_tokens])
            text.extend(prediction)
            if prediction:
                text.expect(request.num_prompt_tokens)
        text.extend(request.all_token_ids[len(text) - len(prediction) :])
        return text


def _source(request: Request, text: "SuffixText") -> DraftSource:
    """Is what `text` repeats in the request's prediction?"""
    first = request.num_prompt_tokens
    end = first + len(request.core_request.prediction_token_ids)
    return "prediction" if first <= text.next_place < end else "suffix"


class SuffixText:
    """A text that grows. Takes some 150 bytes a token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # The last place of each pair, which is that of its second token; of each place, where its
        # pair was before.
        self._last: dict[int, int] = {}
        self._earlier = array("i")
        # The place that the text is expected to repeat next, and whether it has so far.
        self._next = NOWHERE
        self._is_matching = False

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def next_place(self) -> int:
        """The place that the text is expected to repeat next, or has stopped to repeat."""
        return self._next

    def expect(self, place: int) -> None:
        """The text's next tokens are likely to be those from about `place` on."""
        self._next, self._is_matching = place, False

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the end."""
        tokens, last, earlier = self._tokens, self._last, self._earlier
        before = tokens[-1] if tokens else NOWHERE
        for place, token_id in enumerate(token_ids, len(tokens)):
            pair = before << 32 | token_id
            earlier.append(last.get(pair, NOWHERE))
            last[pair] = place
            before = token_id
        first = len(tokens)
        tokens.extend(token_ids)
        self._follow(first)

    def continuation(self, num_tokens: int) -> Sequence[int]:
        """Return what may follow, at most `num_tokens`, if its end was there before."""
        if not self._is_matching and self._tokens:
            self._find()
        if not self._is_matching:
            return ()
        found = self._tokens[self._next : self._next + num_tokens]
        period = len(self._tokens) - self._next
        while len(found) < num_tokens:  # the text repeats its end
            found.append(found[-period])
        return found

    def _follow(self, first: int) -> None:
        """Does the text, from `first` on, go on as it did before?"""
        if not self._is_matching:
            return
        tokens = self._tokens
        for place in range(first, len(tokens)):
            if tokens[self._next] != tokens[place]:
                self._is_matching = False
                return
            self._next += 1

    def _find(self) -> None:
        """Match the text's end with an earlier place."""
        best, best_score = NOWHERE, 0
        for place in self._nearby():
            num_common = self._num_common(place)
            if num_common and num_common + GAP_BONUS > best_score:
                best, best_score = place, num_common + GAP_BONUS
        for place in islice(self._earlier_places(), MAX_CANDIDATES):
            if (num_common := self._num_common(place)) > best_score:
                best, best_score = place, num_common
        if best != NOWHERE:
            self._next, self._is_matching = best + 1, True

    def _nearby(self) -> Sequence[int]:
        """Return places behind that where the last match has ended."""
        if self._next == NOWHERE:
            return ()
        return range(self._next, min(self._next + MAX_GAP, len(self._tokens) - 1))

    def _earlier_places(self) -> Iterator[int]:
        """Yield where the last two tokens were before, the last place first."""
        place = self._earlier[-1]
        while place != NOWHERE:
            yield place
            place = self._earlier[place]

    def _num_common(self, place: int) -> int:
        """Return how many tokens up to `place` are the text's last ones."""
        tokens, end = self._tokens, len(self._tokens) - 1
        count = 0
        while count < min(place + 1, MAX_MATCH) and tokens[place - count] == tokens[end - count]:
            count += 1
        return count
