"""Requests of steps that failed: they run one by one until each has brought a token, so that only
the one at fault fails.
"""

from collections.abc import Iterable

from pdserve_engine.core.handoff.prefill_grant_requests import RemoteDecodes
from pdserve_engine.request.request import Request


class IsolatedRequests:
    """Those that are still to be tried, the next one first."""

    def __init__(self, remote_decodes: RemoteDecodes) -> None:
        self._remote_decodes = remote_decodes
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def next(self) -> Request | None:
        """Return the first one that need not wait for another worker."""
        return next((r for r in self._requests if r not in self._remote_decodes), None)

    def put_first(self, request: Request) -> None:
        self._requests.insert(0, request)

    def note_failed(self, requests: Iterable[Request]) -> None:
        """Add those of a step that failed; earlier ones are still to be tried."""
        self._requests = list(dict.fromkeys((*self._requests, *requests)))

    def remove(self, request: Request) -> None:
        """Forget one that has brought a token or is over, if it is here."""
        if request in self._requests:
            self._requests.remove(request)
