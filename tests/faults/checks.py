"""What a client has seen, whether it may have, and whether a cluster is again as it was before."""

import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
import psutil
from cluster import Cluster
from controls import ControlError

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import Client
from pdserve_common.engine_types import SamplingParams

SETTLE_TIMEOUT_S = 15.0
HANDOFF_TIMEOUT_S = 20.0
TWO_TOKENS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
# Pools of threads come and go, and after a fault a worker may have a link to one more peer, which
# takes a few descriptors. A leak of one in every case shows after a few cases all the same.
SLACK = 6
# Errors that tell a client what to do. Anything else is a defect.
TYPED_ERRORS = frozenset(
    {
        "OVERLOADED",
        "NO_WORKER",
        "KV_TRANSFER_FAILED",
        "KV_EXPIRED",
        "DEADLINE_EXCEEDED",
        "ENGINE_DEAD",
        "DRAINING",
        "grpc UNAVAILABLE",
        "grpc RESOURCE_EXHAUSTED",
        "grpc DEADLINE_EXCEEDED",
    }
)
HELD_SAMPLES = {
    "blocks": 'pdserve_kv_blocks{state="used"}',
    "zombies": "pdserve_kv_zombie_reads",
    "running": "pdserve_requests_running",
    "waiting": "pdserve_requests_waiting",
}


class Answer(NamedTuple):
    """How one request ended for its client."""

    token_ids: list[int]
    # Names of pdserve's ErrorCode, or of gRPC's status after "grpc ".
    errors: list[str]
    # How many messages said that they are the last.
    num_ends: int
    seconds: float
    # What the router says of its way, "" if the stream broke.
    path: str


@dataclass(slots=True)
class Asking:
    """A request under way, for a test that does something meanwhile."""

    answer: "Future[Answer]"
    token_ids: list[int] = field(default_factory=list)

    def wait_for_tokens(self, count: int, timeout_s: float = 10.0) -> None:
        """Return as soon as the client has `count` tokens. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while len(self.token_ids) < count:
            if self.answer.done() or time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.token_ids)} tokens came, waited for {count}")
            time.sleep(0.002)


class Asker:
    """Sends requests to a router from threads; use as a context manager."""

    def __init__(self, address: str, *, max_requests: int = 32) -> None:
        self._client = Client(address)
        self._pool = ThreadPoolExecutor(max_requests)

    def start(
        self, prompt: Sequence[int], params: SamplingParams, *, deadline_s: float = 60.0
    ) -> Asking:
        """Send a request; it ends within `deadline_s`."""
        asking = Asking(Future())
        self._pool.submit(self._collect, asking, list(prompt), params, deadline_s)
        return asking

    def ask(
        self, prompt: Sequence[int], params: SamplingParams, *, deadline_s: float = 60.0
    ) -> Answer:
        """Send a request and return its answer."""
        return self.start(prompt, params, deadline_s=deadline_s).answer.result(deadline_s + 5.0)

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()
        self._pool.shutdown()

    def _collect(
        self, asking: Asking, prompt: list[int], params: SamplingParams, deadline_s: float
    ) -> None:
        started = time.monotonic()
        errors, num_ends, path = [], 0, ""
        try:
            # A salt of its own keeps what others have cached from hiding a transfer.
            salt = uuid.uuid4().hex
            stream = self._client.generate(prompt, params, timeout_s=deadline_s, cache_salt=salt)
            for output in stream:
                asking.token_ids += [t for c in output.outputs for t in c.token_ids]
                errors += list(_errors(output))
                num_ends += output.finished
                path = output.metrics.path or path
        except grpc.RpcError as error:
            errors.append(f"grpc {error.code().name}")
        except BaseException as error:  # the waiting test has to see it, whatever it is
            asking.answer.set_exception(error)
            return
        seconds = time.monotonic() - started
        asking.answer.set_result(Answer(asking.token_ids, errors, num_ends, seconds, path))


def check_answer(
    answer: Answer, expected: Sequence[int], *, within_s: float, may_fail: bool = True
) -> None:
    """Assert that a request under a fault had the tokens of the run without it, or that it got
    exactly one typed error in time, and no token that is not of that run.
    """
    assert answer.seconds <= within_s, f"took {answer.seconds:.1f} s, allowed are {within_s:g} s"
    if not answer.errors:
        assert answer.num_ends == 1, f"the stream said {answer.num_ends} times that it ends"
        assert answer.token_ids == list(expected)
        return
    assert may_fail, f"failed with {answer.errors}"
    assert len(answer.errors) == 1, f"more than one error: {answer.errors}"
    assert answer.errors[0] in TYPED_ERRORS
    assert answer.num_ends == (not answer.errors[0].startswith("grpc"))
    assert answer.token_ids == list(expected)[: len(answer.token_ids)]


def wait_until_handing_off(
    cluster: Cluster, asker: Asker, *, timeout_s: float = HANDOFF_TIMEOUT_S
) -> None:
    """Send requests until as many in a row cross the handoff as there are workers. After a fault a
    connection may still wait for its next try. Raises ClusterError.
    """
    num_good = 0

    def find_missing() -> str:
        nonlocal num_good
        answer = asker.ask([3, 4, 5], TWO_TOKENS, deadline_s=timeout_s)
        is_good = not answer.errors and answer.path == "disaggregated"
        num_good = num_good + 1 if is_good else 0
        return "" if num_good >= len(cluster.workers) else f"not handed off: {answer}"

    cluster.wait_for(find_missing, timeout_s=timeout_s)


class Held(NamedTuple):
    """What a process holds. Of the router: requests, descriptors and threads."""

    blocks: float = 0
    sessions: float = 0
    zombies: float = 0
    running: float = 0
    waiting: float = 0
    handles: float = 0
    registered_bytes: float = 0
    # NIXL's, of which there is no KvLink.
    orphans: float = 0
    fds: float = 0
    threads: float = 0


# More of these than before is no leak as long as it is few.
LOOSE = ("fds", "threads")


def held(cluster: Cluster) -> dict[str, Held]:
    """Return what each process holds now. Raises OSError or ControlError if one does not answer."""
    return {name: _held(cluster, name) for name in cluster.members}


def wait_for_baseline(
    cluster: Cluster, baseline: dict[str, Held], *, timeout_s: float = SETTLE_TIMEOUT_S
) -> None:
    """Wait until no running process holds more than it did. Raises ClusterError with the rest."""

    def find_more() -> str:
        try:
            more = [
                line
                for name, member in cluster.members.items()
                if member.is_running
                for line in _compare(name, baseline[name], _held(cluster, name))
            ]
        except (OSError, ControlError) as error:
            return f"no answer: {error}"
        return "; ".join(more)

    cluster.wait_for(find_more, timeout_s=timeout_s)


def _compare(name: str, before: Held, now: Held) -> Iterator[str]:
    for what, old, new in zip(Held._fields, before, now, strict=True):
        if new > old + (SLACK if what in LOOSE else 0):
            yield f"{name} holds {new:g} {what}, held {old:g}"


def _held(cluster: Cluster, name: str) -> Held:
    process = psutil.Process(cluster.members[name].pid)
    system = {"fds": process.num_fds(), "threads": process.num_threads()}
    samples = cluster.metrics(name)
    if name == "router":
        return Held(running=samples["pdserve_requests_in_flight"], **system)
    sessions = sum(v for key, v in samples.items() if key.startswith("pdserve_kv_sessions{"))
    sessions += samples.get("pdserve_kv_sessions", 0)
    counts = cluster.controls(name).counts()
    nixl = {
        "handles": counts["handles"],
        "registered_bytes": counts["registered_bytes"],
        "orphans": max(0, counts["peers"] - int(samples["pdserve_kv_links"])),
    }
    gauges = {what: samples[sample] for what, sample in HELD_SAMPLES.items()}
    return Held(sessions=sessions, **gauges, **nixl, **system)


def _errors(output: pb2.RequestOutput) -> Iterator[str]:
    for completion in output.outputs:
        if completion.HasField("error"):
            yield core_pb2.ErrorCode.Name(completion.error.code).removeprefix("ERROR_CODE_")
