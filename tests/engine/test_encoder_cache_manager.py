"""The encoder cache: what a step needs is made or kept, no more than there is room for, and whoever
waits for room gets it.
"""

import random
from collections.abc import Iterator

import pytest

from pdserve_common.types.engine import MultiModalFeatureSpec, TensorRef
from pdserve_engine.core.features.encoder_cache_manager import EncoderCacheManager
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import CachedRequestData, SchedulerOutput
from support.requests import held_request

# By its identifier how many tokens a picture has.
LENGTHS = {"a": 1, "b": 3, "c": 4, "d": 4, "e": 6}


def make_request(request_id: str, layout: str, *, held: str = "abcde") -> Request:
    """`layout` has a dot for a token of text and a letter for a picture; the pixels of those in
    `held` are here.
    """
    features, position = [], 0
    for sign in layout:
        length = LENGTHS.get(sign, 1)
        if sign != ".":
            data = TensorRef(content_hash=sign.encode(), dtype="uint8", shape=(1, 1, 3))
            features.append(
                MultiModalFeatureSpec(
                    modality="image", identifier=sign, position=position, length=length, data=data
                )
            )
        position += length
    tensors = {sign.encode(): sign.encode() for sign in held}
    return held_request(request_id, (0,) * position, mm_features=tuple(features), tensors=tensors)


class World:
    """Requests that are computed in chunks, and a runner that knows what it is told."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache_size = self.random.choice([6, 7, 10, 20])
        self.manager = EncoderCacheManager(self.cache_size)
        self.runner: set[str] = set()
        signs = "." * 3 + "".join(LENGTHS)
        self.requests = [
            make_request(str(i), "".join(self.random.choices(signs, k=self.random.randrange(1, 9))))
            for i in range(5)
        ]
        self.num_made = 0

    def unfinished(self) -> Iterator[Request]:
        for request in self.requests:
            if request.progress.num_computed_tokens < request.num_prompt_tokens:
                yield request

    def step(self) -> None:
        """Plan and compute a step; some requests lose what they have while it is planned."""
        waiting = list(self.unfinished())
        self.random.shuffle(waiting)
        plan: dict[Request, int] = {}
        for request in waiting:
            if len(plan) > 1 and self.random.random() < 0.1:
                self.preempt(plan)
            most = self.random.choice([1, 2, 5, 30])
            left = request.num_prompt_tokens - request.progress.num_computed_tokens
            start = request.progress.num_computed_tokens
            num_tokens = self.manager.num_fitting(request, start, min(most, left))
            if num_tokens:
                self.manager.allocate(request, start, num_tokens)
                plan[request] = num_tokens
        assert plan or not waiting, "nobody gets room"
        assert not self.manager.take_lacking()
        forgotten, made = self.manager.take_step()
        if self.random.random() < 0.1:
            self.fail(forgotten, made)
            return
        assert sum(LENGTHS[sign] for sign in made) <= self.cache_size
        self.runner = (self.runner - set(forgotten)) | made.keys()
        self.num_made += len(made)
        assert sum(LENGTHS[sign] for sign in self.runner) <= self.cache_size
        for request, num_tokens in plan.items():
            start = request.progress.num_computed_tokens
            end = start + num_tokens
            for feature in request.mm_features:
                is_needed = feature.position < end
                is_needed &= (
                    feature.position + feature.length > request.progress.num_computed_tokens
                )
                assert not is_needed or feature.identifier in self.runner
            request.progress.found(end)
        self.manager.free_computed()

    def preempt(self, plan: dict[Request, int]) -> None:
        victim = self.random.choice(list(plan))
        del plan[victim]
        self.manager.free(victim)
        victim.progress.preempted()

    def fail(self, forgotten: tuple[str, ...], made: dict[str, bytes]) -> None:
        """The step raises, after the runner has made some of its pictures, or before anything."""
        if self.random.random() < 0.5:
            self.runner -= set(forgotten)
            self.runner |= set(list(made)[:1])
        for request in self.requests:
            self.manager.free(request)
            if request.progress.num_computed_tokens < request.num_prompt_tokens:
                request.progress.preempted()
        self.manager.discard(
            SchedulerOutput(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=CachedRequestData(),
                num_scheduled_tokens={},
                total_num_scheduled_tokens=0,
                finished_req_ids=frozenset(),
                preempted_req_ids=frozenset(),
                free_encoder_mm_hashes=forgotten,
                scheduled_encoder_inputs=made,
            )
        )


def test_all_requests_are_computed_with_what_there_is_room_for() -> None:
    num_made = 0
    for seed in range(300):
        world = World(seed)
        for _ in range(1000):
            if not any(world.unfinished()):
                break
            world.step()
        assert not any(world.unfinished()), seed
        num_made += world.num_made
    assert num_made > 2000


def test_a_picture_is_kept_until_others_need_its_room() -> None:
    manager = EncoderCacheManager(8)
    first, second = make_request("1", "c."), make_request("2", "dc")
    for request, expected in ((first, {"c"}), (second, {"d"}), (make_request("3", "e"), {"e"})):
        assert manager.num_fitting(request, 0, request.num_prompt_tokens)
        manager.allocate(request, 0, request.num_prompt_tokens)
        request.progress.found(request.num_prompt_tokens)
        forgotten, made = manager.take_step()
        manager.free_computed()
        assert made.keys() == expected
    assert set(forgotten) == {"c", "d"}


@pytest.mark.parametrize(("start", "expected"), [(0, 2), (2, 0), (6, 2)])
def test_a_chunk_ends_before_a_picture_that_there_is_no_room_for(start: int, expected: int) -> None:
    manager = EncoderCacheManager(6)
    other = make_request("other", "c.")
    manager.allocate(other, 0, 2)
    other.progress.found(2)
    manager.free_computed()  # not all of its tokens
    assert manager.num_fitting(make_request("r", "..d.."), start, 2 + 4 + 2 - start) == expected


def test_a_request_without_a_picture_s_pixels_is_told() -> None:
    manager = EncoderCacheManager(8)
    request = make_request("r", ".c", held="")
    assert manager.num_fitting(request, 0, 5) == 0
    assert manager.take_lacking() == [request]
    assert manager.take_lacking() == []
    other = make_request("other", "c")
    manager.allocate(other, 0, 4)
    assert manager.num_fitting(request, 0, 5) == 5, "another has brought them"


def test_a_reset_forgets_all() -> None:
    manager = EncoderCacheManager(8)
    manager.allocate(make_request("1", "c"), 0, 4)
    manager.take_step()
    manager.allocate(make_request("2", "d"), 0, 4)
    manager.reset()
    assert set(manager.take_step().free_encoder_mm_hashes) == {"c", "d"}
    assert manager.num_fitting(make_request("3", "ba"), 0, 4) == 4
