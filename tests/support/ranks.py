"""Ranks of one model as real processes, each in a group of any implementation."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from pdserve_kernels.cpu.shared_group import SharedGroup
from pdserve_kernels.distributed_group import DeviceGroup, DistributedGroup
from pdserve_kernels.groups import Group

# Imports torch once, has never run it, and so may be forked.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "pdserve_kernels.cpu.shared_group"])


# Of what has to come, however busy the machine is.
START_TIMEOUT_S = 300.0
RESULT_TIMEOUT_S = 600.0


class Meeting(Protocol):
    """Where ranks find each other: pickled into each rank's process, which calls it."""

    size: int

    def __call__(self, rank: int) -> Group: ...
    def close(self) -> None: ...


@dataclass
class SharedMemory:
    """Ranks that meet in shared memory."""

    size: int
    slot_bytes: int = 4096
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        self._fd = SharedGroup.create_memory(self.size, self.slot_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fd": reduction.DupFd(self._fd)}

    def __call__(self, rank: int) -> SharedGroup:
        fd = self._fd.detach()  # type: ignore[attr-defined]  # as it was pickled
        try:
            return SharedGroup(
                fd,
                rank=rank,
                size=self.size,
                slot_bytes=self.slot_bytes,
                timeout_s=self.timeout_s,
            )
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Gloo:
    """Ranks that find each other by a file, on loopback."""

    size: int
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")

    def __call__(self, rank: int) -> DistributedGroup:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        path = os.path.join(self._folder, "store")
        return self._join(path, rank)

    def close(self) -> None:
        shutil.rmtree(self._folder)

    def _join(self, path: str, rank: int) -> DistributedGroup:
        return DistributedGroup(path, rank=rank, size=self.size, timeout_s=self.timeout_s)


@dataclass
class Devices(Gloo):
    """Ranks that meet as those on GPUs do, with gloo in NCCL's place."""

    def _join(self, path: str, rank: int) -> DistributedGroup:
        return DeviceGroup(
            path, rank=rank, size=self.size, device=torch.device("cpu"), timeout_s=self.timeout_s
        )


class Ranks:
    """Processes that run body(group, *args), a function of an importable module, and what they
    return, which is pickled.
    """

    def __init__(self, meeting: Meeting, body: Callable[..., Any], *args: object) -> None:
        self._meeting = meeting
        self._pipes: list[Connection] = []
        # What a rank waits for another counts from when all are up, however busy the machine is.
        self._all_up = _CONTEXT.Barrier(meeting.size)
        self.processes = []
        for rank in range(meeting.size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run, args=(theirs, self._all_up, meeting, rank, body, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def results(
        self, ranks: Sequence[int] | None = None, *, timeout_s: float = RESULT_TIMEOUT_S
    ) -> list[Any]:
        """Wait for these ranks, by default all; AssertionError with the text of one's exception."""
        return [self._result(rank, timeout_s) for rank in ranks or range(len(self._pipes))]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._meeting.close()

    def _result(self, rank: int, timeout_s: float) -> Any:
        assert self._pipes[rank].poll(timeout_s), f"rank {rank} has brought nothing"
        try:
            has_failed, result = self._pipes[rank].recv()
        except EOFError:
            raise AssertionError(f"rank {rank} has died") from None
        assert not has_failed, f"rank {rank}: {result}"
        return result


def num_shared_memories() -> int:
    """How often this process holds memory of a group, open or mapped."""
    held = Path("/proc/self/maps").read_text().splitlines()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread has closed it
            held.append(os.readlink(link))
    return sum("memfd:pdserve-group" in each for each in held)


def run_ranks(meeting: Meeting, body: Callable[..., Any], *args: object) -> list[Any]:
    """Return what body(group, *args) returns in each rank."""
    with Ranks(meeting, body, *args) as ranks:
        return ranks.results()


def _run(
    pipe: Connection,
    all_up: Barrier,
    meeting: Meeting,
    rank: int,
    body: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        all_up.wait(START_TIMEOUT_S)
        group = meeting(rank)
        pipe.send((False, body(group, *args)))
        group.close()
    except BaseException:
        pipe.send((True, traceback.format_exc()))
