"""The LoRA adapters that an engine holds: what clients call them, who uses them, and who has to go.

A name stands for one adapter at a time. What it stood for before stays for the requests that began
with it, their next attempts among them, until there is no room for it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdserve_common.errors import FailedPreconditionError
from pdserve_common.types.lora import LoadedLoRA, LoRAAdapter, LoRAAdapters
from pdserve_engine.core.executor import AdapterStore, PackedAdapter
from pdserve_engine.request.request import Request

# Names for each of max_loras: several may stand for one adapter.
NAMES_PER_ADAPTER = 16
MAX_SHOWN = 60


@dataclass(slots=True)
class _Held:
    rank: int
    # What it can be loaded from again.
    path: str
    # By the clock.
    last_used: float
    requests: set[Request] = field(default_factory=set)
    # It takes no more requests, and goes with the last.
    is_removed: bool = False


class AdapterPool:
    """At most `max_loras` adapters, by digest, so that no step has more of them. Owned by the
    engine thread, but for `listed`.
    """

    def __init__(
        self,
        store: AdapterStore | None = None,
        *,
        max_loras: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a store it holds none."""
        self.store = store
        self._max_loras = max_loras
        self._clock = clock
        self._held: dict[str, _Held] = {}
        # What each name has stood for, of that what is still held; what it stands for comes last.
        self._digests: dict[str, list[str]] = {}
        self._pinned: set[str] = set()
        # Any thread may look.
        self.listed = LoRAAdapters()
        self.num_loads = 0
        self.num_evictions = 0
        # Steps with one.
        self.num_steps = 0

    def __len__(self) -> int:
        return len(self._held)

    # ---- requests

    def acquire(self, request: Request) -> bool:
        """Keep a request's adapter for it; False if that is not held, or takes no more requests."""
        if request.adapter is None:
            return True
        held = self._held.get(request.adapter)
        if held is None or held.is_removed:
            return False
        held.requests.add(request)
        held.last_used = self._clock()
        return True

    def release(self, request: Request) -> None:
        """A request has ended."""
        held = self._held.get(request.adapter) if request.adapter is not None else None
        if held is None or request not in held.requests:
            return
        held.requests.remove(request)
        held.last_used = self._clock()
        if held.is_removed and not held.requests:
            self._free(request.adapter or "")

    # ---- an operator's calls

    def add(
        self, name: str, adapter: PackedAdapter, path: str = "", *, keep_others: bool = False
    ) -> LoRAAdapter:
        """Have a name stand for an adapter. Raises FailedPreconditionError if there is no room; to
        make some, another one may have to go.
        """
        assert self.store is not None
        digest, max_names = adapter.digest, NAMES_PER_ADAPTER * self._max_loras
        if name not in self._digests and len(self._digests) >= max_names:
            raise FailedPreconditionError(
                f"{len(self._digests)} names stand for adapters, at most {max_names} may, "
                f"{NAMES_PER_ADAPTER} for each of max_loras: {name[:MAX_SHOWN]!r} is one too many"
            )
        if digest not in self._held:
            self._make_room(keep_others=keep_others)
            self.store.add(adapter)
            self._held[digest] = _Held(adapter.rank, path, self._clock())
            self.num_loads += 1
        held = self._held[digest]
        held.is_removed = False
        held.path = path or held.path
        digests = self._digests.setdefault(name, [])
        if digest in digests:
            digests.remove(digest)
        digests.append(digest)
        self._list()
        return self._adapter(name)

    def remove(self, name: str, digest: str = "") -> None:
        """Take all of a name's adapters, or one of them. Raises FailedPreconditionError if there is
        none.
        """
        self._check_known(name)
        digests = self._digests[name]
        if digest and digest not in digests:
            raise FailedPreconditionError(f"lora_name {name!r} does not stand for {digest[:64]!r}")
        if digest and len(digests) > 1:
            digests.remove(digest)
            self._free_unless_named(digest)
        else:
            self._forget(name)
        self._list()

    def pin(self, name: str) -> None:
        """Raises FailedPreconditionError if there is none of that name."""
        self._check_known(name)
        self._pinned.add(name)

    def unpin(self, name: str) -> None:
        """Raises FailedPreconditionError if there is none of that name."""
        self._check_known(name)
        self._pinned.discard(name)

    def loaded(self) -> tuple[LoadedLoRA, ...]:
        """Return all that is in memory."""
        adapters = (*self.listed.adapters, *self._removed())
        pinned = self._pinned_digests()
        return tuple(
            LoadedLoRA(
                adapter=adapter,
                is_pinned=adapter.digest in pinned,
                is_removed=self._held[adapter.digest].is_removed,
                num_requests=len(self._held[adapter.digest].requests),
            )
            for adapter in adapters
        )

    # ---- room

    def _make_room(self, *, keep_others: bool) -> None:
        if len(self._held) < self._max_loras:
            return
        pinned = self._pinned_digests()
        free = [d for d, held in self._held.items() if d not in pinned and not held.requests]
        if not free or keep_others:
            states = "loaded, to be kept" if keep_others else "loaded, pinned or in use"
            raise FailedPreconditionError(
                f"{len(self._held)} adapters are {states}, at most {self._max_loras} may be "
                "(max_loras)"
            )
        current = self._current()
        # What no name stands for any more goes first.
        self._evict(min(free, key=lambda d: (d in current, self._held[d].last_used)))

    def _evict(self, digest: str) -> None:
        for name, digests in list(self._digests.items()):
            if len(digests) > 1 and digest in digests[:-1]:
                digests.remove(digest)
                self._free_unless_named(digest)
            elif digest in digests:
                self._forget(name)  # what it stood for before is no substitute
        self.num_evictions += 1

    def _forget(self, name: str) -> None:
        self._pinned.discard(name)
        for digest in self._digests.pop(name):
            self._free_unless_named(digest)

    def _free_unless_named(self, digest: str) -> None:
        """Free it, after its last request."""
        if any(digest in digests for digests in self._digests.values()):
            return
        self._held[digest].is_removed = True
        if not self._held[digest].requests:
            self._free(digest)

    def _free(self, digest: str) -> None:
        assert self.store is not None
        del self._held[digest]
        self.store.remove(digest)

    # ---- what there is

    def _check_known(self, name: str) -> None:
        if name not in self._digests:
            raise FailedPreconditionError(f"lora_name is {name!r}, no adapter of it is loaded")

    def _current(self) -> set[str]:
        return {digests[-1] for digests in self._digests.values()}

    def _pinned_digests(self) -> set[str]:
        return {self._digests[name][-1] for name in self._pinned}

    def _adapter(self, name: str) -> LoRAAdapter:
        digest = self._digests[name][-1]
        held = self._held[digest]
        return LoRAAdapter(name=name, digest=digest, rank=held.rank, path=held.path)

    def _nameless(self, *, is_removed: bool) -> Iterator[LoRAAdapter]:
        current = self._current()
        for digest, held in self._held.items():
            if digest not in current and held.is_removed == is_removed:
                yield LoRAAdapter(name="", digest=digest, rank=held.rank)

    def _removed(self) -> Iterator[LoRAAdapter]:
        return self._nameless(is_removed=True)

    def _list(self) -> None:
        adapters = (*map(self._adapter, self._digests), *self._nameless(is_removed=False))
        self.listed = LoRAAdapters(version=self.listed.version + 1, adapters=adapters)
