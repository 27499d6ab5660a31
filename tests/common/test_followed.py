"""Files that are read again when they change, or when they could not be read."""

import asyncio
import itertools
import logging
import os
import threading
from pathlib import Path

import pytest

from pdserve_common.processes import followed
from pdserve_common.processes.followed import Followed


class Reader:
    """Reads a file; fails as often as told first."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_failures, self.num_reads = path, 0, 0

    def __call__(self) -> str:
        self.num_reads += 1
        if self.num_failures:
            self.num_failures -= 1
            raise PermissionError(f"{self.path} cannot be read")
        return self.path.read_text()


SECONDS = itertools.count(1_700_000_000)


def write(path: Path, text: str) -> None:
    """With a time of its own: those of two writes within a tick of the kernel's are the same."""
    path.write_text(text)
    os.utime(path, (0, next(SECONDS)))


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    write(tmp_path / "keys", "a")
    return Reader(tmp_path / "keys")


def test_a_file_is_read_when_it_changes_only(reader: Reader) -> None:
    keys = Followed([str(reader.path)], reader)
    assert [keys.get(), keys.get()] == ["a", "a"]
    assert reader.num_reads == 1
    write(reader.path, "b")
    assert [keys.get(), keys.get()] == ["b", "b"]
    assert reader.num_reads == 2


def test_a_file_that_could_not_be_read_is_read_later_though_it_did_not_change(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Followed([str(reader.path)], reader)
    write(reader.path, "b")
    reader.num_failures = 2
    assert [keys.get(), keys.get()] == ["a", "a"]
    assert reader.num_reads == 2, "not at each call"
    monkeypatch.setattr(followed, "RETRY_S", 0.0)
    write(reader.path, "b")
    assert keys.get() == "a"
    assert [keys.get(), keys.get()] == ["b", "b"]
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 2, "once for each change"


def test_permissions_that_are_corrected_are_a_change(reader: Reader) -> None:
    keys = Followed([str(reader.path)], reader)
    before = reader.path.stat().st_ctime_ns
    while reader.path.stat().st_ctime_ns == before:  # see write
        reader.path.chmod(0o600)
    keys.get()
    assert reader.num_reads == 2


async def test_an_event_loop_goes_on_while_a_file_is_read(reader: Reader) -> None:
    has_gone_on = threading.Event()

    def read_slowly() -> str:
        if reader.num_reads:
            assert has_gone_on.wait(30), "the event loop is held up"
        return reader()

    keys = Followed([str(reader.path)], read_slowly)
    assert await keys.get_off_loop() == "a"
    write(reader.path, "b")
    asking = [asyncio.create_task(keys.get_off_loop()) for _ in range(3)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert keys.last == "a"
    has_gone_on.set()
    assert await asyncio.gather(*asking) == ["b"] * 3
    assert reader.num_reads == 2, "once for all who ask"
