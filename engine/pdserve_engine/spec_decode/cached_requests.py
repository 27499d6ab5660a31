"""Drafts from answers that others were given: of requests with the same salt and adapter alone, as
the time that an answer takes tells of what was there before.
"""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.proposer import Draft

# Tokens in a row by which a place in another answer is found.
NUM_MATCHED = 4
# All answers together have at most so many. One takes some 250 bytes.
MAX_CACHED_TOKENS = 1 << 19


class Tenant(NamedTuple):
    """Requests that may be told of each other, as they share a prefix cache."""

    cache_salt: str | None
    # The digest of the LoRA adapter.
    adapter: str | None

    @classmethod
    def of(cls, request: Request) -> "Tenant":
        return cls(request.core_request.cache_salt, request.adapter)


class _Place(NamedTuple):
    """Where a text goes on."""

    tokens: "array[int]"
    position: int


@dataclass(slots=True)
class _Followed:
    """What a request's answer repeats: its first `num_tokens` tokens have led to `place`."""

    place: _Place
    num_tokens: int


class CachedRequestProposer:
    """Remembers the answers of the last requests that had drafts, and looks in them for drafts."""

    def __init__(self, max_requests: int, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._running: set[Request] = set()
        # The oldest first.
        self._answers: deque[tuple[Tenant, array[int]]] = deque()
        # By tenant: where tokens in a row were last. A tenant without answers is not in there.
        self._places: dict[Tenant, dict[bytes, _Place]] = {}
        self._followed: WeakKeyDictionary[Request, _Followed] = WeakKeyDictionary()

    @property
    def num_tokens(self) -> int:
        """Tokens of the answers that are remembered."""
        return self._num_tokens

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        """Return what came behind the last tokens in an answer that was finished."""
        self._remember_finished()
        self._running.update(candidates)
        drafts = {}
        for request, limit in candidates.items():
            if token_ids := self._find(request, limit):
                drafts[request] = Draft("cached_request", token_ids)
        return drafts

    def _remember_finished(self) -> None:
        for request in [each for each in self._running if each.status.is_finished]:
            self._running.remove(request)
            self._remember(request)

    def _remember(self, request: Request) -> None:
        """Keep an answer, and the tokens before it, by which its start is found."""
        first = max(0, request.num_prompt_tokens - NUM_MATCHED)
        tokens = array("i", request.all_token_ids[first:][-self._max_tokens :])
        tenant = Tenant.of(request)
        self._answers.append((tenant, tokens))
        self._num_tokens += len(tokens)
        places = self._places.setdefault(tenant, {})
        for index in range(NUM_MATCHED, len(tokens)):
            places[tokens[index - NUM_MATCHED : index].tobytes()] = _Place(tokens, index)
        while len(self._answers) > self._max_requests or self._num_tokens > self._max_tokens:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        tenant, tokens = self._answers.popleft()
        self._num_tokens -= len(tokens)
        places = self._places[tenant]
        for index in range(NUM_MATCHED, len(tokens)):
            key = tokens[index - NUM_MATCHED : index].tobytes()
            if key in places and places[key].tokens is tokens:
                del places[key]
        if not places:
            del self._places[tenant]

    def _find(self, request: Request, num_tokens: int) -> Sequence[int]:
        """Return what may follow the request's tokens, at most `num_tokens`."""
        followed = self._followed.get(request)
        if followed is None or not _follow(followed, request):
            place = self._look_up(request)
            if place is None:
                self._followed.pop(request, None)
                return ()
            followed = self._followed[request] = _Followed(place, request.num_tokens)
        tokens, index = followed.place
        return tokens[index : index + num_tokens]

    def _look_up(self, request: Request) -> _Place | None:
        places = self._places.get(Tenant.of(request))
        if places is None:
            return None
        return places.get(array("i", request.all_token_ids[-NUM_MATCHED:]).tobytes())


def _follow(followed: _Followed, request: Request) -> bool:
    """Has the answer gone on as what it repeats?"""
    new = request.all_token_ids[followed.num_tokens :]
    tokens, index = followed.place
    if list(tokens[index : index + len(new)]) != list(new):
        return False
    followed.place = _Place(tokens, index + len(new))
    followed.num_tokens = request.num_tokens
    return True
