"""The verbs of an operator, on the engine thread, between two steps."""

import logging
import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve_common.errors import FailedPreconditionError, InvalidRequestError, PdserveError
from pdserve_common.model_files.hub_path import HubPath, is_hub_path
from pdserve_common.observability import defects
from pdserve_common.processes.calls import Handlers
from pdserve_common.types.engine import PauseMode
from pdserve_common.types.engine_client import EngineState
from pdserve_common.types.lora import LoadedLoRA, LoRAAdapter, LoRAAdapters, LoRARequest
from pdserve_common.types.verbs import (
    SLEEP_TAGS,
    AddLora,
    ListLoras,
    Pause,
    PinLora,
    Profile,
    RemoveLora,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnpinLora,
    WakeUp,
)
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.executor import PackedAdapter
from pdserve_engine.core.scheduler import PauseState
from pdserve_engine.kv.memory import out_of_memory_reason
from pdserve_engine.kv_transfer.sleep import SleepingTransfer
from pdserve_engine.lora.adapter import folder_below
from pdserve_engine.lora.adapter_config import MAX_SHOWN, LoraError
from pdserve_engine.lora.hub import FetchAdapter, HubUnreachableError
from pdserve_engine.runner import rank_calls

logger = logging.getLogger(__name__)

# After the last request, how long KV sessions may take to end before sleep and reset refuse.
SETTLE_TIMEOUT_S = 10.0
# To take a profile in holds up all threads of the process, by some 10 ms for each of its steps:
# heartbeats still come in time.
MAX_PROFILE_STEPS = 50
_NO_ROOT = "lora_root is not set: no adapters are loaded here"


@dataclass(frozen=True, slots=True)
class Wait:
    """What a verb awaits, while steps go on: a condition, looked at after each of them. It goes on
    after `timeout_s` as well; the caller bounds the verb as a whole.
    """

    condition: Callable[[], bool]
    timeout_s: float = math.inf

    def __await__(self) -> Generator["Wait", None, None]:
        yield self


class EngineControl:
    """Handles each verb, as HANDLERS says, or refuses it with a typed error.

    Handlers are coroutines of the engine thread: between two steps it runs them up to the next
    Wait. One at a time; it is closed if its caller gives up.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        lora_root: str | None = None,
        fetch_adapter: FetchAdapter | None = None,
        transfer: SleepingTransfer | None = None,
        wakeup: Callable[[], None] = lambda: None,
    ) -> None:
        """`fetch_adapter` brings adapters of the hub, if they are served. `transfer` is None if no
        peer reads this worker's blocks, nor it theirs. `wakeup` is called, on any thread, when what
        a verb waits for may have come.
        """
        self._core = core
        self._transfer = transfer
        self._adapters = core.scheduler.adapters
        self._lora_root = lora_root
        self._fetch_adapter = fetch_adapter
        self._wakeup = wakeup
        self._sleep_level: int | None = None
        # Those of SLEEP_TAGS that are not awake.
        self._asleep: set[str] = set()
        self._is_draining = False
        # The step that ends the running profile, and the trace of one that has ended by itself.
        self._profile_end: int | None = None
        self._profile_path: str | None = None

    @property
    def state(self) -> EngineState:
        """May be read on any thread."""
        return EngineState(is_paused=self._is_paused, sleep_level=self._sleep_level)

    @property
    def adapters(self) -> LoRAAdapters:
        """What requests may name. May be read on any thread."""
        return self._adapters.listed

    # ---- the verbs

    async def pause(self, verb: Pause) -> None:
        with self._undone_on_failure():
            await self._pause(verb.mode)
            if verb.clear_cache:
                await self._settle(verb.mode)
                self._reset_prefix_cache()

    async def resume(self, verb: Resume) -> None:
        """Raises FailedPreconditionError unless paused and awake."""
        self._check_awake()
        if not self._is_paused:
            raise FailedPreconditionError("not paused")
        self._core.scheduler.pause_state = PauseState.UNPAUSED

    async def sleep(self, verb: Sleep) -> int:
        """Raises FailedPreconditionError while KV blocks are held."""
        with self._undone_on_failure():
            await self._pause(verb.mode)
            if verb.level == 0:
                self._asleep = {"scheduling"}
                self._sleep_level = 0
                return 0
            if verb.mode is PauseMode.ABORT:
                self.end_sessions()
            await self._settle(verb.mode)
            return self._give_memory_back(verb.level)

    async def wake_up(self, verb: WakeUp) -> None:
        """Raises FailedPreconditionError if awake, if "scheduling" would come before memory, or,
        for a later try, if the weights cannot be read or memory has been taken meanwhile;
        KVTransferError, the end of this worker, if the pool cannot be registered again.
        """
        wanted = set(verb.tags or SLEEP_TAGS)
        if self._sleep_level is None:
            raise FailedPreconditionError("not asleep")
        missing = self._asleep - wanted - {"scheduling"}
        if "scheduling" in wanted and missing:
            raise FailedPreconditionError(
                f"scheduling needs {' and '.join(sorted(missing))}, still asleep"
            )
        for tag in SLEEP_TAGS:
            if tag in wanted & self._asleep:
                self._wake(tag)
                self._asleep.remove(tag)

    async def reset_prefix_cache(self, verb: ResetPrefixCache) -> int:
        """Raises FailedPreconditionError while blocks are held."""
        return self._reset_prefix_cache(keeps_tiers=verb.keeps_tiers)

    async def profile(self, verb: Profile) -> str:
        """Record up to MAX_PROFILE_STEPS steps. Raises FailedPreconditionError if a profile is
        running or its folder cannot be had; at the stop, if there is none or it cannot be written.
        """
        if not verb.start:
            return self._stop_profile()
        self._core.wait_for(
            self._core.executor.collective_rpc_behind_steps(rank_calls.StartProfile())
        )
        self._profile_end = self._core.step_seq + MAX_PROFILE_STEPS
        self._profile_path = None
        return ""

    async def add_lora(self, verb: AddLora) -> LoRAAdapter:
        """Raises FailedPreconditionError while asleep, where adapters are not loaded or have no
        room, and if the hub does not answer; InvalidRequestError for what is no adapter of the
        model.
        """
        self._check_awake()
        lora, store = verb.lora_request, self._adapters.store
        if store is None:
            raise FailedPreconditionError(_NO_ROOT)
        try:
            folder = await self._adapter_folder(lora)
            reading = store.read(folder)
            try:
                adapter = await self._read_adapter(lora, folder, reading)
                path = lora.lora_path or lora.lora_name
                return self._adapters.add(
                    lora.lora_name, adapter, path, keep_others=verb.keep_others
                )
            finally:
                store.discard(reading)
        except HubUnreachableError as error:
            raise FailedPreconditionError(str(error)) from error
        except LoraError as error:
            raise InvalidRequestError(str(error), field="lora_request") from error

    async def _read_adapter(
        self, lora: LoRARequest, folder: Path, reading: "Future[PackedAdapter]"
    ) -> PackedAdapter:
        """Raises LoraError without the folder's place: routers' clients get to read it."""
        await self._until_done(reading)
        try:
            what = f"adapter {lora.lora_name!r}"
            with _defect_is_refused(lora.lora_name, "read"), _out_of_memory_is_refused(what):
                adapter = reading.result()
        except LoraError as error:
            logger.warning("adapter %r is refused: %s", lora.lora_name, error)
            shown = lora.lora_path or lora.lora_name
            raise LoraError(str(error).replace(str(folder), shown)) from error
        if lora.digest not in ("", adapter.digest):
            raise LoraError(f"digest is {lora.digest[:64]!r}, the folder's is {adapter.digest}")
        return adapter

    async def _adapter_folder(self, lora: LoRARequest) -> Path:
        """Return the folder that a request names, downloaded if it is the hub's. Raises LoraError,
        and FailedPreconditionError where such folders are not loaded.
        """
        path = lora.lora_path or lora.lora_name
        if not is_hub_path(path):
            if self._lora_root is None:
                raise FailedPreconditionError(_NO_ROOT)
            return folder_below(self._lora_root, path)
        if self._fetch_adapter is None:
            raise FailedPreconditionError(
                f"lora_path is {path[:MAX_SHOWN]!r}, lora_hub is off: nothing is loaded from the "
                "hub here"
            )
        try:
            hub_path = HubPath.parse(path)
        except ValueError as error:
            raise LoraError(f"lora_path is {error}") from error
        fetch = self._fetch_adapter(hub_path)
        try:
            await self._until_done(fetch.future)
            with _defect_is_refused(lora.lora_name, "downloaded"):
                return fetch.future.result()
        finally:
            fetch.cancel()  # whoever asked may have given up

    async def _until_done(self, future: "Future[Any]") -> None:
        future.add_done_callback(lambda _: self._wakeup())
        await Wait(future.done)

    async def remove_lora(self, verb: RemoveLora) -> None:
        """Raises FailedPreconditionError if there is none of that name, or digest."""
        self._adapters.remove(verb.lora_name, verb.digest)

    async def list_loras(self, verb: ListLoras) -> tuple[LoadedLoRA, ...]:
        return self._adapters.loaded()

    async def pin_lora(self, verb: PinLora) -> None:
        """Raises FailedPreconditionError if there is none of that name."""
        self._adapters.pin(verb.lora_name)

    async def unpin_lora(self, verb: UnpinLora) -> None:
        """Raises FailedPreconditionError if there is none of that name."""
        self._adapters.unpin(verb.lora_name)

    # ---- between verbs

    def end_full_profile(self) -> None:
        """End a profile that has its steps; call it after every step."""
        if self._profile_end is None or self._core.step_seq < self._profile_end:
            return
        with defects.contained("profiler", "a profile"):
            try:
                self._profile_path = self._stop_profile()
            except FailedPreconditionError as error:
                logger.warning("%s", error)
            else:
                logger.info("profiled %d steps: %s", MAX_PROFILE_STEPS, self._profile_path)

    def end_for_drain(self) -> None:
        """Let what was accepted finish. What waits while memory is asleep cannot: it goes back."""
        self._is_draining = True
        if self._asleep - {"scheduling"}:
            self._core.hand_back()
            return
        self._asleep.clear()
        self._sleep_level = None
        self._core.scheduler.pause_state = PauseState.UNPAUSED

    # ---- pausing

    async def _pause(self, mode: PauseMode) -> None:
        """Start nothing new and wait for what `mode` waits for."""
        self._check_awake()
        scheduler = self._core.scheduler
        if mode is PauseMode.ABORT:
            self._core.abort_requests(list(scheduler.requests))
        is_keep = mode is PauseMode.KEEP
        scheduler.pause_state = PauseState.PAUSED_ALL if is_keep else PauseState.PAUSED_NEW
        if not is_keep:
            await Wait(self._is_quiet)

    async def _settle(self, mode: PauseMode) -> None:
        """Leave sessions and READs the time to end. What needs them to be over says itself if they
        are not.
        """
        if mode is not PauseMode.KEEP:
            await Wait(self._is_empty, SETTLE_TIMEOUT_S)

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Go on as before if the verb fails or is given up. An engine that sleeps stays so, and a
        drain ends all pauses.
        """
        with ExitStack() as undo:
            undo.callback(self._go_on, self._core.scheduler.pause_state)
            yield
            undo.pop_all()

    def _go_on(self, before: PauseState) -> None:
        if self._sleep_level is None and not self._is_draining:
            self._core.scheduler.pause_state = before

    def _check_awake(self) -> None:
        if self._sleep_level is not None:
            raise FailedPreconditionError(f"asleep at level {self._sleep_level}: wake it up first")

    @property
    def _is_paused(self) -> bool:
        return self._core.scheduler.pause_state is not PauseState.UNPAUSED

    # ---- blocks and memory

    def _is_quiet(self) -> bool:
        """Is no step and no pull under way, and no request half done?"""
        return not self._core.scheduler.has_admitted_requests()

    def _is_empty(self) -> bool:
        """Is it quiet, and does nobody hold a KV block: no request, no KV session, no READ?"""
        return self._is_quiet() and not self._num_held_blocks

    def _check_empty(self, verb: str) -> None:
        """Raise FailedPreconditionError, with numbers, unless _is_empty."""
        if self._is_empty():
            return
        scheduler = self._core.scheduler
        raise FailedPreconditionError(
            f"cannot {verb}: {self._num_held_blocks} KV blocks are held, "
            f"{len(scheduler.running) + len(scheduler.containers.kv_ready)} requests are running, "
            f"{scheduler.num_open_sessions} KV sessions are open"
        )

    def end_sessions(self) -> None:
        """End all KV sessions, so that their blocks come back (rule K3)."""
        self._core.scheduler.fence_all("sleep")

    def _give_memory_back(self, level: int) -> int:
        """Fall asleep; the engine is paused. Return the number of bytes."""
        self._core.finish_steps()
        self._core.scheduler.cancel_stores()
        self._check_empty("sleep")
        # Early announcements of peers end too: their blocks would be others' after a wake-up.
        self.end_sessions()
        self._core.scheduler.kv.block_pool.reset_prefix_cache()
        self._core.scheduler.encoder_cache.reset()
        self._core.scheduler.pause_state = PauseState.PAUSED_ALL
        self._asleep = set(SLEEP_TAGS)
        self._sleep_level = level
        keeps_pool = self._transfer is not None and not self._transfer.suspend()
        return sum(self._core.executor.collective_rpc(rank_calls.SleepRank(level, keeps_pool)))

    def _reset_prefix_cache(self, *, keeps_tiers: bool = False) -> int:
        self._core.finish_steps()
        scheduler = self._core.scheduler
        num_cached = scheduler.kv.block_pool.num_cached_blocks
        scheduler.cancel_stores()
        self._check_empty("reset the prefix cache")
        scheduler.reset_prefix_cache(keeps_tiers=keeps_tiers)
        return num_cached

    def _wake(self, tag: str) -> None:
        try:
            with _out_of_memory_is_refused(tag):
                if tag == "weights":
                    self._core.executor.collective_rpc(rank_calls.RestoreWeights())
                elif tag == "kv_cache":
                    self._core.executor.collective_rpc(rank_calls.RestoreKVCache())
                    if self._transfer is not None:
                        self._transfer.resume()
                else:
                    self._sleep_level = None
                    self._core.scheduler.pause_state = PauseState.UNPAUSED
        except (OSError, ValueError) as error:
            raise FailedPreconditionError(f"cannot read the weights: {error}") from error

    @property
    def _num_held_blocks(self) -> int:
        pool = self._core.scheduler.kv.block_pool
        return pool.num_blocks - pool.num_free_blocks

    def _stop_profile(self) -> str:
        """Return the path of the trace, also of one that ended by itself."""
        self._profile_end = None
        path, self._profile_path = self._profile_path, None
        if path:
            return path
        stopping = self._core.executor.collective_rpc_behind_steps(rank_calls.StopProfile())
        return self._core.wait_for(stopping)[0]


@contextmanager
def _defect_is_refused(lora_name: str, what: str) -> Iterator[None]:
    """Raise LoraError for what nobody expected: nothing of the adapter is in the engine yet."""
    try:
        yield
    except (PdserveError, LoraError):
        raise
    except BaseException as error:  # of a file's reader, in Rust too: the verb fails, no more
        defects.record("adapters", error, f"adapter {lora_name!r}")
        raise LoraError(
            f"adapter {lora_name!r} cannot be {what}: {type(error).__name__}, see the worker's log"
        ) from error


@contextmanager
def _out_of_memory_is_refused(what: str) -> Iterator[None]:
    """Raise FailedPreconditionError for the RuntimeError of one of torch's allocators."""
    try:
        yield
    except RuntimeError as error:
        reason = out_of_memory_reason(error)
        if reason is None:
            raise
        message = f"no memory for {what}: {reason}; free some and try again"
        raise FailedPreconditionError(message) from error


HANDLERS: Handlers[EngineControl] = dict(
    [
        Pause.handled_by(EngineControl.pause),
        Resume.handled_by(EngineControl.resume),
        Sleep.handled_by(EngineControl.sleep),
        WakeUp.handled_by(EngineControl.wake_up),
        ResetPrefixCache.handled_by(EngineControl.reset_prefix_cache),
        Profile.handled_by(EngineControl.profile),
        AddLora.handled_by(EngineControl.add_lora),
        RemoveLora.handled_by(EngineControl.remove_lora),
        ListLoras.handled_by(EngineControl.list_loras),
        PinLora.handled_by(EngineControl.pin_lora),
        UnpinLora.handled_by(EngineControl.unpin_lora),
    ]
)
