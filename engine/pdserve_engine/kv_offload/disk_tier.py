"""A tier on a disk of this machine: a folder with a file for each block, found again by the worker
that starts next.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from pdserve_engine.kv.block_copier import BlockBytes
from pdserve_engine.kv_offload.block_file import (
    BlockFormat,
    BlockMismatchError,
    BlockName,
    remove,
)
from pdserve_engine.kv_offload.prefix_index import PrefixIndex
from pdserve_engine.kv_offload.tier import BadReason, OnBad

logger = logging.getLogger(__name__)

# Below the path: a folder for each digest. Only one is in use.
_FOLDER = re.compile(r"blocks-[0-9a-f]{64}")
_LOCK = "lock"


class _Found(NamedTuple):
    mtime_ns: int
    name: BlockName


class DiskTier:
    """A KVTier in a folder that one process uses at a time."""

    name = "disk"

    def __init__(
        self, path: Path, *, num_bytes: int, block_format: BlockFormat, on_bad: OnBad
    ) -> None:
        """Find what an earlier process has left of the same format; folders of others are deleted.
        A disk that cannot be written is a tier that stores nothing. Raises ValueError if another
        process uses the path, or `num_bytes` do not hold a block.
        """
        capacity = num_bytes // block_format.file_bytes
        if not capacity:
            raise ValueError(
                f"kv_offload_disk_bytes is {num_bytes}, a KV block takes {block_format.file_bytes}"
            )
        self._format = block_format
        self._on_bad = on_bad
        self._folder = path / f"blocks-{block_format.digest.hex()}"
        self._lock = threading.Lock()
        # Held while a file is written: files may be read meanwhile.
        self._write_lock = threading.Lock()
        self._index = PrefixIndex(capacity)
        self._lock_file: IO[bytes] | None = None
        self.is_writable = True
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_file = _lock(path / _LOCK)
            self._delete_others()
            self._find_blocks()
        except OSError as error:
            self._stop_writing(error)

    @property
    def used_bytes(self) -> int:
        return len(self._index) * self._format.file_bytes

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._index

    def put(
        self,
        block_hash: bytes,
        parent: bytes,
        content: BlockBytes,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        with self._write_lock:
            return self._put(block_hash, parent, content, is_wanted)

    def _put(
        self,
        block_hash: bytes,
        parent: bytes,
        content: BlockBytes,
        is_wanted: Callable[[], bool],
    ) -> bool:
        if not self.is_writable or not is_wanted() or not self._make_room(block_hash, parent):
            return False
        path = self._folder / str(BlockName(block_hash, parent))
        try:
            self._format.write(path, block_hash, content)
        except OSError as error:
            self._stop_writing(error)
            return False
        with self._lock:
            if is_wanted():
                self._index.add(block_hash, parent)
                return True
            remove(path)
            return False

    def get(self, block_hash: bytes) -> BlockBytes | None:
        with self._lock:
            path = self._path_of(block_hash)
            self._index.touch(block_hash)
        if path is None:
            return None
        reason: BadReason
        try:
            content = self._format.read(path, block_hash)
        except BlockMismatchError:
            reason = "mismatch"
        except FileNotFoundError:
            reason = "missing"
        except OSError:
            reason = "unreadable"
        else:
            _touch(path)
            return content
        if block_hash in self._index:  # else it was evicted while it was read
            self.discard(block_hash)
            self._on_bad(reason)
        return None

    def discard(self, block_hash: bytes) -> None:
        with self._lock:
            path = self._path_of(block_hash)
            if path is not None:
                self._index.discard(block_hash)
                remove(path)

    def clear(self) -> None:
        with self._lock:
            for block_hash in list(self._index):
                path = self._path_of(block_hash)
                assert path is not None
                remove(path)
            self._index.clear()

    def close(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()

    def _path_of(self, block_hash: bytes) -> Path | None:
        parent = self._index.parent_of(block_hash)
        return None if parent is None else self._folder / str(BlockName(block_hash, parent))

    def _make_room(self, block_hash: bytes, parent: bytes) -> bool:
        with self._lock:
            if block_hash in self._index:
                return False
            for evicted in self._index.evict_for(parent):
                remove(self._folder / str(BlockName(*evicted)))
            return len(self._index) < self._index.capacity

    def _stop_writing(self, error: OSError) -> None:
        self.is_writable = False
        logger.error(
            "KV blocks are stored on disk no more until a restart, what is there is still read: %s",
            error,
        )

    # ---- what an earlier process has left

    def _delete_others(self) -> None:
        """Blocks of other models and versions are never used, and would count for nobody."""
        for path in self._folder.parent.iterdir():
            if path != self._folder and _FOLDER.fullmatch(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def _find_blocks(self) -> None:
        """Index what is there, the last written or read last; delete what is half written, or of
        another size, or too much. Foreign names are left alone.
        """
        found = sorted(self._scan())
        capacity = self._index.capacity
        self._index.capacity = max(capacity, len(found))
        for _, name in found:
            if name.block_hash in self._index:  # written twice, behind other parents: impossible
                remove(self._folder / str(name))
            else:
                self._index.add(*name)
        self._index.capacity = capacity
        for evicted in self._index.evict_surplus():
            remove(self._folder / str(BlockName(*evicted)))
        if len(self._index):
            logger.info("found %d KV blocks in %s", len(self._index), self._folder)

    def _scan(self) -> Iterator[_Found]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                name = BlockName.parse(entry.name)
                if name is None or not entry.is_file(follow_symlinks=False):
                    continue
                stat = entry.stat(follow_symlinks=False)
                is_whole = stat.st_size == self._format.file_bytes
                if entry.name == str(name) and is_whole:
                    yield _Found(stat.st_mtime_ns, name)
                    continue
                if entry.name == str(name):  # else its process ended while it wrote
                    self._on_bad("mismatch")
                remove(Path(entry.path))


def _lock(path: Path) -> IO[bytes]:
    """Hold a file until it is closed, or the process ends."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"kv_offload_disk_path is {str(path.parent)!r}, which another process uses"
        ) from None
    return file


def _touch(path: Path) -> None:
    """Note for the next process that the block was used."""
    # If it is read-only, or was evicted meanwhile, it counts as older than it is.
    with contextlib.suppress(OSError):
        os.utime(path)
