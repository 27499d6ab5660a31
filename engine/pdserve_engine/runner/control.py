"""Pauses an engine, puts it to sleep and wakes it up, between two steps. Owned by the engine
thread.
"""

import logging
from collections.abc import Sequence

from pdserve_common.engine_client import MAX_SLEEP_LEVEL, SLEEP_TAGS, EngineState
from pdserve_common.engine_types import PauseMode
from pdserve_common.errors import FailedPreconditionError, InvalidRequestError
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.scheduler import PauseState
from pdserve_engine.kv.memory import out_of_memory_reason

logger = logging.getLogger(__name__)

# To take a profile in holds up all threads of the process, by some 10 ms for each of its steps:
# heartbeats still come in time.
MAX_PROFILE_STEPS = 50


class EngineControl:
    """The verbs of an operator, each done at once or refused with a typed error.

    What a verb has to wait for (`is_quiet`, `is_empty`) its caller waits for, while steps go on.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
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

    # ---- what verbs wait for

    def is_quiet(self) -> bool:
        """Is no step and no pull under way, and no request half done?"""
        return not self._core.scheduler.has_admitted_requests()

    def is_empty(self) -> bool:
        """Is it quiet, and does nobody hold a KV block: no request, no KV session, no READ?"""
        return self.is_quiet() and not self._num_held_blocks

    def check_empty(self, verb: str) -> None:
        """Raise FailedPreconditionError, with numbers, unless is_empty."""
        if self.is_empty():
            return
        scheduler = self._core.scheduler
        raise FailedPreconditionError(
            f"cannot {verb}: {self._num_held_blocks} KV blocks are held, "
            f"{len(scheduler.running) + len(scheduler.kv_ready)} requests are running, "
            f"{scheduler.num_open_sessions} KV sessions are open"
        )

    # ---- the verbs

    def pause(self, mode: PauseMode) -> PauseState:
        """Start nothing new and return what to `undo_pause` to. Raises FailedPreconditionError
        while asleep.
        """
        if self._sleep_level is not None:
            raise FailedPreconditionError(f"asleep at level {self._sleep_level}: wake it up first")
        scheduler = self._core.scheduler
        before = scheduler.pause_state
        if mode is PauseMode.ABORT:
            self._core.abort_requests(list(scheduler.requests))
        is_keep = mode is PauseMode.KEEP
        scheduler.pause_state = PauseState.PAUSED_ALL if is_keep else PauseState.PAUSED_NEW
        return before

    def undo_pause(self, before: PauseState) -> None:
        """A verb has failed after `pause`: go on as before. An engine that sleeps stays so, and a
        drain has ended all pauses.
        """
        if self._sleep_level is None and not self._is_draining:
            self._core.scheduler.pause_state = before

    def resume(self) -> None:
        """Raises FailedPreconditionError unless paused and awake."""
        if self._sleep_level is not None:
            raise FailedPreconditionError(f"asleep at level {self._sleep_level}: wake it up")
        if not self._is_paused:
            raise FailedPreconditionError("not paused")
        self._core.scheduler.pause_state = PauseState.UNPAUSED

    def end_sessions(self) -> None:
        """End all KV sessions, so that their blocks come back (rule K3)."""
        self._core.scheduler.fence_all("sleep")

    def sleep(self, level: int) -> int:
        """Give memory back and return how many bytes; the engine is paused. Raises
        FailedPreconditionError while KV blocks are held.
        """
        if level == 0:
            self._asleep = {"scheduling"}
            self._sleep_level = level
            return 0
        self._core.finish_steps()
        self.check_empty("sleep")
        # Early announcements of peers end too: their blocks would be others' after a wake-up.
        self.end_sessions()
        self._core.scheduler.kv.block_pool.reset_prefix_cache()
        self._core.scheduler.pause_state = PauseState.PAUSED_ALL
        self._asleep = set(SLEEP_TAGS)
        self._sleep_level = level
        return self._core.executor.sleep(level)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Wake those of SLEEP_TAGS named, or all. Raises InvalidRequestError for an unknown tag
        and FailedPreconditionError if awake, if "scheduling" would come before memory, or, for a
        later try, if the weights cannot be read or memory has been taken meanwhile.
        """
        wanted = check_tags(tags)
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

    def reset_prefix_cache(self) -> int:
        """Forget all prefixes; how many blocks held one. Raises FailedPreconditionError while
        blocks are held.
        """
        self._core.finish_steps()
        pool = self._core.scheduler.kv.block_pool
        num_cached = pool.num_cached_blocks
        self.check_empty("reset the prefix cache")
        pool.reset_prefix_cache()
        return num_cached

    def start_profile(self) -> None:
        """Record up to MAX_PROFILE_STEPS steps. Raises FailedPreconditionError if a profile is
        running or its folder cannot be had.
        """
        self._core.wait_for(self._core.executor.start_profile())
        self._profile_end = self._core.step_seq + MAX_PROFILE_STEPS
        self._profile_path = None

    def stop_profile(self) -> str:
        """Return the path of the trace, also of one that ended by itself. Raises
        FailedPreconditionError if there is none or it cannot be written.
        """
        self._profile_end = None
        path, self._profile_path = self._profile_path, None
        return path or self._core.wait_for(self._core.executor.stop_profile())

    def end_full_profile(self) -> None:
        """End a profile that has its steps; call it after every step."""
        if self._profile_end is None or self._core.step_seq < self._profile_end:
            return
        try:
            self._profile_path = self.stop_profile()
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

    def _wake(self, tag: str) -> None:
        try:
            if tag == "weights":
                self._core.executor.restore_weights()
            elif tag == "kv_cache":
                self._core.executor.restore_kv_cache()
            else:
                self._sleep_level = None
                self._core.scheduler.pause_state = PauseState.UNPAUSED
        except RuntimeError as error:
            reason = out_of_memory_reason(error)
            if reason is None:
                raise
            message = f"no memory for {tag}: {reason}; free some and wake it up again"
            raise FailedPreconditionError(message) from error
        except (OSError, ValueError) as error:
            raise FailedPreconditionError(f"cannot read the weights: {error}") from error

    @property
    def _is_paused(self) -> bool:
        return self._core.scheduler.pause_state is not PauseState.UNPAUSED

    @property
    def _num_held_blocks(self) -> int:
        pool = self._core.scheduler.kv.block_pool
        return pool.num_blocks - pool.num_free_blocks


def check_level(level: int) -> None:
    """Raise InvalidRequestError for a sleep level that there is not."""
    if not 0 <= level <= MAX_SLEEP_LEVEL:
        raise InvalidRequestError(
            f"level is {level}, must be 0 to {MAX_SLEEP_LEVEL}", field="level"
        )


def check_tags(tags: Sequence[str]) -> set[str]:
    """Return what to wake up. Raises InvalidRequestError for an unknown tag."""
    for tag in tags:
        if tag not in SLEEP_TAGS:
            raise InvalidRequestError(
                f"tags has {tag[:32]!r}, known tags are {', '.join(SLEEP_TAGS)}", field="tags"
            )
    return set(tags or SLEEP_TAGS)
