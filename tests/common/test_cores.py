"""Lists of cores, and how services share a machine's."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from pdserve_common.processes.cores import (
    confine_process,
    cpu_limit,
    format_cores,
    parse_cores,
    share_cores,
    usable_cores,
)


@pytest.mark.parametrize(
    ("text", "cores", "shortest"),
    [
        ("0", (0,), "0"),
        ("0-3,8", (0, 1, 2, 3, 8), "0-3,8"),
        (" 8 , 3-4,2", (2, 3, 4, 8), "2-4,8"),
        ("5-5,5", (5,), "5"),
    ],
)
def test_a_list_of_cores(text: str, cores: tuple[int, ...], shortest: str) -> None:
    assert parse_cores(text) == cores
    assert format_cores(cores) == shortest


@pytest.mark.parametrize("text", ["", "0,", "a", "1-", "-1", "0-1-2", "1.5", "²"])
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a list of cores like 0-3,8"):
        parse_cores(text)


@pytest.mark.parametrize("text", ["3-0", "0-999999999999", "8192"])
def test_a_range_must_ascend_and_end_somewhere(text: str) -> None:
    with pytest.raises(ValueError, match="must ascend and end at most at 8191"):
        parse_cores(text)


def machine(tmp_path: Path, nodes: list[str], siblings: dict[int, str] | None = None) -> Path:
    """A /sys/devices/system."""
    for index, cores in enumerate(nodes):
        (tmp_path / f"node/node{index}").mkdir(parents=True)
        (tmp_path / f"node/node{index}/cpulist").write_text(f"{cores}\n")
    for core, cores in (siblings or {}).items():
        folder = tmp_path / f"cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cores}\n")
    return tmp_path


def test_services_get_equal_shares_that_do_not_overlap(tmp_path: Path) -> None:
    system = machine(tmp_path, ["0-6"])
    assert share_cores(range(7), 2, system=system) == [(0, 1, 2), (3, 4, 5)]
    assert share_cores(range(7), 1, system=system) == [tuple(range(7))]
    assert share_cores(range(2), 2, system=system) == [(0,), (1,)]
    assert share_cores(range(2), 3, system=system) is None


def test_a_share_is_at_least_as_large_as_it_must_be(tmp_path: Path) -> None:
    assert share_cores(range(4), 2, min_size=2, system=tmp_path) == [(0, 1), (2, 3)]
    assert share_cores(range(4), 2, min_size=3, system=tmp_path) is None


def test_a_share_lies_within_one_node(tmp_path: Path) -> None:
    system = machine(tmp_path, ["0-3", "4-7", ""])
    assert share_cores(range(8), 2, system=system) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert share_cores(range(8), 3, system=system) == [(0, 1), (2, 3), (4, 5)]
    assert share_cores(range(2, 8), 2, system=system) == [(2, 3), (4, 5)]


def test_two_hardware_threads_are_one_core(tmp_path: Path) -> None:
    siblings = {core: f"{core % 2},{core % 2 + 2}" for core in range(4)}
    system = machine(tmp_path, ["0-3"], siblings)
    assert share_cores(range(4), 2, system=system) == [(0,), (1,)]
    assert share_cores((1, 2, 3), 2, system=system) == [(1,), (2,)]


def test_hardware_threads_are_shared_out_where_there_are_too_few_cores(tmp_path: Path) -> None:
    siblings = {core: f"{core % 2},{core % 2 + 2}" for core in range(4)}
    system = machine(tmp_path, ["0-3"], siblings)
    assert share_cores((0, 2), 2, system=system) == [(0,), (2,)]
    assert share_cores(range(4), 2, min_size=2, system=system) == [(0, 2), (1, 3)]
    assert share_cores(range(4), 4, system=system) == [(0,), (2,), (1,), (3,)]
    assert share_cores(range(4), 5, system=system) is None


def test_a_process_is_confined_with_all_its_threads() -> None:
    before = usable_cores()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert thread.native_id is not None
    core = max(before)
    try:
        confine_process({core})
        assert os.sched_getaffinity(thread.native_id) == {core}
        assert usable_cores() == {core}
    finally:
        for tid in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(tid), before)
        done.set()
        thread.join()


def test_a_core_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu_cores has 8190-8191, must be among"):
        confine_process({min(usable_cores()), 8190, 8191})


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_cpu_limit(tmp_path: Path, files: dict[str, str], limit: float | None) -> None:
    """Here the groups' paths are the host's: only the mounts are seen."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    proc = make_proc(tmp_path, "3:cpu,cpuacct:/docker/12\n0::/docker/12\n")
    assert cpu_limit(proc=proc, cgroups=tmp_path) == limit


@pytest.mark.parametrize(
    ("groups", "mount", "files"),
    [
        ("0::/pod/box\n", "", ("cpu.max", "{} 100000")),
        ("3:cpu,cpuacct:/pod/box\n0::/\n", "cpu", ("cpu.cfs_quota_us", "{}")),
    ],
)
def test_the_lowest_limit_of_all_groups_counts(
    tmp_path: Path, groups: str, mount: str, files: tuple[str, str]
) -> None:
    name, text = files
    for folder, quota in (("pod", 250000), ("pod/box", 350000), ("other", 50000)):
        path = tmp_path / mount / folder
        path.mkdir(parents=True)
        (path / name).write_text(text.format(quota))
        (path / "cpu.cfs_period_us").write_text("100000")
    assert cpu_limit(proc=make_proc(tmp_path, groups), cgroups=tmp_path) == 2.5


def make_proc(tmp_path: Path, groups: str) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    return tmp_path / "proc"


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_limit(proc=tmp_path, cgroups=tmp_path) is None
