"""`pdserve ctl` against real workers: what operators see, and what a router does meanwhile."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve.v1 import kv_transfer_service_pb2_grpc as kv_grpc
from pdserve_client.client import Client
from pdserve_common.rpc import attach_protocol
from pdserve_common.types.kv import PROTOCOL_VERSION
from pdserve_common.types.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# Of what has to happen, however busy the machine is.
WAIT_S = 30.0
# Of the model below.
LAYOUT = kv_pb2.KvLayout(
    groups=[kv_pb2.KvGroup(id=0, layers=[0, 1, 2], kind=kv_pb2.KvGroup.KIND_FULL)],
    block_size=16,
    block_bytes=3 * 2 * 2 * 16 * 16 * 4,
    tile_format="row_major",
    num_kv_heads=2,
    head_bytes=3 * 2 * 16 * 16 * 4,
)
READY = re.compile(r"ready on [\d.]+:(\d+)")


def ctl(stack: Any, name: str, *args: str, options: tuple[str, ...] = ()) -> Any:
    """Run `pdserve ctl` on a worker; its result has returncode, stdout and stderr."""
    (worker,) = [worker for worker in stack.workers if worker.name == name]
    command = [sys.executable, "-m", "pdserve_client", "ctl", *options]
    command += [f"127.0.0.1:{worker.port}", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def do(stack: Any, name: str, *args: str) -> str:
    """Run `pdserve ctl`, which has to succeed."""
    result = ctl(stack, name, *args)
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


def refusal(stack: Any, name: str, *args: str) -> str:
    """Run `pdserve ctl`, which has to fail with one line."""
    result = ctl(stack, name, *args)
    assert result.returncode == 1, result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    return str(result.stderr)


def table(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def state(stack: Any, name: str) -> str:
    return table(do(stack, name, "load"))["state"]


def generate(stack: Any) -> tuple[int, ...]:
    """Return an answer's tokens once nobody holds blocks of it: verbs are refused for those."""
    with Client(stack.grpc_address) as client:
        outputs = list(client.generate([5, 6, 7], GREEDY, timeout_s=WAIT_S))
    stack.assert_idle()
    return tuple(t for o in outputs for c in o.outputs for t in c.token_ids)


def wait_for_worker_state(stack: Any, role: str, state: str) -> None:
    """Wait until the router knows the worker so."""
    stack.wait_for("router", f'pdserve_workers{{role="{role}",state="{state}"}}', 1)


def test_a_paused_prefill_worker_is_left_out_and_comes_back(stack: Any) -> None:
    expected = generate(stack)
    assert do(stack, "prefill-0", "pause") == "paused\n"
    wait_for_worker_state(stack, "prefill", "paused")
    assert generate(stack) == expected, "decode serves alone"
    assert state(stack, "prefill-0") == "paused"
    assert do(stack, "prefill-0", "resume") == "resumed\n"
    wait_for_worker_state(stack, "prefill", "ready")
    assert generate(stack) == expected


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_workers_that_slept_hand_over_the_same_kv(stack: Any, name: str) -> None:
    expected = generate(stack)
    for level in ("1", "2"):
        slept = do(stack, name, "sleep", "--level", level)
        # Else it would be found ready because nobody knows yet that it was not.
        wait_for_worker_state(stack, name.split("-")[0], "paused")
        assert slept.startswith(f"asleep at level {level}, ")
        freed_mib = int(slept.split()[4])
        assert freed_mib >= 30
        assert state(stack, name) == f"asleep at level {level}"
        assert do(stack, name, "wake") == "awake: weights, kv_cache, scheduling\n"
        wait_for_worker_state(stack, name.split("-")[0], "ready")
        handed_over = 'pdserve_requests_routed_total{path="disaggregated",reason=""}'
        before = stack.metrics("router").get(handed_over, 0)
        assert generate(stack) == expected
        assert stack.metrics("router")[handed_over] == before + 1


def test_a_stack_without_awake_decode_workers_says_so(stack: Any) -> None:
    do(stack, "decode-0", "sleep")
    wait_for_worker_state(stack, "decode", "paused")
    with pytest.raises(grpc.RpcError) as error:
        generate(stack)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    do(stack, "decode-0", "wake", "weights", "kv_cache")
    do(stack, "decode-0", "wake", "scheduling")
    wait_for_worker_state(stack, "decode", "ready")
    assert generate(stack)


def messages_of_a_d_that_reads_nothing(
    hello: kv_pb2.KvLinkHello, sessions: "queue.Queue[Any]"
) -> Iterator[kv_pb2.KvLinkRequest]:
    """Grants what P asks for, each in `sessions` until a None; else heartbeats."""
    yield kv_pb2.KvLinkRequest(hello=hello)
    while True:
        try:
            session = sessions.get(timeout=0.5)
        except queue.Empty:
            yield kv_pb2.KvLinkRequest(heartbeat=kv_pb2.KvLinkHeartbeat())
            continue
        if session is None:
            return
        yield kv_pb2.KvLinkRequest(granted=kv_pb2.Granted(session=session))


@pytest.fixture
def held_session(stack: Any) -> Iterator[None]:
    """A prompt that P has computed for a D, which never reads it."""
    (prefill,) = [worker for worker in stack.workers if worker.name == "prefill-0"]
    sessions: queue.Queue[Any] = queue.Queue()
    with grpc.insecure_channel(f"127.0.0.1:{prefill.port}") as channel:
        stub = service_grpc.EngineCoreServiceStub(channel)
        info = stub.GetInfo(service_pb2.GetInfoRequest(), timeout=WAIT_S).info
        hello = kv_pb2.KvLinkHello(
            min_protocol_version=PROTOCOL_VERSION,
            max_protocol_version=PROTOCOL_VERSION,
            engine_id="idler",
            epoch="1" * 32,
            compatibility_hash=info.kv_compatibility_hash,
            layout=LAYOUT,
            connector="nixl",
        )
        link = kv_grpc.KvTransferServiceStub(channel).KvLink(
            messages_of_a_d_that_reads_nothing(hello, sessions), timeout=300
        )
        assert next(link).WhichOneof("message") == "welcome"
        request = core_pb2.EngineCoreRequest(request_id="held", prompt_token_ids=[5, 6, 7])
        request.sampling_params.max_tokens = 4
        request.kv_transfer_params.do_remote_decode = True
        request.kv_transfer_params.remote_engine_id = "idler"
        message = service_pb2.EngineCoreServiceGenerateRequest(request=request)
        outputs = stub.Generate(message, timeout=WAIT_S)
        asked = next(m.grant_request for m in link if m.WhichOneof("message") == "grant_request")
        sessions.put(asked.session)
        assert [list(o.output.new_token_ids) for o in outputs][-1], "P's part is done"
        yield
        sessions.put(None)


@pytest.mark.usefixtures("held_session")
def test_an_open_kv_session_keeps_a_prefill_worker_awake(stack: Any) -> None:
    held = "1 KV blocks are held, 0 requests are running, 1 KV sessions are open"
    assert held in refusal(stack, "prefill-0", "sleep", "--mode", "keep")
    assert held in refusal(stack, "prefill-0", "reset-cache")
    assert held in refusal(stack, "prefill-0", "pause", "--mode", "keep", "--clear-cache")
    assert state(stack, "prefill-0") == "serving"
    assert do(stack, "prefill-0", "sleep", "--mode", "abort").startswith("asleep at level 1")
    do(stack, "prefill-0", "wake")


def test_failures_are_one_line_and_status_1(stack: Any) -> None:
    assert refusal(stack, "decode-0", "resume") == "pdserve: FAILED_PRECONDITION: not paused\n"
    assert "FAILED_PRECONDITION: not asleep" in refusal(stack, "decode-0", "wake")
    assert "INVALID_ARGUMENT: tags has 'x'" in refusal(stack, "decode-0", "wake", "x")
    assert "no profile is running" in refusal(stack, "decode-0", "profile", "stop")
    nobody = [sys.executable, "-m", "pdserve_client", "ctl", "--timeout-s", "20", "127.0.0.1:1"]
    result = subprocess.run(
        [*nobody, "load"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1
    assert "UNAVAILABLE" in result.stderr
    assert "of a worker that is up" in result.stderr


def test_a_router_is_told_from_a_worker(stack: Any) -> None:
    command = [sys.executable, "-m", "pdserve_client", "ctl", stack.grpc_address, "load"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("pdserve: UNIMPLEMENTED: ")
    assert result.stderr.endswith("a router has no controls\n")


def test_info_load_profile_and_reset_cache_show_what_there_is(stack: Any) -> None:
    info = table(do(stack, "decode-0", "info"))
    assert (info["engine_id"], info["role"]) == ("decode-0", "DECODE")
    assert do(stack, "decode-0", "profile", "start") == "profiling\n"
    generate(stack)
    path = Path(do(stack, "decode-0", "profile", "stop").strip())
    assert path.stat().st_size > 1000
    assert do(stack, "decode-0", "reset-cache").endswith("cached blocks forgotten\n")
    load = table(do(stack, "decode-0", "load"))
    assert load["state"] == "serving"
    assert load["num_free_blocks"] == load["num_total_blocks"]


def test_a_timeout_that_is_no_number_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "pdserve_client", "ctl", "127.0.0.1:1", "--timeout-s", "soon"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "argument --timeout-s: 'soon' is no number of seconds" in result.stderr


def test_help_names_every_verb() -> None:
    command = [sys.executable, "-m", "pdserve_client", "ctl", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    verbs = ("pause", "resume", "sleep", "wake", "drain", "reset-cache", "profile", "info", "load")
    for word in (*verbs, "--timeout-s"):
        assert word in text


def test_a_drained_worker_stays_up_until_it_is_told_to_stop(
    make_served_model: Callable[..., Path], start_stack: Any
) -> None:
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=32768)
    with start_stack(model=model, dtype="float32", num_threads=1, prefill=0) as stack:
        with long_request(stack):
            drained = do(stack, "decode-0", "drain", "--drain-timeout-s", "0.1")
        assert drained.endswith("drained, 1 requests handed back\n")
        assert do(stack, "decode-0", "drain").endswith("drained, 1 requests handed back\n")
        assert "the worker is draining" in refusal(stack, "decode-0", "pause")
        assert state(stack, "decode-0") == "draining"
        (decode,) = stack.workers
        assert health(decode.port) == health_pb2.HealthCheckResponse.NOT_SERVING
        wait_for_worker_state(stack, "decode", "draining")


@contextlib.contextmanager
def long_request(stack: Any) -> Iterator[None]:
    """A request that the decode worker is busy with until somebody ends it."""
    (decode,) = stack.workers
    params = core_pb2.SamplingParams(temperature=0.0, max_tokens=32000, ignore_eos=True)
    request = core_pb2.EngineCoreRequest(
        request_id="long", prompt_token_ids=[5, 6, 7], sampling_params=params
    )
    with grpc.insecure_channel(f"127.0.0.1:{decode.port}") as channel:
        generate = service_grpc.EngineCoreServiceStub(channel).Generate
        call = generate(service_pb2.EngineCoreServiceGenerateRequest(request=request), timeout=120)
        next(call)
        yield


def test_a_worker_asked_to_stop_while_loading_goes_at_once() -> None:
    command = [sys.executable, "-m", "pdserve_decode", "--num-threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()  # the engine has begun to load
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(WAIT_S) == 0, line + rest
        assert "Traceback" not in line + rest
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def health(port: int) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2.HealthCheckRequest()
        return int(health_pb2_grpc.HealthStub(channel).Check(check, timeout=WAIT_S).status)


FAULT = """
import os
from pdserve_engine.core.engine_core import EngineCore

def install():
    step = EngineCore.begin_step
    def fail(core):
        if os.path.exists(os.environ["FAULT_FILE"]):
            raise RuntimeError("the device fell off")
        return step(core)
    EngineCore.begin_step = fail
"""


@pytest.fixture
def fault_env(tmp_path: Path) -> dict[str, str]:
    """An environment in which an installed plugin breaks the engine once FAULT_FILE exists."""
    (tmp_path / "fault.py").write_text(FAULT)
    info = tmp_path / "fault-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[pdserve.general_plugins]\nfault = fault:install\n")
    return {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "FAULT_FILE": str(tmp_path / "fault-is-due"),
    }


def test_a_dying_engine_tells_every_router_and_the_process_exits_to_be_restarted(
    make_served_model: Callable[..., Path], fault_env: dict[str, str]
) -> None:
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=1024)
    flags = ["--model", str(model), "--num-threads", "1", "--kv-connector", "none"]
    flags += ["--engine-process", "inproc", "--kv-cache-memory-mib", "8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve_decode", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=fault_env,
    )
    try:
        assert process.stderr is not None
        port = next(int(m[1]) for m in map(READY.search, process.stderr) if m is not None)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            routers = [attach(channel, name) for name in ("one", "two")]
            Path(fault_env["FAULT_FILE"]).touch()
            routers[0][0].put(add_request("doomed"))
            for _, responses in routers:
                dead = next(r.outputs.engine_dead for r in responses if r.outputs.engine_dead.code)
                assert dead.code == core_pb2.ERROR_CODE_ENGINE_DEAD
                assert "the device fell off" in dead.message
            for requests, _ in routers:
                requests.put(None)
        assert process.wait(WAIT_S) == 2
    finally:
        process.kill()
        process.wait()


def attach(channel: grpc.Channel, name: str) -> tuple["queue.Queue[Any]", Any]:
    """Return where to put a router's messages, None ends them, and what comes back."""
    requests: queue.Queue[Any] = queue.Queue()
    requests.put(
        service_pb2.AttachRequest(
            hello=service_pb2.AttachHello(
                router_id=name,
                router_epoch="0" * 32,
                max_protocol_version=attach_protocol.PROTOCOL_VERSION,
            )
        )
    )
    stub = service_grpc.EngineCoreServiceStub(channel)
    responses = stub.Attach(iter(requests.get, None), timeout=2 * WAIT_S)
    assert next(responses).WhichOneof("message") == "welcome"
    return requests, responses


def add_request(request_id: str) -> service_pb2.AttachRequest:
    request = core_pb2.EngineCoreRequest(request_id=request_id, prompt_token_ids=[5, 6, 7])
    request.sampling_params.max_tokens = 4
    return service_pb2.AttachRequest(add_request=request)
