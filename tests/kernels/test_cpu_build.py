"""How the C++ kernels are found, compiled, chosen, and refused."""

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

from pdserve_kernels import name_of, select
from pdserve_kernels.cpu import build as building
from pdserve_kernels.cpu import compiled
from pdserve_kernels.cpu import isa as isas
from pdserve_kernels.cpu.build import build, compile_library
from pdserve_kernels.cpu.build import library_name as library_name_of
from pdserve_kernels.cpu.compiled import library as loaded_library
from pdserve_kernels.cpu.isa import KernelsUnavailable, wanted_isas

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_kernels = pytest.mark.skipif(
    name_of(select(torch.device("cpu"))) == "reference", reason="needs compiled kernels"
)
ISA = next(iter(isas.supported_isas()), "avx2")
KERNEL = """
#include <cstdint>
extern "C" void touch(int32_t* values, int64_t index) { values[index] += 1; }
"""
OVERFLOW = """
import ctypes, sys
values = (ctypes.c_int32 * 8)()
ctypes.CDLL(sys.argv[1]).touch(values, ctypes.c_int64(int(sys.argv[2])))
"""


@pytest.fixture
def small_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One kernel in place of ours, and an empty cache."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "touch.cpp").write_text(KERNEL)
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(building.PREBUILT_VARIABLE, raising=False)
    return sources


@pytest.fixture
def no_compiler(small_kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(small_kernel))


@needs_compiler
def test_a_library_is_compiled_once_and_anew_when_a_source_changes(small_kernel: Path) -> None:
    first = build(ISA)
    written = first.stat().st_mtime_ns
    assert build(ISA) == first
    assert first.stat().st_mtime_ns == written
    (small_kernel / "touch.cpp").write_text(KERNEL + "// changed\n")
    assert build(ISA) != first


@needs_compiler
def test_those_who_come_together_compile_once(
    small_kernel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Threads here: the lock belongs to the open file, whoever has opened it."""
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(3) as pool:
        libraries = set(pool.map(build, [ISA] * 3))
    assert len(libraries) == 1
    assert caplog.text.count("compiled ") == 1


def library_name() -> str:
    return library_name_of(ISA)


def test_a_prebuilt_library_needs_no_compiler(
    no_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt = tmp_path / library_name()
    prebuilt.touch()
    monkeypatch.setenv(building.PREBUILT_VARIABLE, str(tmp_path))
    assert build(ISA) == prebuilt


def test_a_damaged_library_is_refused_by_its_name(
    no_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / library_name()
    damaged.write_bytes(bytes(4096))
    monkeypatch.setenv(building.PREBUILT_VARIABLE, str(tmp_path))
    with pytest.raises(KernelsUnavailable, match=f"{damaged.name}: invalid ELF header"):
        compiled.load_library.__wrapped__(ISA)


def test_without_a_compiler_the_error_says_what_to_install(no_compiler: None) -> None:
    with pytest.raises(KernelsUnavailable, match=r"install g\+\+ 11 or newer"):
        build(ISA)


@needs_compiler
def test_without_a_compiler_the_newest_that_one_has_left_is_taken(
    small_kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = build(ISA)
    newer = older.parent.with_name("another compiler") / older.name
    shutil.copytree(older.parent, newer.parent)
    os.utime(older, (0, 0))
    monkeypatch.setenv("PATH", str(small_kernel))
    assert build(ISA) == newer
    (small_kernel / "touch.cpp").write_text(KERNEL + "// changed\n")
    with pytest.raises(KernelsUnavailable):
        build(ISA)
    (small_kernel / "touch.cpp").write_text(KERNEL)
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-g"))
    with pytest.raises(KernelsUnavailable):
        build(ISA)


@needs_compiler
def test_what_the_compiler_says_is_in_the_error(small_kernel: Path, tmp_path: Path) -> None:
    (small_kernel / "touch.cpp").write_text("int x = no_such_name;\n")
    with pytest.raises(KernelsUnavailable, match="no_such_name"):
        compile_library(ISA, tmp_path)
    assert list(tmp_path.glob("*.so")) == []


@needs_compiler
@pytest.mark.parametrize("cache", ["/proc/nowhere", "relative"])
def test_without_a_cache_it_compiles_into_a_private_folder(
    cache: str, small_kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    library = build(ISA)
    assert library.is_file()
    assert library.parent.stat().st_mode & 0o077 == 0
    shutil.rmtree(library.parent)


@needs_compiler
@pytest.mark.parametrize("index", [3, 8])
def test_the_sanitizers_stop_a_kernel_that_overflows(
    index: int, small_kernel: Path, tmp_path: Path
) -> None:
    library = compile_library(ISA, tmp_path, flags=building.SANITIZER_FLAGS)
    preload = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    result = subprocess.run(
        # Without pymalloc every array is a heap block of its own, as tensors are.
        [sys.executable, "-c", OVERFLOW, str(library), str(index)],
        env={**environment, "PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode != 0) == (index >= 8)
    assert ("heap-buffer-overflow" in result.stderr) == (index >= 8)


@pytest.mark.skipif("asan" not in os.environ.get("LD_PRELOAD", ""), reason="not sanitized")
def test_under_sanitizers_the_sanitized_kernels_are_tested() -> None:
    library = Path(loaded_library()._name)
    assert library.parent == Path(os.environ[building.PREBUILT_VARIABLE])


AVX2 = "avx2 fma"
AVX512 = "avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16"


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "expected"),
    [
        ("x86_64", f"flags\t\t: fpu {AVX2} {AVX512}", ("avx512bf16", "avx2")),
        ("x86_64", f"flags\t\t: {AVX2} avx512f", ("avx2",)),
        ("x86_64", f"model name\t: {AVX2}\nflags\t\t: sse4_2", ()),
        ("x86_64", "no such line", ()),
        ("aarch64", f"flags\t\t: {AVX2}", ()),
    ],
)
def test_the_best_instruction_set_is_chosen(
    machine: str,
    cpuinfo: str,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv(isas.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(isas.platform, "machine", lambda: machine)
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{cpuinfo}\nbugs\t\t: none\n")
    assert wanted_isas(file) == expected


def test_an_instruction_set_can_be_asked_for_if_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isas, "supported_isas", lambda _: ("avx2",))
    monkeypatch.setenv(isas.ISA_VARIABLE, "avx2")
    assert wanted_isas() == ("avx2",)
    monkeypatch.setenv(isas.ISA_VARIABLE, "reference")
    assert wanted_isas() == ()
    monkeypatch.setenv(isas.ISA_VARIABLE, "avx512bf16")
    with pytest.raises(ValueError, match="is avx512bf16, this processor has avx2"):
        wanted_isas()
    monkeypatch.setenv(isas.ISA_VARIABLE, "sse9")
    with pytest.raises(ValueError, match="'sse9', must be one of avx512bf16, avx2, reference"):
        wanted_isas()


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load_library", "_load_once"):
        monkeypatch.setattr(compiled, name, cache(getattr(compiled, name).__wrapped__))


@needs_compiler
@pytest.mark.skipif("avx2" not in isas.supported_isas(), reason="needs a processor with AVX2")
@pytest.mark.parametrize(("told", "runs"), [(None, "cpu/avx2"), ("avx512bf16", "reference")])
def test_a_compiler_too_old_for_the_best_instruction_set_makes_the_next_unless_told_which(
    told: str | None,
    runs: str,
    nothing_loaded: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(isas, "supported_isas", lambda _: ("avx512bf16", "avx2"))
    monkeypatch.setitem(isas.COMPILER_FLAGS, "avx512bf16", ("-march=not-known-yet",))
    if told is None:
        monkeypatch.delenv(isas.ISA_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(isas.ISA_VARIABLE, told)
    assert [name_of(select(torch.device("cpu"))) for _ in range(2)] == [runs, runs]
    (line,) = [record.getMessage() for record in caplog.records if record.name == compiled.__name__]
    assert "not-known-yet" in line
    assert line.startswith(f"the CPU runs on {'kernels for avx2' if told is None else 'reference'}")


@pytest.mark.skipif(not isas.supported_isas(), reason="needs a processor with AVX2")
def test_without_a_compiler_the_reference_kernels_run_and_one_line_says_why(
    no_compiler: None, nothing_loaded: None, caplog: pytest.LogCaptureFixture
) -> None:
    names = [name_of(select(torch.device("cpu"))) for _ in range(2)]
    assert names == ["reference", "reference"]
    assert caplog.text.count("install g++ 11 or newer") == 1


@needs_kernels
def test_the_kernels_run_on_torchs_threads_each_on_its_core(
    set_threads: Callable[[int], None],
) -> None:
    set_threads(2)
    cores = sorted(os.sched_getaffinity(0))
    tids_before = set(os.listdir("/proc/self/task"))
    added = []

    def pin() -> None:
        torch.get_num_threads()
        compiled.pin_threads([cores[0], cores[-1]])
        mine = {str(threading.get_native_id()), *tids_before}
        for tid in set(os.listdir("/proc/self/task")) - mine:
            with contextlib.suppress(ProcessLookupError):  # somebody else's, and over
                added.append(os.sched_getaffinity(int(tid)))
        compiled.pin_threads([])

    # On a thread of its own, whose team ends with it.
    thread = threading.Thread(target=pin)
    thread.start()
    thread.join()
    assert added.count({cores[-1]}) == 1, "nobody else pins threads that start meanwhile"
    assert sorted(os.sched_getaffinity(0)) == cores


@needs_kernels
def test_there_is_one_openmp_runtime() -> None:
    loaded_library()
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len([f for f in files if re.match(r"lib(g|i)?omp\d?[.-]", Path(f).name)]) == 1


def test_ctypes_is_told_about_every_exported_kernel() -> None:
    """A function without a signature would be called with 32-bit integers."""
    sources = "\n".join(path.read_text() for path in building.SOURCES.glob("*.cpp"))
    exported = re.findall(r"^(?:extern \"C\" )?\w+ (pds_\w+)\(", sources, re.MULTILINE)
    assert sorted(exported) == sorted(compiled.SIGNATURES)
