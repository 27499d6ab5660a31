"""What a stack gives its services: cores, threads, an environment, new starts."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve_client import stack as stacks
from pdserve_client.config import StackConfig
from pdserve_client.stack import ServiceProcess, Stack, StackError
from pdserve_common.model_files.model_folder import pools
from pdserve_common.observability import tracing
from pdserve_common.processes.cores import share_cores
from pdserve_common.processes.restarts import FIRST_PAUSE_S, MAX_RESTARTS, WINDOW_S, Restarts
from pdserve_engine.clients.inproc import HAND_BACK_TIMEOUT_S
from pdserve_router.api.http.server import CUT_TIMEOUT_S
from pdserve_router.server import CLOSE_GRACE_S
from pdserve_worker.process import ENGINE_CLOSE_TIMEOUT_S, STOP_GRACE_S
from support.clock import Clock

MakeStack = Callable[..., Stack]

ANY_PORTS = dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0)


@pytest.fixture
def make_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeStack:
    """make_stack(**settings) -> a stack, not started, on a machine of four cores."""
    monkeypatch.setattr(stacks, "usable_cores", lambda: frozenset(range(4)))
    monkeypatch.setattr(stacks, "cpu_limit", lambda: None)
    monkeypatch.setattr(stacks, "share_cores", functools.partial(share_cores, system=tmp_path))
    (tmp_path / "config.json").write_text("{}")

    def make(**settings: object) -> Stack:
        return Stack(
            StackConfig(model=str(tmp_path), log_dir=str(tmp_path), **ANY_PORTS, **settings)  # type: ignore[arg-type]
        )

    return make


def placements(stack: Stack) -> list[list[str]]:
    names = ("--cpu-cores", "--num-threads")
    return [[flag for flag in worker.flags if flag.startswith(names)] for worker in stack.workers]


def test_all_services_are_told_the_name_of_the_model(make_stack: MakeStack) -> None:
    stack = make_stack(served_model_name="some/name")
    assert stack.model_name == "some/name"
    for process in stack.processes:
        assert "--served-model-name=some/name" in process.flags
    stack = make_stack()
    assert stack.model_name == Path(stack.config.model).name
    assert not any("served-model-name" in str(process.flags) for process in stack.processes)


def test_each_service_has_a_folder_of_its_own_for_tiers(make_stack: MakeStack) -> None:
    stack = make_stack(
        kv_offload_host_bytes=10, kv_offload_disk_path="kv", kv_offload_disk_bytes=20, decode=2
    )
    for worker in stack.workers:
        assert f"--kv-offload-disk-path=kv/{worker.name}" in worker.flags
        assert {"--kv-offload-host-bytes=10", "--kv-offload-disk-bytes=20"} <= set(worker.flags)
    assert not any("kv-offload" in str(process.flags) for process in make_stack().processes)


def test_no_process_is_killed_while_it_closes() -> None:
    """Each step as long as it may take, and a collector that does not answer."""
    of_spans_s = tracing.CLOSE_TIMEOUT_S + tracing.JOIN_TIMEOUT_S
    router_s = CLOSE_GRACE_S + CUT_TIMEOUT_S + of_spans_s
    worker_s = HAND_BACK_TIMEOUT_S + STOP_GRACE_S + of_spans_s + ENGINE_CLOSE_TIMEOUT_S
    # Python itself and the sockets take some more.
    assert max(router_s, worker_s) + 2.0 <= stacks.END_MARGIN_S


def test_prefill_and_decode_share_no_core(make_stack: MakeStack) -> None:
    stack = make_stack()
    assert placements(stack) == [
        ["--cpu-cores=0-1", "--num-threads=2"],
        ["--cpu-cores=2-3", "--num-threads=2"],
    ]
    assert stack.placement == "prefill-0 on 0-1, decode-0 on 2-3"


def names_of(stack: Stack) -> list[str]:
    return [worker.name for worker in stack.workers]


POOLING_FILES = (
    {"config.json": '{"architectures": ["Qwen3ForSequenceClassification"]}'},
    {"config.json": '{"architectures": ["Qwen3Model"]}'},
    {"config.json": '{"architectures": ["Qwen3ForCausalLM"]}', "modules.json": "[]"},
)


@pytest.mark.parametrize("files", POOLING_FILES)
def test_a_model_that_pools_has_prefill_services_alone(
    make_stack: MakeStack, tmp_path: Path, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert pools(tmp_path)
    stack = make_stack(prefill=2, decode=3)
    assert names_of(stack) == ["prefill-0", "prefill-1"]
    assert not any(flag.startswith("--decode") for flag in stack.router.flags)
    # What a service is told it does.
    assert names_of(make_stack(runner="generate")) == ["prefill-0", "decode-0"]
    with pytest.raises(StackError, match="prefill is 0, must be at least 1 for a model that pools"):
        make_stack(prefill=0)


def test_each_rank_of_a_group_is_a_service(make_stack: MakeStack) -> None:
    stack = make_stack(prefill=1, decode=2, data_parallel_size=2, prefill_data_parallel_size=1)
    ranks = [
        [flag for flag in worker.flags if flag.startswith("--data-parallel")]
        for worker in stack.workers
    ]
    assert names_of(stack) == ["prefill-0", "decode-0", "decode-1", "decode-2", "decode-3"]
    assert ranks == [
        [f"--data-parallel-size={size}", f"--data-parallel-rank={rank}"]
        for size, rank in ((1, 0), (2, 0), (2, 1), (2, 0), (2, 1))
    ]
    with pytest.raises(ValueError, match="decode_data_parallel_size is 0, must be at least 1"):
        make_stack(decode_data_parallel_size=0)


def test_services_are_told_to_pool(make_stack: MakeStack) -> None:
    stack = make_stack(runner="pooling", convert="embed")
    assert names_of(stack) == ["prefill-0"]
    assert {"--runner=pooling", "--convert=embed"} < set(stack.workers[0].flags)


@pytest.mark.parametrize("architectures", ['["LlamaForCausalLM"]', "null", "[]"])
def test_a_model_that_generates_needs_decode_services(
    make_stack: MakeStack, tmp_path: Path, architectures: str
) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": {architectures}}}')
    assert names_of(make_stack()) == ["prefill-0", "decode-0"]
    with pytest.raises(StackError, match="decode is 0, must be at least 1 for a model that gen"):
        make_stack(decode=0)


def test_services_keep_to_the_cores_a_stack_is_given(make_stack: MakeStack) -> None:
    stack = make_stack(cpu_cores="1-3", num_threads=1)
    assert placements(stack) == [
        ["--cpu-cores=1", "--num-threads=1"],
        ["--cpu-cores=2", "--num-threads=1"],
    ]


def test_too_few_cores_are_shared_and_the_output_says_so(make_stack: MakeStack) -> None:
    stack = make_stack(decode=4)
    assert placements(stack) == [["--num-threads=1"]] * 5
    assert stack.placement == "all share 0-3, too few for 5 services to have their own"


def test_more_threads_than_cores_share_them_too(make_stack: MakeStack) -> None:
    assert placements(make_stack(num_threads=3)) == [["--num-threads=3"]] * 2


@pytest.mark.parametrize(
    ("limit", "settings", "num_threads"),
    [
        (1.5, {}, 1),
        (3.0, {}, 1),
        (5.0, {}, 2),
        (2.0, {"prefill": 0}, 2),
        (2.0, {"num_threads": 2}, 2),
        (2.0, {"device": "cuda"}, 1),
    ],
)
def test_services_share_a_containers_cpu_limit(
    make_stack: MakeStack,
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
    settings: dict[str, object],
    num_threads: int,
) -> None:
    monkeypatch.setattr(stacks, "cpu_limit", lambda: limit)
    for flags in placements(make_stack(**settings)):
        assert flags[-1] == f"--num-threads={num_threads}"


def test_a_limit_of_time_leaves_services_all_their_cores(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "cpu_limit", lambda: 2.0)
    assert make_stack().placement == "prefill-0 on 0-1, decode-0 on 2-3"


def test_prefill_and_decode_get_a_hardware_thread_each_of_a_single_core(
    make_stack: MakeStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "usable_cores", lambda: frozenset({0, 1}))
    for core in (0, 1):
        folder = tmp_path / f"cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-1\n")
    assert placements(make_stack()) == [
        ["--cpu-cores=0", "--num-threads=1"],
        ["--cpu-cores=1", "--num-threads=1"],
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_cores": "3-5"}, "cpu_cores has 4-5, must be among 0-3"),
        ({"cpu_cores": "3"}, "cpu_cores is 3, too few for 2 services of 1 cores each"),
        ({"cpu_cores": "0-3", "num_threads": 3}, "too few for 2 services of 3 cores each"),
    ],
)
def test_cores_that_cannot_be_had_are_refused(
    make_stack: MakeStack, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(StackError, match=message):
        make_stack(**settings)


def test_a_gpus_stack_has_no_cores_of_its_own(make_stack: MakeStack) -> None:
    assert make_stack(device="cuda").placement is None
    with pytest.raises(ValueError, match="cpu_cores is set, device is cuda, must be cpu"):
        make_stack(device="cuda", cpu_cores="0-3")


def test_a_stacks_settings_in_the_environment_are_not_its_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PDSERVE_PREFILL is a number here and addresses to the router."""
    (tmp_path / "show_environment.py").write_text("import os; print(*os.environ)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PDSERVE_PREFILL", "0")
    monkeypatch.setenv("PDSERVE_KV_SESSION_TIMEOUT_S", "9")
    log = tmp_path / "log"
    service = ServiceProcess("a", "show_environment", 0, 0, [], log)
    service.start()
    assert service.process is not None
    assert service.process.wait(30) == 0
    names = log.read_text().split()
    assert "PDSERVE_KV_SESSION_TIMEOUT_S" in names
    assert "PDSERVE_PREFILL" not in names


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"msg": "loading"}', "loading"),
        ("5", "5"),
        ("[1]", "[1]"),
        ('{"level": "info"}', '{"level": "info"}'),
        ("Traceback", "Traceback"),
    ],
)
def test_the_last_line_of_a_log_is_shown_whatever_it_is(
    tmp_path: Path, line: str, message: str
) -> None:
    log = tmp_path / "log"
    log.write_text(f"first\n{line}\n\n")
    assert ServiceProcess("a", "b", 0, 0, [], log).last_message() == message


def test_a_stack_listens_on_an_ipv6_address(make_stack: MakeStack) -> None:
    stack = make_stack(host="::1")
    assert stack.grpc_address == f"[::1]:{stack.grpc_port}"


def test_pauses_double_until_a_service_is_given_up() -> None:
    restarts = Restarts(clock=(clock := Clock()))
    pauses = []
    while (pause_s := restarts.plan()) is not None:
        assert restarts.is_planned
        assert not restarts.is_due
        clock.now_s += pause_s
        assert restarts.is_due
        restarts.started()
        assert not restarts.is_planned
        pauses.append(pause_s)
    assert pauses == [FIRST_PAUSE_S * 2**i for i in range(MAX_RESTARTS)]


def test_ends_before_the_window_do_not_count() -> None:
    restarts = Restarts(clock=(clock := Clock()))
    for _ in range(3 * MAX_RESTARTS):
        assert restarts.plan() == FIRST_PAUSE_S
        restarts.started()
        clock.now_s += WINDOW_S + 1


@pytest.fixture
def dying_service(
    make_stack: MakeStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Stack, ServiceProcess]:
    """A stack of one service that says something and ends with status 3, and that service."""
    (tmp_path / "dying.py").write_text("import sys; print('so it is'); sys.exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    service = ServiceProcess(
        "a", "dying", 0, 0, [], tmp_path / "a.log", restarts=Restarts(clock=Clock())
    )
    stack = make_stack()
    stack.processes = [service]
    return stack, service


def end(service: ServiceProcess) -> None:
    assert service.process is not None
    assert service.process.wait(60) == 3


def test_a_service_that_was_never_ready_is_not_started_again(
    dying_service: tuple[Stack, ServiceProcess],
) -> None:
    stack, service = dying_service
    service.start()
    end(service)
    with pytest.raises(
        StackError,
        match=r"a ended with status 3 before it was ready: correct(?s:.*)\n    so it is$",
    ):
        list(stack.restart_ended())


def test_a_service_is_started_again_until_it_ends_too_often(
    dying_service: tuple[Stack, ServiceProcess],
) -> None:
    stack, service = dying_service
    clock = Clock()
    service.restarts = Restarts(clock=clock)
    service.start()
    service.was_ready = True
    for i in range(MAX_RESTARTS):
        end(service)
        before = service.process
        (line,) = stack.restart_ended()
        assert "a ended with status 3, starting it again in" in line
        assert f"restart {i + 1} of {MAX_RESTARTS} in 10 minutes (log: {service.log_path})" in line
        assert list(stack.restart_ended()) == []
        assert service.process is before
        clock.now_s += 2.0**i
        assert list(stack.restart_ended()) == []
        assert service.process is not before
    end(service)
    with pytest.raises(StackError, match=r"status 3, 6 times in 10 minutes:(?s:.*)--no-restart"):
        list(stack.restart_ended())
    # What the earlier ones said is not lost.
    assert service.log_path.read_text() == "so it is\n" * (MAX_RESTARTS + 1)
