"""Which pictures' embeddings the model runner holds, and which it makes in the next step: vLLM V1's
EncoderCacheManager. Sizes are in tokens, of which each has one embedding.

A picture is made when a step is to compute some of its tokens, and held while a running request has
computed some and not all. Afterwards it stays until others need its room.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pdserve_common.types.engine import MultiModalFeatureSpec
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import SchedulerOutput

if TYPE_CHECKING:
    from pdserve_engine.models.config import VisionConfig


class EncoderStep(NamedTuple):
    """What the runner does before a step: it forgets pictures, then makes others."""

    free_encoder_mm_hashes: tuple[str, ...]
    # By the identifiers of their features, their pixels.
    scheduled_encoder_inputs: dict[str, bytes]


class EncoderCacheManager:
    """Keeps at most `cache_size` tokens, and has a step make at most as many. A picture, whose
    identifier is the hash of its content, is kept once, however many requests have it.
    """

    def __init__(self, cache_size: int = 0) -> None:
        """0: the model sees no pictures, and no request has any."""
        self.cache_size = cache_size
        # The size of what is kept, or made by the step that is being planned, and whose it is.
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, set[Request]] = {}
        # What nobody has any more, the longest so first.
        self._freeable: OrderedDict[str, None] = OrderedDict()
        self._num_free = cache_size
        self._budget = cache_size
        self._new: dict[str, bytes] = {}
        self._freed: list[str] = []
        # Requests with a picture that is not kept, and whose pixels are not here.
        self._lacking: dict[Request, None] = {}

    def num_fitting(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of the `num_tokens` tokens from `start` on the step may compute: those
        before the first picture that there is no room for; none if it lacks one's pixels.
        """
        room = self._num_free + sum(self._sizes[name] for name in self._freeable)
        budget = self._budget
        seen: set[str] = set()
        for feature in _features_in(request, start, num_tokens):
            name = feature.identifier
            if name in self._holders or name in seen:
                continue
            seen.add(name)
            room -= feature.length
            is_new = name not in self._freeable
            budget -= feature.length * is_new
            if min(room, budget) < 0:
                return max(0, feature.position - start)
            if is_new and not _has_pixels(request, feature):
                self._lacking[request] = None
                return 0
        return num_tokens

    def allocate(self, request: Request, start: int, num_tokens: int) -> None:
        """Hold the pictures of the tokens that the step computes, which are `num_fitting`."""
        features = list(_features_in(request, start, num_tokens))
        for feature in features:
            if feature.identifier in self._sizes:
                self._hold(request, feature.identifier)
        for feature in features:
            name, data = feature.identifier, feature.data
            if name in self._sizes:
                continue
            self._make_room(feature.length)
            self._num_free -= feature.length
            self._budget -= feature.length
            assert data is not None, "requests without are refused"
            self._new[name] = request.tensors[data.content_hash]
            self._sizes[name] = feature.length
            self._hold(request, name)

    def take_step(self) -> EncoderStep:
        """Return what the step that was planned has to make, and begin the next one."""
        step = EncoderStep(tuple(self._freed), self._new)
        self._freed, self._new, self._budget = [], {}, self.cache_size
        return step

    def free_computed(self) -> None:
        """Let go of pictures of which the requests that hold them have computed all tokens, also
        if that is in flight: the runner forgets them behind that step.
        """
        for name, holders in list(self._holders.items()):
            for request in [r for r in holders if not _is_within(r, name)]:
                self._release(request, name)

    def free(self, request: Request) -> None:
        """The request does not run any more."""
        if not request.mm_features:
            return
        for name in {feature.identifier for feature in request.mm_features}:
            if request in self._holders.get(name, ()):
                self._release(request, name)

    def take_lacking(self) -> list[Request]:
        """Return the requests that cannot go on, as their pixels are not here."""
        lacking, self._lacking = self._lacking, {}
        return list(lacking)

    def discard(self, step: SchedulerOutput) -> None:
        """A step counts for nothing, and whoever runs begins anew: the runner may have forgotten
        its pictures and made others, or not.
        """
        self._freed.extend(step.free_encoder_mm_hashes)
        self.reset()

    def reset(self) -> None:
        """Forget all pictures. No request goes on within one."""
        self._freed = list(dict.fromkeys([*self._freed, *self._sizes]))
        self._sizes.clear()
        self._holders.clear()
        self._freeable.clear()
        self._new = {}
        self._num_free = self._budget = self.cache_size

    def _hold(self, request: Request, name: str) -> None:
        self._freeable.pop(name, None)
        self._holders.setdefault(name, set()).add(request)

    def _release(self, request: Request, name: str) -> None:
        holders = self._holders[name]
        holders.remove(request)
        if not holders:
            del self._holders[name]
            self._freeable[name] = None

    def _make_room(self, num_tokens: int) -> None:
        while self._num_free < num_tokens:
            name, _ = self._freeable.popitem(last=False)
            self._num_free += self._sizes.pop(name)
            if self._new.pop(name, None) is None:
                self._freed.append(name)


def encoder_cache_size(vision: "VisionConfig | None", max_num_batched_tokens: int) -> int:
    """Return how many tokens of pictures are kept: a step's, or those of one picture."""
    return 0 if vision is None else max(vision.num_image_tokens, max_num_batched_tokens)


def _features_in(request: Request, start: int, num_tokens: int) -> Iterator[MultiModalFeatureSpec]:
    """Yield the pictures of which some token is among the `num_tokens` from `start` on."""
    for feature in request.mm_features:
        if feature.position >= start + num_tokens:
            return
        if feature.position + feature.length > start:
            yield feature


def _has_pixels(request: Request, feature: MultiModalFeatureSpec) -> bool:
    return feature.data is not None and feature.data.content_hash in request.tensors


def _is_within(request: Request, name: str) -> bool:
    """Has it computed some tokens of the picture, and not all? Those further on in the prompt, also
    of the same picture, hold nothing: two requests could wait for each other.
    """
    num_computed = request.progress.num_computed_tokens
    return any(
        feature.identifier == name
        and feature.position < num_computed < feature.position + feature.length
        for feature in request.mm_features
    )
