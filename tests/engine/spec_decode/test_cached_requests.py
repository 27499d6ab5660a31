"""Drafts from finished answers: only among those who may know of each other, of bounded size."""

import random

from pdserve_common.types.lora import LoRARequest
from pdserve_engine.request.request import Request, RequestStatus
from pdserve_engine.spec_decode.cached_requests import NUM_MATCHED, CachedRequestProposer
from support.requests import held_request

PROMPT = (1, 2, 3, 4, 5)
ANSWER = (11, 12, 13, 14, 15, 16, 17, 18)
LIMIT = 3


def make_request(
    *output: int,
    prompt: tuple[int, ...] = PROMPT,
    salt: str | None = None,
    lora: LoRARequest | None = None,
) -> Request:
    request = held_request(prompt=prompt, max_model_len=10_000, cache_salt=salt, lora_request=lora)
    request.append_output_token_ids(output)
    return request


def draft(proposer: CachedRequestProposer, request: Request, limit: int = LIMIT) -> list[int]:
    found = proposer.propose({request: limit}).get(request)
    assert found is None or found.source == "cached_request"
    return [] if found is None else list(found.token_ids)


def finish(proposer: CachedRequestProposer, request: Request) -> None:
    """It had drafts, or none, and ends."""
    draft(proposer, request)
    request.status = RequestStatus.FINISHED_STOPPED


def test_an_answer_is_found_by_its_start_and_followed() -> None:
    proposer = CachedRequestProposer(10)
    finish(proposer, make_request(*ANSWER))
    request = make_request()
    assert draft(proposer, request) == [11, 12, 13]
    request.append_output_token_ids((11, 12))
    assert draft(proposer, request) == [13, 14, 15]
    request.append_output_token_ids((99,))
    assert draft(proposer, request) == []
    request.append_output_token_ids((13, 14, 15, 16))
    assert draft(proposer, request) == [17, 18]
    request.append_output_token_ids((17, 18))
    assert draft(proposer, request) == []


def test_answers_that_are_not_finished_are_not_looked_in() -> None:
    proposer = CachedRequestProposer(10)
    draft(proposer, make_request(*ANSWER))
    assert draft(proposer, make_request()) == []


def test_only_those_with_the_same_salt_and_adapter_know_of_each_other() -> None:
    adapters = [None, *(LoRARequest(lora_name="a", digest=digest) for digest in ("x", "y"))]
    salts = (None, "", "mine", "yours")
    proposer = CachedRequestProposer(100)
    tenants = [(salt, lora) for salt in salts for lora in adapters]
    for number, (salt, lora) in enumerate(tenants):
        assert draft(proposer, make_request(salt=salt, lora=lora)) == []
        finish(proposer, make_request(100 + number, 7, 8, salt=salt, lora=lora))
    for number, (salt, lora) in enumerate(tenants):
        assert draft(proposer, make_request(salt=salt, lora=lora)) == [100 + number, 7, 8]


def test_no_more_is_kept_than_there_may_be_and_the_oldest_goes_first() -> None:
    rng = random.Random(0)
    proposer = CachedRequestProposer(5, max_tokens=200)
    finished: list[Request] = []
    for number in range(300):
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randrange(4, 9)))
        output = [rng.randrange(1000) for _ in range(rng.choice([5, 20, 60]))]
        finished.append(make_request(*output, prompt=prompt, salt=f"{number % 3}"))
        finish(proposer, finished[-1])
        draft(proposer, make_request(prompt=(0,)))
        sizes = [NUM_MATCHED + each.num_output_tokens for each in finished[-5:]]
        while sum(sizes) > 200:
            del sizes[0]
        assert proposer.num_tokens == sum(sizes)
        for age, each in enumerate(reversed(finished[-8:])):
            known = each.all_token_ids
            again = make_request(prompt=tuple(known[:-2]), salt=each.core_request.cache_salt)
            assert draft(proposer, again) == (list(known[-2:]) if age < len(sizes) else [])
    for _ in range(6):
        finish(proposer, make_request(5, prompt=(1,), salt="last"))
    draft(proposer, make_request())
    assert not proposer._places, "nothing is left of tenants whose answers are gone"


def test_an_answer_longer_than_all_that_is_kept_is_cut() -> None:
    proposer = CachedRequestProposer(5, max_tokens=20)
    finish(proposer, make_request(*range(100, 200)))
    assert draft(proposer, make_request(*range(181, 190))) == [190, 191, 192]
    assert proposer.num_tokens == 20
