"""Constraints that were checked already, so that one that comes again costs next to nothing."""

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import StructuralTag, check_bounds, to_structural_tag
from pdserve_common.structured.tags import Format
from pdserve_common.types.sampling_params import StructuredOutputsParams

MAX_ENTRIES = 4096
MAX_BYTES = 32 * 1024 * 1024
DIGEST_BYTES = 32


def digest_of(params: StructuredOutputsParams, before: Sequence[Format] = ()) -> bytes:
    """Return the SHA-256 of a constraint as it was asked for, and of what comes before it.
    `check_bounds` comes first: it may have any size.
    """
    text = json.dumps((dataclasses.astuple(params), *before))
    return hashlib.sha256(text.encode()).digest()


class AcceptedConstraints:
    """Digests of the latest constraints that are enforced. Those that are refused are checked
    again. Not thread-safe.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, params: StructuredOutputsParams) -> bool:
        try:
            check_bounds(params)
        except InvalidRequestError:
            return False
        digest = digest_of(params)
        if digest in self._digests:
            self._digests.move_to_end(digest)
        return digest in self._digests

    def check(self, params: StructuredOutputsParams, *, field: str | None) -> None:
        """Raise InvalidRequestError as `to_structural_tag` does, for one that is not known."""
        if params not in self:
            to_structural_tag(params, field=field)
            self.add(digest_of(params))

    def add(self, digest: bytes) -> None:
        """Note one that was checked, here or elsewhere."""
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self._max_entries:
            self._digests.popitem(last=False)


class StructuralTags:
    """The structural tags of the latest constraints, by their digests and up to a number of bytes.
    Not thread-safe.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tags: OrderedDict[str, StructuralTag] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, digest: str) -> StructuralTag | None:
        if digest in self._tags:
            self._tags.move_to_end(digest)
        return self._tags.get(digest)

    def put(self, digest: str, tag: StructuralTag) -> None:
        """Keep the tag of a constraint; no-op if it is kept."""
        if digest in self._tags:
            return
        self._tags[digest] = tag
        self._num_bytes += _num_bytes(tag)
        while self._num_bytes > self._max_bytes:
            _, forgotten = self._tags.popitem(last=False)
            self._num_bytes -= _num_bytes(forgotten)


def _num_bytes(tag: StructuralTag) -> int:
    return len(tag.text) + DIGEST_BYTES
