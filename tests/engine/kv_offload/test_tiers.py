"""One suite for all tiers, and what only a disk can do."""

import errno
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdserve_common.tokens.block_hash import ROOT_HASH
from pdserve_engine.kv.block_copier import BlockBytes
from pdserve_engine.kv_offload.block_file import BlockFormat, BlockName
from pdserve_engine.kv_offload.disk_tier import DiskTier
from pdserve_engine.kv_offload.host_tier import HostTier
from pdserve_engine.kv_offload.prefix_index import PrefixIndex
from pdserve_engine.kv_offload.tier import KVTier
from support.samples import seeds

BLOCK_BYTES = 96
CAPACITY = 6
FORMAT = BlockFormat(digest=b"d" * 32, dtype="bfloat16", block_bytes=BLOCK_BYTES)

Bad = list[str]


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> BlockBytes:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def make_disk(path: Path, bad: Bad, block_format: BlockFormat = FORMAT) -> DiskTier:
    num_bytes = CAPACITY * block_format.file_bytes
    return DiskTier(path, num_bytes=num_bytes, block_format=block_format, on_bad=bad.append)


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> KVTier:
    if request.param == "disk":
        return make_disk(tmp_path, [])
    return HostTier(num_bytes=CAPACITY * BLOCK_BYTES, block_bytes=BLOCK_BYTES)


def put_chain(tier: KVTier, numbers: range) -> None:
    for number in numbers:
        parent = block_hash(number - 1) if number > numbers.start else ROOT_HASH
        assert tier.put(block_hash(number), parent, content(number))


def found(tier: KVTier, numbers: range) -> list[int]:
    """Those that are here, with what was stored."""
    here = [number for number in numbers if block_hash(number) in tier]
    for number in numbers:
        block = tier.get(block_hash(number))
        assert (block is not None) == (number in here)
        assert block is None or bytes(block) == bytes(content(number))
    return here


# ---- what all tiers do


def test_what_was_stored_is_found(tier: KVTier) -> None:
    put_chain(tier, range(1, 4))
    assert found(tier, range(1, 6)) == [1, 2, 3]
    assert tier.used_bytes >= 3 * BLOCK_BYTES
    assert not tier.put(block_hash(1), ROOT_HASH, content(1)), "it is here already"


def test_the_end_of_the_prefix_goes_that_was_not_used_for_longest(tier: KVTier) -> None:
    put_chain(tier, range(1, 4))
    put_chain(tier, range(11, 14))
    found(tier, range(1, 4))
    assert tier.put(block_hash(14), block_hash(13), content(14))
    assert tier.put(block_hash(15), block_hash(14), content(15))
    # The second prefix grows, so it is in use: of it nothing goes.
    assert found(tier, range(1, 4)) == [1]
    assert found(tier, range(11, 16)) == [11, 12, 13, 14, 15]


def test_what_is_not_wanted_any_more_is_not_stored(tier: KVTier) -> None:
    assert not tier.put(block_hash(1), ROOT_HASH, content(1), lambda: False)
    assert found(tier, range(1, 2)) == []
    assert tier.put(block_hash(1), ROOT_HASH, content(1))


def test_what_is_discarded_or_cleared_is_gone(tier: KVTier) -> None:
    put_chain(tier, range(1, 6))
    tier.discard(block_hash(2))
    tier.discard(block_hash(99))
    assert found(tier, range(1, 6)) == [1, 3, 4, 5]
    tier.clear()
    assert found(tier, range(1, 6)) == []
    assert tier.used_bytes == 0
    put_chain(tier, range(1, 6))


def test_a_random_life(tier: KVTier) -> None:
    """It has nothing that was not stored, no wrong byte, and not too much."""
    rng = random.Random(1)
    stored: set[int] = set()
    for _ in range(600):
        number = rng.randrange(1, 20)
        action = rng.randrange(10)
        if action < 6:
            parent = block_hash(number - 1) if number > 1 else ROOT_HASH
            if tier.put(block_hash(number), parent, content(number)):
                stored.add(number)
        elif action < 9:
            assert set(found(tier, range(number, number + 1))) <= stored
        else:
            tier.discard(block_hash(number))
            stored.discard(number)
        assert sum(block_hash(each) in tier for each in range(1, 20)) <= CAPACITY
    assert found(tier, range(1, 20))


# ---- which block goes


@pytest.mark.parametrize("seed", seeds(5))
def test_an_index_keeps_prefixes_whole(seed: int) -> None:
    """Of random trees of prefixes, whatever is used and added: no block loses its parent, and of
    those that nothing continues the one goes that was not used for longest.
    """
    rng = random.Random(seed)
    index = PrefixIndex(12)
    parents: dict[bytes, bytes] = {}
    used: dict[bytes, int] = {}
    for tick in range(2000):
        if rng.random() < 0.3 and parents:
            chosen = rng.choice(list(parents))
            index.touch(chosen)
            used[chosen] = tick
            continue
        parent = rng.choice([ROOT_HASH, *parents])
        leaves = parents.keys() - set(parents.values()) - {parent}
        expected = [min(leaves, key=lambda leaf: used[leaf])] if len(parents) == 12 else []
        evicted = index.evict_for(parent)
        assert [name for name, _ in evicted] == expected
        for name, its_parent in evicted:
            assert parents.pop(name) == its_parent
        name = block_hash(tick + 1)
        index.add(name, parent)
        parents[name], used[name] = parent, tick
        assert set(index) == parents.keys()
        index.check_integrity()


def test_a_block_that_is_lost_can_come_back() -> None:
    index = PrefixIndex(3)
    for number in (1, 2, 3):
        index.add(block_hash(number), block_hash(number - 1))
    assert index.discard(block_hash(2))
    index.check_integrity()
    index.add(block_hash(2), block_hash(1))
    index.check_integrity()
    assert index.evict_for(block_hash(2)) == [(block_hash(3), block_hash(2))]


# ---- what only a disk does


def test_a_restart_finds_what_was_used_last(tmp_path: Path) -> None:
    bad: Bad = []
    disk = make_disk(tmp_path, bad)
    put_chain(disk, range(1, 6))
    disk.close()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / "README").write_text("somebody's")
    (folder / str(BlockName(block_hash(9), ROOT_HASH))).write_bytes(b"cut")
    (folder / str(BlockName(block_hash(8), ROOT_HASH))).with_suffix(".tmp").write_bytes(b"half")
    again = make_disk(tmp_path, bad)
    assert bad == ["mismatch"]
    assert found(again, range(1, 10)) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".kv") == ["README"]
    assert len(list(folder.iterdir())) == 6
    again.close()
    smaller = DiskTier(
        tmp_path, num_bytes=2 * FORMAT.file_bytes, block_format=FORMAT, on_bad=bad.append
    )
    assert len(found(smaller, range(1, 10))) == 2
    smaller.close()


@pytest.mark.parametrize(
    "other",
    [
        FORMAT._replace(digest=b"e" * 32),
        FORMAT._replace(digest=b"e" * 32, dtype="float32", block_bytes=200),
    ],
)
def test_blocks_of_other_engines_go(tmp_path: Path, other: BlockFormat) -> None:
    first = make_disk(tmp_path, [], other)
    path = tmp_path / "mine"
    path.write_text("kept")
    assert first.put(block_hash(1), ROOT_HASH, np.zeros(other.block_bytes, dtype=np.uint8))
    first.close()
    second = make_disk(tmp_path, [])
    assert found(second, range(1, 2)) == []
    assert not list(tmp_path.rglob("*.kv"))
    assert path.read_text() == "kept"
    second.close()


@pytest.mark.parametrize("position", [0, 8, 40, 72, 88, 96, 100, 150])
def test_a_changed_byte_is_found(tmp_path: Path, position: int) -> None:
    """Of magic, hash, digest, dtype, size, checksum and content, also under the right name."""
    bad: Bad = []
    disk = make_disk(tmp_path, bad)
    put_chain(disk, range(1, 3))
    path = next(tmp_path.rglob(f"{block_hash(1).hex()}*.kv"))
    changed = bytearray(path.read_bytes())
    changed[position] ^= 0x10
    path.write_bytes(changed)
    assert disk.get(block_hash(1)) is None
    assert bad == ["mismatch"]
    assert found(disk, range(1, 3)) == [2]
    disk.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_cannot_be_written_is_still_read(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = make_disk(tmp_path, [])
    put_chain(disk, range(1, 3))

    def fail(*args: object) -> int:
        raise OSError(error, "fake")

    monkeypatch.setattr("os.writev", fail)
    for number in (3, 4):
        assert not disk.put(block_hash(number), block_hash(number - 1), content(number))
    monkeypatch.undo()
    assert not disk.is_writable
    assert not disk.put(block_hash(5), block_hash(4), content(5))
    assert found(disk, range(1, 6)) == [1, 2]
    assert len(caplog.records) == 1, "it says so once"
    assert not list(tmp_path.rglob("*.tmp"))
    disk.close()


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    write = os.writev
    monkeypatch.setattr("os.writev", lambda fd, parts: write(fd, [parts[0][:50]]))
    disk = make_disk(tmp_path, [])
    put_chain(disk, range(1, 3))
    assert found(disk, range(1, 3)) == [1, 2]
    disk.close()


def test_a_path_that_cannot_be_made_stores_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    disk = make_disk(tmp_path / "file" / "below", [])
    assert not disk.is_writable
    assert not disk.put(block_hash(1), ROOT_HASH, content(1))
    assert len(caplog.records) == 1
    disk.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: HostTier(num_bytes=BLOCK_BYTES - 1, block_bytes=BLOCK_BYTES),
        lambda path: DiskTier(
            path, num_bytes=FORMAT.file_bytes - 1, block_format=FORMAT, on_bad=print
        ),
    ],
)
def test_a_tier_holds_a_block_at_least(tmp_path: Path, make: Callable[[Path], KVTier]) -> None:
    with pytest.raises(ValueError, match="a KV block takes"):
        make(tmp_path)
