"""The import rules of docs/architecture.md, checked over every module's syntax tree."""

import ast
import collections
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve_engine.request.drafts import RequestDrafts
from pdserve_engine.request.handoff import Handoff
from pdserve_engine.request.progress import RequestProgress

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "pdserve_common": ("common", {"pdserve"}),
    "pdserve_kernels": ("kernels", set()),
    "pdserve_engine": ("engine", {"pdserve_kernels", "pdserve_common"}),
    "pdserve_worker": ("worker", {"pdserve_engine", "pdserve_common", "pdserve"}),
    "pdserve_prefill": (
        "prefill_svc",
        {"pdserve_worker", "pdserve_engine", "pdserve_common", "pdserve"},
    ),
    "pdserve_decode": (
        "decode_svc",
        {"pdserve_worker", "pdserve_engine", "pdserve_common", "pdserve"},
    ),
    "pdserve_router": ("router", {"pdserve_common", "pdserve"}),
    "pdserve_client": ("client", {"pdserve_common", "pdserve"}),
}
OURS = {"pdserve", *PACKAGES}
MODULES_IN_A_FOLDER = 15
# Words that this code once had for what others call slot, pair, grant request or unlanded read.
WORDS_OF_OUR_OWN = re.compile(
    "seat|zombie|partner|outlook|overslept|hungry|hopeful|suspect|(^|_)(poke|claim)", re.IGNORECASE
)
# Rooms of a package, lowest floor first: a module imports from its own room and from lower floors.
# A name without a folder is a module.
FLOORS = {
    "pdserve_engine": (
        ("combinations",),
        ("config", "grammar"),
        ("request",),
        ("kv", "lora", "sampling", "spec_decode"),
        ("models",),
        ("kv_transfer", "pooling"),
        ("kv_offload",),
        ("core",),
        ("runner",),
        ("executor",),
        ("description",),
        ("assemble",),
        ("clients",),
    ),
    "pdserve_router": (
        ("text",),
        ("chat_formats",),
        ("workers",),
        ("requests",),
        ("router", "config"),
        ("api",),
        ("server", "processes"),
        ("__main__",),
    ),
}
# Third-party modules and the only places that may import them.
FENCED = {
    "huggingface_hub": (
        "common/pdserve_common/model_files/model_folder.py",
        "engine/pdserve_engine/lora/hub_download.py",
    ),
    "nixl": ("engine/pdserve_engine/kv_transfer/transport/nixl",),
    "nixl_cu13": ("engine/pdserve_engine/kv_transfer/transport/nixl",),
    "triton": ("kernels/",),
    "flash_attn_interface": ("kernels/pdserve_kernels/triton/flash_attn",),
    # Only where a model takes pictures.
    "PIL": ("router/pdserve_router/text/picture_files.py",),
    # It imports torch.
    "xgrammar": ("engine/pdserve_engine/grammar/",),
    # Only where spans are asked for.
    "opentelemetry": ("common/pdserve_common/observability/tracing.py",),
    "torch": ("kernels/", "engine/", "prefill_svc/", "decode_svc/"),
    "grpc": ("common/", "worker/", "prefill_svc/", "decode_svc/", "router/", "client/"),
    "google": ("common/", "worker/", "prefill_svc/", "decode_svc/", "router/", "client/"),
}

# Packages whose modules get their clock as an argument `clock`, so that tests can run them on time
# of their own, and those of their modules that may read the machine's clock themselves.
CLOCKED = {"pdserve_common", "pdserve_worker", "pdserve_engine", "pdserve_router"}
READ_THE_CLOCK = {
    "common/pdserve_common/types/engine.py": "when a value was made, if nobody says it",
    "common/pdserve_common/processes/followed.py": "files of the machine",
    "common/pdserve_common/observability/load_log.py": "a log",
    "common/pdserve_common/metrics/port.py": "sockets of Prometheus",
    "common/pdserve_common/limits/request_validation.py": "ages and timeouts of the wire",
    "common/pdserve_common/observability/tracing.py": "what lies between two clocks of the machine",
    "common/pdserve_common/wire/": "ages and timeouts of the wire",
    "common/pdserve_common/runtime.py": "what is handed in",
    "engine/pdserve_engine/assemble.py": "the start of a process, its log",
    "engine/pdserve_engine/kv_transfer/transport/pool_check.py": "the start of a process",
    "engine/pdserve_engine/models/weights/loader.py": "the start of a process, its log",
    "router/pdserve_router/api/large_requests/processes.py": "processes of the machine",
    "router/pdserve_router/api/grpc/service.py": "when a request came",
    "router/pdserve_router/api/openai/endpoints.py": "when a request came",
    "router/pdserve_router/requests/input/generation_request.py": "when a value was made, likewise",
    "router/pdserve_router/requests/records/request_log.py": "a log",
    "worker/pdserve_worker/self_check.py": "the start of a process, its log",
}

CLOCKS = ("time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.sleep")

# What decides where requests go and when steps run. Its chance, its waits and its tasks are those
# of a Runtime, which is handed in, so that a simulator can drive it. NO_POLICY are modules there
# that deal with the machine instead.
POLICY = (
    "engine/pdserve_engine/clients/control.py",
    "engine/pdserve_engine/clients/inproc.py",
    "engine/pdserve_engine/core/",
    "engine/pdserve_engine/kv/",
    "engine/pdserve_engine/kv_transfer/",
    "engine/pdserve_engine/request/",
    "engine/pdserve_engine/spec_decode/",
    "router/pdserve_router/requests/",
    "router/pdserve_router/router.py",
    "router/pdserve_router/workers/",
)
NO_POLICY = {
    "engine/pdserve_engine/kv_transfer/transport/pool_check.py": "the start of a process",
    "router/pdserve_router/requests/input/input_processor.py": "ids that clients cannot guess",
    "router/pdserve_router/requests/records/request_log.py": "a log",
    "router/pdserve_router/requests/input/request_sizes.py": "seeds that clients cannot guess",
    "router/pdserve_router/workers/clients/attach_client.py": "a stream to a worker",
    "router/pdserve_router/workers/clients/control_client.py": "calls to a worker",
    "router/pdserve_router/workers/discovery.py": "names and files",
    "router/pdserve_router/workers/clients/tensor_client.py": "calls to a worker",
}
# Modules there that cannot be imported without gRPC, torch or NIXL, which policy does without.
WITH_LIBRARIES = {
    "engine/pdserve_engine/clients/": "the verbs of an operator, which reach the model",
    "engine/pdserve_engine/kv/block_copier.py": "memory of a device",
    "engine/pdserve_engine/kv/kv_cache.py": "memory of a device",
    "engine/pdserve_engine/kv/memory.py": "memory of a device",
    "engine/pdserve_engine/kv_transfer/compatibility.py": "what a model computes in",
    "engine/pdserve_engine/kv_transfer/transport/cuda_ipc.py": "memory of a device",
    "engine/pdserve_engine/kv_transfer/transport/nixl": "NIXL",
    "engine/pdserve_engine/kv_transfer/transport/nixl_reads.py": "NIXL",
    "router/pdserve_router/workers/clients/worker_client.py": "a link to a worker, over gRPC",
}
LIBRARIES = ("grpc", "torch", "nixl", "nixl_cu13")
IMPORT_WITHOUT = """
import importlib, sys

sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""
EVENT_LOOP = ("ensure_future", "timeout", "timeout_at", "wait_for")

# Who may start processes besides the room for it, which has how a child dies with its parent.
PROCESSES = "common/pdserve_common/processes/"
STARTS_PROCESSES = {
    "client/pdserve_client/stack.py": "commands, which outlive a terminal and drain at its end",
    "kernels/pdserve_kernels/cpu/build.py": "a compiler, and kernels import nothing of ours",
    "router/pdserve_router/processes.py": "the router itself, once more: they say nothing",
}

# The parts of a request, and the modules that alone write their fields.
REQUESTS = "engine/pdserve_engine/request"
WRITERS = {
    RequestProgress: (f"{REQUESTS}/progress.py",),
    Handoff: (
        f"{REQUESTS}/handoff.py",
        "engine/pdserve_engine/core/handoff/prefill_grant_requests.py",
    ),
    RequestDrafts: (f"{REQUESTS}/drafts.py", "engine/pdserve_engine/core/results.py"),
}


def modules() -> Iterator[tuple[str, Path]]:
    for package, (root, _) in PACKAGES.items():
        for path in sorted((ROOT / root / package).rglob("*.py")):
            yield package, path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def test_packages_import_only_what_lies_below_them() -> None:
    wrong = []
    for package, path in modules():
        allowed = {package, *PACKAGES[package][1]}
        for line, name in imports(path):
            top = name.split(".")[0]
            if top in OURS and top not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def room(module: str) -> str:
    """The folder below its package that a module is in, or its own name."""
    return module.split(".")[1]


def module_paths() -> dict[str, Path]:
    """All of our modules by their names."""
    paths = {}
    for package, path in modules():
        parts = path.relative_to(ROOT / PACKAGES[package][0]).with_suffix("").parts
        paths[".".join(parts).removesuffix(".__init__")] = path
    return paths


def imported_modules() -> dict[str, set[str]]:
    """For each of our modules those of ours that it imports, in functions too."""
    paths = module_paths()
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        found[module] = set()
        for _, name in imports(path):
            # The longest that is a module; the rest is in it.
            while name and name not in paths:
                name = name.rpartition(".")[0]
            if name not in ("", module):
                found[module].add(name)
    return found


def test_rooms_import_only_from_lower_floors() -> None:
    wrong = []
    for module, names in imported_modules().items():
        package = module.split(".")[0]
        if package not in FLOORS or module == package:
            continue
        floor_of = {name: n for n, floor in enumerate(FLOORS[package]) for name in floor}
        assert room(module) in floor_of, f"{module} is on no floor"
        for name in names:
            if not name.startswith(f"{package}.") or room(name) == room(module):
                continue
            if floor_of[room(name)] >= floor_of[room(module)]:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    graphlib.TopologicalSorter(imported_modules()).prepare()


def test_fenced_libraries_stay_behind_their_seam() -> None:
    wrong = []
    for _, path in modules():
        where = str(path.relative_to(ROOT))
        for line, name in imports(path):
            places = FENCED.get(name.split(".")[0])
            if places is not None and not where.startswith(places):
                wrong.append(f"{where}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_clock_is_handed_in() -> None:
    wrong = []
    for package, path in modules():
        where = str(path.relative_to(ROOT))
        if package not in CLOCKED or where.startswith(tuple(READ_THE_CLOCK)):
            continue
        tree = ast.parse(path.read_text())
        defaults = {
            default
            for node in ast.walk(tree)
            if isinstance(node, ast.arguments)
            for name, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)
            if name.arg == "clock"
        } | {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "clock"
        }
        wrong += [
            f"{where}:{node.lineno} uses {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and ast.unparse(node) in CLOCKS
            and node not in defaults
        ]
        wrong += [
            f"{where}:{line} {name}" for line, name in imports(path) if name.startswith("time.")
        ]
    assert not wrong, "\n".join(wrong)
    assert not [where for where in READ_THE_CLOCK if not (ROOT / where).exists()]


def policy() -> Iterator[Path]:
    for _, path in modules():
        where = str(path.relative_to(ROOT))
        if where.startswith(POLICY) and where not in NO_POLICY:
            yield path


def takes_from_the_machine(node: ast.AST) -> bool:
    """True if this draws, waits for some time, or starts a task without a Runtime."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.sleep":
        # One turn of the loop takes no time.
        return ast.unparse(node) != "asyncio.sleep(0)"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.wait":
        return any(keyword.arg == "timeout" for keyword in node.keywords)
    if isinstance(node, ast.Call) and ast.unparse(node) == "random.Random()":
        return True
    if not isinstance(node, ast.Attribute):
        return False
    owner = ast.unparse(node.value)
    if node.attr in ("call_later", "call_at", "create_task"):
        return not owner.endswith("runtime")
    return (
        (owner == "random" and node.attr != "Random")
        or owner == "secrets"
        or (owner == "asyncio" and node.attr in EVENT_LOOP)
    )


def test_policy_takes_chance_waits_and_tasks_from_its_runtime() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} uses {ast.unparse(node)}"
        for path in policy()
        for node in ast.walk(ast.parse(path.read_text()))
        if takes_from_the_machine(node)
    ]
    wrong += [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in policy()
        for line, name in imports(path)
        if name.startswith(("random.", "asyncio."))
    ]
    assert not wrong, "\n".join(wrong)
    assert not [where for where in NO_POLICY if not (ROOT / where).exists()]


def test_policy_is_imported_without_grpc_torch_and_nixl() -> None:
    deciding = set(policy())
    names = [
        name
        for name, path in module_paths().items()
        if path in deciding and not str(path.relative_to(ROOT)).startswith(tuple(WITH_LIBRARIES))
    ]
    assert len(names) > 100
    command = [sys.executable, "-c", IMPORT_WITHOUT, ",".join(LIBRARIES), *names]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout == ""


def starts_processes(path: Path) -> bool:
    libraries = {"subprocess", "multiprocessing"}
    calls = ("os.fork", "os.posix_spawn", "asyncio.create_subprocess", "asyncio.subprocess")
    tree = ast.parse(path.read_text())
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = attributes | {name for _, name in imports(path)}
    return any(name.startswith(calls) or name.split(".")[0] in libraries for name in names)


def test_processes_are_started_in_one_room() -> None:
    found = {str(path.relative_to(ROOT)) for _, path in modules() if starts_processes(path)}
    assert {where for where in found if not where.startswith(PROCESSES)} == set(STARTS_PROCESSES)


def test_only_its_own_modules_write_a_part_of_a_request() -> None:
    writers = {name: where for part, where in WRITERS.items() for name in part.__slots__}
    wrong, found = [], set()
    for _, path in modules():
        where = str(path.relative_to(ROOT))
        # Others have fields of the same names in classes of their own.
        knows_requests = any("pdserve_engine.request.request." in name for _, name in imports(path))
        if not (knows_requests or where.startswith(REQUESTS)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                continue
            if where in writers.get(node.attr, ()):
                found.add(node.attr)
            elif node.attr in writers:
                wrong.append(f"{where}:{node.lineno} writes {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)
    assert found == set(writers)


def test_only_the_edges_touch_generated_code() -> None:
    wrong = []
    for package, path in modules():
        is_edge = path.parent.name in ("wire", "grpc") or path.name in ("process.py", "server.py")
        is_edge = is_edge or path.stem.endswith(("service", "client"))
        if is_edge or package == "pdserve_client":
            continue
        for line, name in imports(path):
            if name.startswith("pdserve.v1"):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_a_folder_has_at_most_fifteen_modules() -> None:
    rooms = collections.Counter(
        path.parent.relative_to(ROOT) for _, path in modules() if path.name != "__init__.py"
    )
    assert not {
        str(folder): count for folder, count in rooms.items() if count > MODULES_IN_A_FOLDER
    }


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def test_no_identifier_is_a_word_of_our_own() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for _, path in modules()
        for name in (path.stem, *identifiers(ast.parse(path.read_text())))
        if WORDS_OF_OUR_OWN.search(name)
    }
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("root", sorted(root for root, _ in PACKAGES.values()))
def test_a_component_root_is_no_package_itself(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists()
    assert not list((ROOT / root).glob("*.py"))
