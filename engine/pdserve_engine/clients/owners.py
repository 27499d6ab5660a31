"""Which front end each request of an engine belongs to, and at which attempt."""

from collections.abc import Iterable
from typing import NamedTuple

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.engine import EngineCoreOutput, EngineCoreRequest

# The owner of requests whose front end is gone and that have not ended yet.
_NOBODY = -1


class _Owner(NamedTuple):
    client_index: int
    attempt: int


class RequestOwners:
    """The requests that are not finished. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._owners

    def add(self, request: EngineCoreRequest) -> None:
        """Note a new request, or the higher attempt of a front end's own, or of one that is gone:
        it may be the same that has come back. Raises InvalidRequestError if the id is in use
        otherwise.
        """
        owner = self._owners.get(request.request_id)
        new = _Owner(request.client_index, request.attempt)
        if owner is not None and not _supersedes(new, owner):
            # An answer under this id would end the one that is running.
            message = f"request_id {request.request_id!r} is running already"
            raise InvalidRequestError(message, field="request_id")
        self._owners[request.request_id] = new

    def is_anothers(self, request_id: str, client_index: int) -> bool:
        owner = self._owners.get(request_id)
        return owner is not None and owner.client_index != client_index

    def of_client(self, client_index: int) -> list[str]:
        """Return the ids of a front end's requests."""
        return [rid for rid, owner in self._owners.items() if owner.client_index == client_index]

    def disown(self, client_index: int) -> None:
        """A front end is gone, and its requests have been aborted."""
        for request_id in self.of_client(client_index):
            owner = self._owners[request_id]
            self._owners[request_id] = owner._replace(client_index=_NOBODY)

    def release(self, request_id: str, attempt: int) -> None:
        """The request has ended at this attempt."""
        owner = self._owners.get(request_id)
        if owner is not None and owner.attempt == attempt:
            del self._owners[request_id]

    def release_ended(self, outputs: Iterable[EngineCoreOutput]) -> tuple[EngineCoreOutput, ...]:
        """Release what has ended; return the outputs without those of superseded attempts."""
        owners = self._owners
        current = tuple(
            output
            for output in outputs
            if (owner := owners.get(output.request_id)) is None or output.attempt >= owner.attempt
        )
        for output in current:
            if output.finish_reason is not None:
                self.release(output.request_id, output.attempt)
        return current

    def clear(self) -> None:
        """The engine has ended."""
        self._owners.clear()


def _supersedes(new: _Owner, old: _Owner) -> bool:
    return old.client_index in (new.client_index, _NOBODY) and new.attempt > old.attempt
