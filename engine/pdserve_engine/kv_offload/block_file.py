"""The file of one KV block: a header that says what it is, then its bytes.

Written under another name and renamed, so that a name stands for a whole file. Read with a check of
all the header says; nothing in it is trusted, nothing is unpickled.
"""

import contextlib
import os
import re
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdserve_engine.kv.block_copier import BlockBytes

# Magic with the format's version, the block's hash, what of engines must be equal (SHA-256), dtype,
# number of bytes, their CRC-32.
_HEADER = struct.Struct("<8s32s32s16sQI")
_MAGIC = b"PDSVKV\0\1"
SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})\.(?:kv|tmp)")


class BlockMismatchError(ValueError):
    """The file is not what its name says, or has been cut or changed."""


class BlockName(NamedTuple):
    """What a file's name says."""

    block_hash: bytes
    # The hash of the block before.
    parent: bytes

    def __str__(self) -> str:
        return f"{self.block_hash.hex()}-{self.parent.hex()}{SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> "BlockName | None":
        """Return None for a name that we have not given. The suffix may be either."""
        match = _NAME.fullmatch(name)
        return match and cls(*map(bytes.fromhex, match.groups()))


class BlockFormat(NamedTuple):
    """What all block files of an engine have in common."""

    # SHA-256.
    digest: bytes
    dtype: str
    block_bytes: int

    @property
    def file_bytes(self) -> int:
        return _HEADER.size + self.block_bytes

    def write(self, path: Path, block_hash: bytes, content: BlockBytes) -> None:
        """Store a block, uint8 [block_bytes]. Raises OSError, and then leaves nothing behind, as
        far as that can be.
        """
        temporary = path.with_suffix(TEMPORARY_SUFFIX)
        try:
            with temporary.open("wb", buffering=0) as file:
                self._write_all(file.fileno(), self._header(block_hash, content), content)
            temporary.replace(path)
        except OSError:
            remove(temporary)
            raise

    def read(self, path: Path, block_hash: bytes) -> BlockBytes:
        """Return a block, uint8 [block_bytes]. Raises OSError if the file cannot be read,
        BlockMismatchError if it is another one.
        """
        # Not where a link leads, and not waiting for whoever opens the other end of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            if size != self.file_bytes:
                raise BlockMismatchError(f"{size} bytes, must be {self.file_bytes}")
            data = np.empty(self.file_bytes, dtype=np.uint8)
            num_read = 0
            while num_read < self.file_bytes and (more := file.readinto(data[num_read:].data)):
                num_read += more
        header, content = data[: _HEADER.size], data[_HEADER.size :]
        if num_read < self.file_bytes or header.tobytes() != self._header(block_hash, content):
            raise BlockMismatchError("header or checksum are others")
        content.flags.writeable = False
        return content

    def _header(self, block_hash: bytes, content: BlockBytes) -> bytes:
        dtype = self.dtype.encode()[:16]
        checksum = zlib.crc32(content.data)
        return _HEADER.pack(_MAGIC, block_hash, self.digest, dtype, self.block_bytes, checksum)

    def _write_all(self, descriptor: int, header: bytes, content: BlockBytes) -> None:
        left = [memoryview(header), content.data]
        while left:
            num_written = os.writev(descriptor, left)
            while left and num_written >= len(left[0]):
                num_written -= len(left.pop(0))
            if left:
                left[0] = left[0][num_written:]


def remove(path: Path) -> None:
    """Delete a file, if it is there and that can be done."""
    # It is not used again in any case: its name, or its content, is checked.
    with contextlib.suppress(OSError):
        path.unlink()
