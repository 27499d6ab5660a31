"""Compiles the C++ kernels, once for each machine: ahead of time, or when they are first used.

`python -m pdserve_kernels.cpu.build --output DIR` makes the libraries for every instruction set,
for images; PDSERVE_KERNELS_DIR names that folder at run time. What is not there is compiled, and
kept in $XDG_CACHE_HOME/pdserve/kernels, for each compiler apart.
"""

import argparse
import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pdserve_kernels.cpu.isa import COMPILER_FLAGS, KernelsUnavailable, supported_isas

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
COMPILER = "g++"  # the kernels' OpenMP calls are GCC's, as torch's are
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wall", "-Wextra"),
    # What is fused is written as fma(): bits are not for the compiler, or its version, to decide.
    "-ffp-contract=off",
    # GCC 12 warns about its own AVX-512 headers.
    "-Wno-maybe-uninitialized",
)
SANITIZER_FLAGS = (
    *("-O1", "-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)
PREBUILT_VARIABLE = "PDSERVE_KERNELS_DIR"
COMPILE_TIMEOUT_S = 600.0
# A process that waits longer for another's compiler starts its own, which does no harm.
LOCK_TIMEOUT_S = 300.0
LOCK_POLL_S = 0.05
ERROR_LINES = 8


class NoCompiler(KernelsUnavailable):
    """There is no compiler, or not under its name; the message says what to install."""


def build(isa: str) -> Path:
    """Return the library for an instruction set: prebuilt, from the cache, or compiled now.

    Takes seconds when it compiles, and may be called by several processes at once. Without a
    compiler the cache's newest will do. Raises KernelsUnavailable if there is neither, or with what
    the compiler says.
    """
    name = library_name(isa)
    prebuilt = os.environ.get(PREBUILT_VARIABLE)
    if prebuilt is not None:
        if (library := Path(prebuilt, name)).exists():
            return library
        logger.warning("%s is %s, which has no %s", PREBUILT_VARIABLE, prebuilt, name)
    try:
        compiler = _compiler_digest()
    except NoCompiler:
        if (left := _newest_in_cache(name)) is None:
            raise
        logger.info("no compiler: taking %s, which one has left", left)
        return left
    try:
        folder = _cache_folder() / compiler
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _build_once(isa, folder)
    except OSError as error:
        logger.warning("cannot keep the compiled kernels: %s", error)
        # Not a fixed name in a folder that others can write to: we are going to run what is there.
        temporary = Path(tempfile.mkdtemp(prefix="pdserve-kernels-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return compile_library(isa, temporary)


def compile_library(isa: str, folder: Path, *, flags: Sequence[str] = ()) -> Path:
    """Compile the library for an instruction set into `folder`, which appears there at once.

    `flags` come after ours. Raises KernelsUnavailable without a compiler, or with what it says, and
    OSError if the folder cannot be written to.
    """
    started = time.monotonic()
    library = folder / library_name(isa)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled = Path(scratch) / library.name
        _compile(sorted(SOURCES.glob("*.cpp")), (*FLAGS, *COMPILER_FLAGS[isa], *flags), compiled)
        with compiled.open("rb") as file:
            # Else, after a crash of the machine, half of it may be there under its name.
            os.fsync(file.fileno())
        compiled.rename(library)
    logger.info("compiled %s in %.1f s", library, time.monotonic() - started)
    return library


def _build_once(isa: str, folder: Path) -> Path:
    library = folder / library_name(isa)
    if not library.exists():
        logger.info("compiling the CPU kernels for %s, or waiting for who does: once, seconds", isa)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                compile_library(isa, folder)
    return library


def _compile(sources: Sequence[Path], flags: Sequence[str], library: Path) -> None:
    """Compile every source by itself, as many at a time as there are cores, and link them."""
    objects = [library.with_name(f"{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = (
            [COMPILER, "-c", *flags, str(source), "-o", str(compiled)]
            for source, compiled in zip(sources, objects, strict=True)
        )
        list(pool.map(_run_compiler, commands))
    # Linked without -fopenmp: the names are found in the OpenMP runtime that torch has loaded,
    # whatever its file is called, and there is never a second one with threads of its own.
    sanitizers = (flag for flag in flags if flag.startswith("-fsanitize"))
    _run_compiler([COMPILER, "-shared", *sanitizers, *map(str, objects), "-o", str(library)])


def _run_compiler(command: Sequence[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except FileNotFoundError:
        raise NoCompiler(
            f"no C++ compiler: install {COMPILER} 11 or newer (Debian: apt-get install g++) "
            f"or point {PREBUILT_VARIABLE} at compiled kernels"
        ) from None
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(f"{COMPILER} ran for {COMPILE_TIMEOUT_S:g} s") from None
    if result.returncode:
        last = "\n".join(result.stderr.splitlines()[-ERROR_LINES:])
        raise KernelsUnavailable(f"{COMPILER} failed with status {result.returncode}:\n{last}")
    return result.stdout


def library_name(isa: str) -> str:
    """A name that fits our flags and the sources beside us alone: none that is stale is loaded."""
    digest = hashlib.sha256("\n".join((*FLAGS, *COMPILER_FLAGS[isa])).encode())
    for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{isa}-{digest.hexdigest()[:16]}.so"


def _compiler_digest() -> str:
    version = _run_compiler([COMPILER, "--version"])
    return hashlib.sha256(version.encode()).hexdigest()[:16]


def _newest_in_cache(name: str) -> Path | None:
    """What any compiler has made of our sources, if one has."""
    try:
        libraries = _cache_folder().glob(f"*/{name}")
        return max(libraries, key=lambda library: library.stat().st_mtime, default=None)
    except OSError:
        return None


def _cache_folder() -> Path:
    """Raises OSError if nothing says where the home folder is."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise OSError(f"the cache folder is {cache!r}, must be absolute")
    return Path(cache, "pdserve", "kernels")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases if its owner dies; go on without it after a while."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Compile ahead of time; the process's exit status."""
    parser = argparse.ArgumentParser(prog="pdserve_kernels.cpu.build", description=main.__doc__)
    parser.add_argument(
        "--isa",
        choices=COMPILER_FLAGS,
        action="append",
        help="default: all, without --output this machine's best",
    )
    parser.add_argument("--output", type=Path, help="the folder; default: the cache")
    parser.add_argument(
        "--sanitize", action="store_true", help="find bad memory accesses; needs --output"
    )
    args = parser.parse_args(argv)
    if args.sanitize and args.output is None:
        parser.error("--sanitize is set, --output must be")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # For other machines all, for this one what it runs.
    isas = args.isa or (supported_isas()[:1] if args.output is None else COMPILER_FLAGS)
    try:
        for isa in isas:
            _build_ahead(isa, args.output, SANITIZER_FLAGS if args.sanitize else ())
    except (KernelsUnavailable, OSError) as error:
        logger.error("%s", error)
        return 1
    return 0


def _build_ahead(isa: str, folder: Path | None, flags: Sequence[str]) -> None:
    if folder is None:
        build(isa)
        return
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("compiling the CPU kernels for %s", isa)
    compile_library(isa, folder, flags=flags)


if __name__ == "__main__":
    raise SystemExit(main())
