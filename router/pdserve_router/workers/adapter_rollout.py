"""Loads an adapter on all workers of a pool or on some, and takes it back if one refuses."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from pdserve_common.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    PdserveError,
)
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import WorkerRole
from pdserve_common.types.lora import LoRAAdapter, LoRARequest
from pdserve_router.workers.routing.routing_policy import load
from pdserve_router.workers.worker import Worker
from pdserve_router.workers.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

# From the last load until heartbeats have told this router of it.
LISTED_TIMEOUT_S = 10.0
_POLL_S = 0.02


class Control(Protocol):
    """ControlClient."""

    async def add_lora(
        self, address: str, lora: LoRARequest, *, keep_others: bool = False
    ) -> LoRAAdapter: ...

    async def remove_lora(self, address: str, name: str, digest: str = "") -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Extension:
    """Loads that nobody has asked for."""

    name: str
    loads: Sequence[asyncio.Task[LoRAAdapter]]
    # None of them is under way, or is to be taken back.
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class AdapterRollout:
    """One change at a time: two of one name would leave it standing for both. Those that are asked
    for wait for each other, and not for one that `extend` makes: what that has begun ends, and is
    waited for only if it is of the same name.
    """

    def __init__(self, pool: WorkerPool, control: Control, runtime: Runtime) -> None:
        self._pool = pool
        self._control = control
        self._runtime = runtime
        self._lock = asyncio.Lock()
        # How many changes are asked for, and what `extend` does, which gives way to them.
        self._num_asked = 0
        self._extension: _Extension | None = None

    async def load(self, lora: LoRARequest, *, num_workers: int = 0) -> LoRAAdapter:
        """Load an adapter on so many prefill and as many decode workers, 0: on all; it is listed
        when this returns. Raises what a worker raises, and NoWorkerError if there are too few;
        those that have loaded it have it no more then.
        """
        async with self._asked(lora.lora_name):
            workers = self._choose(lora.lora_name, num_workers)
            before = {worker: _digest_of(worker, lora.lora_name) for worker in workers}
            # The first one says which it is: the others' folders have to be the same.
            first, *others = workers
            adapter = await self._add_first(first, lora, before)
            same = replace(lora, digest=adapter.digest)
            answers = await asyncio.gather(
                *(self._control.add_lora(worker.address, same) for worker in others),
                return_exceptions=True,
            )
            failures = [answer for answer in answers if isinstance(answer, BaseException)]
            if failures:
                loaded = [w for w, a in zip(others, answers, strict=True) if _may_have_loaded(a)]
                await self._take_back([first, *loaded], before, adapter.name, adapter.digest)
                raise failures[0]
            await self._until_listed(adapter)
            return adapter

    async def extend(self, adapter: LoRAAdapter, workers: Sequence[Worker]) -> bool:
        """Load an adapter on more workers, from where others have it, if they have room; False, and
        nothing, if by now its name stands for another one, or on one of them for any, or if `load`
        or `unload` is called before all have it. Raises as `load` does.
        """
        if self._num_asked or self._extension or not self.may_extend(adapter, workers):
            return False
        lora = LoRARequest(lora_name=adapter.name, digest=adapter.digest, lora_path=adapter.path)
        loads = [
            self._runtime.spawn(self._control.add_lora(w.address, lora, keep_others=True))
            for w in workers
        ]
        self._extension = extension = _Extension(adapter.name, loads)
        try:
            answers = await asyncio.gather(*loads, return_exceptions=True)
            if all(isinstance(answer, LoRAAdapter) for answer in answers):
                await self._until(lambda: all(_digest_of(w, adapter.name) for w in workers))
                return True
            loaded = [w for w, a in zip(workers, answers, strict=True) if _may_have_loaded(a)]
            before = dict.fromkeys(loaded, "")
            await self._take_back(loaded, before, adapter.name, adapter.digest)
        finally:
            self._extension = None
            extension.is_over.set()
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        if failures:
            raise failures[0]
        return False

    def may_extend(self, adapter: LoRAAdapter, workers: Sequence[Worker]) -> bool:
        """Does its name stand for it, and on these workers for nothing?"""
        current = self._pool.limits.adapter(adapter.name) if self._pool.limits else None
        return (
            current is not None
            and current.digest == adapter.digest
            and all(self._pool.serves(w) and not _digest_of(w, adapter.name) for w in workers)
        )

    async def unload(self, name: str) -> None:
        """Remove a name's adapters from all workers that have them. Raises ModelNotFoundError if
        none has, and what the first worker raises that cannot.
        """
        async with self._asked(name):
            workers = [worker for worker in self._ready() if _digest_of(worker, name)]
            if not workers:
                raise ModelNotFoundError(
                    f"lora_name {name[:256]!r} is no adapter that is served here", field="lora_name"
                )
            digests = {_digest_of(worker, name) for worker in workers}
            for worker in (*self._pool.decode, *self._pool.prefill):
                worker.forgotten -= digests
            removals = (self._control.remove_lora(worker.address, name) for worker in workers)
            for answer in await asyncio.gather(*removals, return_exceptions=True):
                if isinstance(answer, BaseException) and not _has_gone(answer):
                    raise answer
            await self._until(lambda: not any(_digest_of(w, name) for w in self._ready()))

    @asynccontextmanager
    async def _asked(self, name: str) -> AsyncIterator[None]:
        """Have the turn of a change of a name that is asked for."""
        self._num_asked += 1
        extension = self._extension
        for loading in extension.loads if extension is not None else ():
            loading.cancel()
        try:
            async with self._lock:
                if extension is not None and extension.name == name:
                    await extension.is_over.wait()
                yield
        finally:
            self._num_asked -= 1

    def _ready(self) -> list[Worker]:
        return [w for w in (*self._pool.decode, *self._pool.prefill) if self._pool.serves(w)]

    def _choose(self, name: str, num_workers: int) -> Sequence[Worker]:
        """Return decode workers first. Those that have the name come first, then those with the
        least load, of prefill those that are proven with a chosen decode worker.
        """
        ready = self._ready()
        decode = [worker for worker in ready if worker.role is WorkerRole.DECODE]
        prefill = [worker for worker in ready if worker.role is WorkerRole.PREFILL]
        if not decode or len(decode) < num_workers:
            wanted = max(1, num_workers)
            raise NoWorkerError(f"{len(decode)} decode workers are ready, {wanted} are asked for")
        if not num_workers:
            return [*decode, *prefill]
        decode.sort(key=lambda each: (not _digest_of(each, name), load(each)))
        paired = self._paired(decode[:num_workers])
        prefill.sort(key=lambda p: (p not in paired, not _digest_of(p, name), load(p)))
        return [*decode[:num_workers], *prefill[:num_workers]]

    def _paired(self, decode: Sequence[Worker]) -> Collection[Worker]:
        return {other for worker in decode for other in self._pool.paired(worker)}

    async def _add_first(
        self, worker: Worker, lora: LoRARequest, before: Mapping[Worker, str]
    ) -> LoRAAdapter:
        try:
            return await self._control.add_lora(worker.address, lora)
        except PdserveError as error:
            # Without a digest nobody knows which one to remove of two.
            if _may_have_loaded(error) and (lora.digest or not before[worker]):
                await self._take_back([worker], before, lora.lora_name, lora.digest)
            raise

    async def _take_back(
        self,
        workers: Sequence[Worker],
        before: Mapping[Worker, str],
        name: str,
        digest: str,
    ) -> None:
        """Have a name stand again for what it did; an empty digest: for nothing. As long as the
        slowest of them takes.
        """
        changed = [worker for worker in workers if not digest or before[worker] != digest]
        await asyncio.gather(*(self._remove(worker, name, digest) for worker in changed))

    async def _remove(self, worker: Worker, name: str, digest: str) -> None:
        try:
            await self._control.remove_lora(worker.address, name, digest)
        except PdserveError as error:
            if not _has_gone(error):
                logger.warning("%s may keep the adapter %s: %s", worker, name, error)

    async def _until_listed(self, adapter: LoRAAdapter) -> None:
        wanted = (adapter.name, adapter.digest)

        def is_listed() -> bool:
            return wanted in [(each.name, each.digest) for each in self._pool.listed_adapters()]

        if not await self._until(is_listed):
            raise NoWorkerError(
                f"the adapter {adapter.name!r} is loaded, and no proven pair with it is ready yet",
                retry_after_ms=1000,
            )

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """False if it does not hold within LISTED_TIMEOUT_S."""
        for _ in range(round(LISTED_TIMEOUT_S / _POLL_S)):
            if condition():
                return True
            await self._runtime.sleep(_POLL_S)
        return False


def _digest_of(worker: Worker, name: str) -> str:
    """Return what a name stands for on a worker; empty: nothing."""
    adapters = worker.info.adapters if worker.info is not None else ()
    return next((each.digest for each in adapters if each.name == name), "")


def _may_have_loaded(answer: LoRAAdapter | BaseException) -> bool:
    """Who did not answer in time, or was cancelled, may have, and who refuses has not."""
    return not isinstance(answer, (InvalidRequestError, FailedPreconditionError))


def _has_gone(refusal: BaseException) -> bool:
    """Does a worker that is to remove an adapter say that it has none: it has evicted it?"""
    return isinstance(refusal, FailedPreconditionError) and refusal.retry_after_ms is None
