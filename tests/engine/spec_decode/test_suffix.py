"""Drafts from a request's own text."""

import gc
import random
import weakref
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode import suffix
from pdserve_engine.spec_decode.suffix import MAX_GAP, SuffixProposer, SuffixText
from support.requests import held_request

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def make_request(prompt: list[int], prediction: Sequence[int] = ()) -> Request:
    return held_request(prompt=prompt, prediction_token_ids=tuple(prediction))


def text_of(*pieces: list[int]) -> SuffixText:
    text = SuffixText()
    for piece in pieces:
        text.extend(piece)
    return text


def longest_match(tokens: list[int]) -> int:
    """Return how many tokens of the end were there before, by trying all places."""
    lengths = [0]
    for place in range(len(tokens) - 1):
        length = 0
        while length <= place and tokens[place - length] == tokens[-1 - length]:
            length += 1
        lengths.append(length)
    return max(lengths)


def test_a_repeated_end_is_repeated_as_often_as_there_is_room() -> None:
    assert list(text_of([7, 1, 2, 1, 2]).continuation(5)) == [1, 2, 1, 2, 1]


def test_a_copy_goes_on_behind_what_was_changed() -> None:
    source = list(range(100, 140))
    for changed in ([1], [1, 2, 3], []):
        text = text_of(source, [50], source[:10])
        assert list(text.continuation(2)) == [110, 111]
        text.extend([*changed, source[12]])
        assert list(text.continuation(2)) == [113, 114]


def test_what_is_left_out_may_not_be_longer_than_the_gap() -> None:
    source = list(range(100, 140))
    text = text_of(source, [50], source[:4])
    text.continuation(1)
    text.extend([source[4 + MAX_GAP]])
    assert not text.continuation(1)


@given(pieces=st.lists(TOKENS, max_size=8), num_tokens=st.integers(1, 12))
def test_a_continuation_stood_behind_the_last_token_before(
    pieces: list[list[int]], num_tokens: int
) -> None:
    """Whether it is asked for meanwhile or not."""
    asked, tokens = SuffixText(), list[int]()
    for piece in pieces:
        asked.extend(piece)
        tokens += piece
        draft = list(asked.continuation(num_tokens))
        assert len(draft) in (0, num_tokens)
        assert len(asked) == len(tokens)
        if not draft:
            assert longest_match(tokens) < 2
            continue
        # As often as it takes: an end that is repeated goes on with itself.
        assert any(
            (tokens + draft)[place : place + num_tokens] == draft
            for place in range(1, len(tokens))
            if tokens[place - 1] == tokens[-1]
        )


@given(tokens=TOKENS)
def test_the_longest_suffix_decides(tokens: list[int]) -> None:
    """As long as few places have the last two tokens."""
    rng = random.Random(len(tokens))
    tail = [rng.randrange(1000, 2000) for _ in range(6)]
    text = text_of(tail, [2001], tokens, tail[-2:], [2002], tokens, tail)
    assert list(text.continuation(1)) == [2001]


def test_each_request_has_its_text_which_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: weakref.WeakSet[SuffixText] = weakref.WeakSet()

    class Text(SuffixText):
        def __init__(self) -> None:
            super().__init__()
            texts.add(self)

    monkeypatch.setattr(suffix, "SuffixText", Text)
    proposer = SuffixProposer()
    requests = [make_request([n, 5, n + 1, n]) for n in (10, 20)]
    drafts = proposer.propose(dict.fromkeys(requests, 3))
    assert not drafts
    requests[0].append_output_token_ids([5])
    drafts = proposer.propose({requests[0]: 3, requests[1]: 2})
    assert list(drafts) == [requests[0]]
    assert list(drafts[requests[0]].token_ids) == [11, 10, 5]
    assert drafts[requests[0]].source == "suffix"
    assert len(texts) == 2
    del requests, drafts
    gc.collect()
    assert not texts


def test_an_answer_that_begins_as_predicted_goes_on_as_predicted() -> None:
    prediction = list(range(50, 70))
    request = make_request([1, 2, 3], prediction)
    proposer = SuffixProposer()
    assert not proposer.propose({request: 3})
    request.append_output_token_ids([50])
    draft = proposer.propose({request: 3})[request]
    assert (draft.source, list(draft.token_ids)) == ("prediction", [51, 52, 53])
    request.append_output_token_ids([51, 99, 53])
    assert list(proposer.propose({request: 2})[request].token_ids) == [54, 55]
    request.append_output_token_ids([1, 2])
    draft = proposer.propose({request: 1})[request]
    assert (draft.source, list(draft.token_ids)) == ("suffix", [3])
