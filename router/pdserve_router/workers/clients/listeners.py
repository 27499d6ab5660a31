"""Who takes what one worker brings: requests by their names, and by the handles of tokens."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pdserve_common.observability import defects
from pdserve_common.types.engine import EngineCoreOutput, EngineCoreRequest

OutputCallback = Callable[[EngineCoreOutput], None]
# Takes a token, its index in the answer and the time (ns), or returns False.
TokenCallback = Callable[[int, int, int], bool]


def no_token(token_id: int, index: int, now_ns: int) -> bool:
    """Take none: each comes as an output."""
    return False


class Listener(NamedTuple):
    """A request at one attempt."""

    request_id: str
    attempt: int
    handle: int
    on_output: OutputCallback
    on_defect: Callable[[], None]
    take_token: TokenCallback


class Listeners:
    """The requests that run on a worker. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._by_request: dict[str, Listener] = {}
        self._by_handle: dict[int, Listener] = {}
        self._last_handle = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        return len(self._by_request)

    def attempts(self) -> Mapping[str, int]:
        """Return the requests and their attempts."""
        return {name: listener.attempt for name, listener in self._by_request.items()}

    def has(self, request: EngineCoreRequest) -> bool:
        """Is it running, at this attempt?"""
        return self.attempt_of(request.request_id) == request.attempt

    def attempt_of(self, request_id: str) -> int | None:
        listener = self._by_request.get(request_id)
        return listener.attempt if listener is not None else None

    async def wait_until_none(self) -> None:
        """Return when there is none. As bounded as the requests' deadlines are."""
        await self._is_idle.wait()

    def add(
        self,
        request: EngineCoreRequest,
        on_output: OutputCallback,
        on_defect: Callable[[], None],
        take_token: TokenCallback,
    ) -> int:
        """Take an attempt, in place of an earlier one of the same request; return its handle, which
        no other one ever has.
        """
        if (replaced := self._by_request.get(request.request_id)) is not None:
            del self._by_handle[replaced.handle]
        handle = self._last_handle = self._last_handle + 1
        listener = Listener(
            request.request_id, request.attempt, handle, on_output, on_defect, take_token
        )
        self._by_request[request.request_id] = self._by_handle[handle] = listener
        self._is_idle.clear()
        return handle

    def forget(self, request_id: str) -> None:
        """Its callbacks are not called any more."""
        listener = self._by_request.pop(request_id, None)
        if listener is not None:
            del self._by_handle[listener.handle]
        if not self._by_request:
            self._is_idle.set()

    def dispatch_tokens(self, rows: Iterable[tuple[int, int, int]], now_ns: int) -> int:
        """Pass on tokens that came alone: each with its handle and its index. Returns how many were
        taken as such; the others go on as outputs. Most tokens come this way: what is done here is
        done for each of them.
        """
        num_taken = 0
        for handle, token_id, index in rows:
            # Unknown ones were under way when the request was aborted or sent again.
            listener = self._by_handle.get(handle)
            if listener is None:
                continue
            try:
                is_taken = listener.take_token(token_id, index, now_ns)
            except Exception as error:
                self._on_defect(listener, error)
                continue
            num_taken += is_taken
            if not is_taken:
                self.dispatch(_as_output(listener, token_id, index))
        return num_taken

    def dispatch(self, output: EngineCoreOutput) -> None:
        """Pass on an output; its request is forgotten with the last one."""
        # Unknown ids and other attempts were under way when the request was aborted or sent again.
        listener = self._by_request.get(output.request_id)
        if listener is None or listener.attempt != output.attempt:
            return
        try:
            if output.finished:
                self.forget(output.request_id)
            listener.on_output(output)
        except Exception as error:
            self._on_defect(listener, error)

    def _on_defect(self, listener: Listener, error: Exception) -> None:
        """A defect while taking one request's output must not end the others' stream."""
        defects.record("requests", error, f"request {listener.request_id}")
        self.forget(listener.request_id)
        listener.on_defect()


def _as_output(listener: Listener, token_id: int, index: int) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=listener.request_id,
        attempt=listener.attempt,
        new_token_ids=(token_id,),
        first_token_index=index,
    )
