"""How much memory there is, as cgroups and /proc say it, and what a call takes at its peak."""

from pathlib import Path

import pytest
import torch

from pdserve_engine.kv.memory import available_host_bytes, peak_growth, used_bytes

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 102400 kB\n")
    return tmp_path / "proc"


def make_group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)


def test_without_limits_all_that_is_available_counts(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/\n")
    assert available_host_bytes(proc=proc, cgroups=tmp_path / "none") == 100 * MIB


def test_a_limit_of_cgroup_v2_counts_without_reclaimable_cache(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/pod/box\n")
    files = {
        "memory.max": f"{50 * MIB}\n",
        "memory.current": f"{40 * MIB}\n",
        "memory.stat": f"anon 1\ninactive_file {5 * MIB}\n",
    }
    make_group(tmp_path / "cg" / "pod" / "box", files | {"memory.max": "max\n"})
    make_group(tmp_path / "cg" / "pod", files)
    assert available_host_bytes(proc=proc, cgroups=tmp_path / "cg") == 15 * MIB


def test_a_limit_of_cgroup_v1_counts_where_only_its_mount_is_seen(
    proc: Path, tmp_path: Path
) -> None:
    (proc / "self" / "cgroup").write_text("4:cpu:/\n3:memory:/docker/1234\n0::/\n")
    make_group(
        tmp_path / "cg" / "memory",
        {
            "memory.limit_in_bytes": f"{30 * MIB}\n",
            "memory.usage_in_bytes": f"{31 * MIB}\n",
            "memory.stat": f"total_inactive_file {3 * MIB}\n",
        },
    )
    assert available_host_bytes(proc=proc, cgroups=tmp_path / "cg") == 2 * MIB


def test_the_real_machine_has_memory() -> None:
    assert 0 < available_host_bytes() < 1 << 50
    assert MIB < used_bytes(CPU) < 1 << 50


def test_a_peak_is_seen_though_the_memory_is_gone_again() -> None:
    bytearray(192 * MIB)  # an earlier, higher peak

    def run() -> None:
        bytearray(96 * MIB)

    assert 90 * MIB < peak_growth(CPU, run) < 120 * MIB
    assert peak_growth(CPU, lambda: None) < 10 * MIB
