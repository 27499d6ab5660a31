"""What a client has seen, whether it may have, and whether a cluster is again as it was before."""

import os
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
import psutil

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import Client
from pdserve_common.types.sampling_params import SamplingParams
from support.cluster import Cluster
from support.controls import ControlError
from support.waiting import busyness

SETTLE_TIMEOUT_S = 120.0
# A router is back within some seconds; until then the client tries again.
MAX_RESUMES = 12
HANDOFF_TIMEOUT_S = 120.0
TWO_TOKENS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
# So much more than before is no leak: pools of threads come and go, after a fault a worker may have
# a link to one more peer, which takes a few descriptors, and the C library keeps memory it has had
# once. A leak in every case shows after a few cases all the same.
SLACK = {"fds": 6, "threads": 6, "rss_mib": 64}
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
PROVEN = 'pdserve_worker_pairs{state="proven"}'
# Processes that the models of prefill workers are cut over.
NUM_RANKS = int(os.environ.get("PDSERVE_FAULT_RANKS", "1"))
HELD_SAMPLES = {
    "blocks": 'pdserve_kv_blocks{state="used"}',
    "unlanded": "pdserve_kv_unlanded_reads",
    "running": "pdserve_requests_running",
    "waiting": "pdserve_requests_waiting",
}


# The candidates' token ids, and their logprobs.
Position = tuple[list[int], list[float]]


@dataclass(slots=True)
class Completion:
    """What a client has of one completion."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    # One position per token, if asked for.
    logprobs: list[Position] = field(default_factory=list)
    finish_reason: int = 0
    stop_reason: int | str | None = None


class Answer(NamedTuple):
    """How one request ended for its client."""

    completions: dict[int, Completion]
    # Names of pdserve's ErrorCode, or of gRPC's status after "grpc ".
    errors: list[str]
    # How many messages said that they are the last.
    num_ends: int
    seconds: float
    # Of the last message; empty if the stream broke.
    metrics: pb2.RequestMetrics
    usage: pb2.Usage
    # One position per token of the prompt, if asked for.
    prompt_logprobs: Sequence[Position] = ()

    @property
    def token_ids(self) -> list[int]:
        """Of the first completion."""
        return self.completions[0].token_ids if 0 in self.completions else []

    @property
    def path(self) -> str:
        """What the router says of its way, "" if the stream broke."""
        return self.metrics.path


@dataclass(slots=True)
class Asking:
    """A request under way, for a test that does something meanwhile."""

    answer: "Future[Answer]" = field(default_factory=Future)
    completions: dict[int, Completion] = field(default_factory=lambda: defaultdict(Completion))

    @property
    def token_ids(self) -> list[int]:
        """Those of the first completion that have come."""
        return self.completions[0].token_ids

    def wait_for_tokens(self, count: int, timeout_s: float = 30.0) -> None:
        """Return as soon as the first completion has `count` tokens. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while len(self.token_ids) < count:
            if self.answer.done() or time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.token_ids)} tokens came, waited for {count}")
            time.sleep(0.002)


class Asker:
    """Sends requests to routers from threads; use as a context manager."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        max_requests: int = 32,
        max_resumes: int = MAX_RESUMES,
    ) -> None:
        self._client = Client(addresses, max_resumes=max_resumes)
        self._pool = ThreadPoolExecutor(max_requests)

    def start(
        self, prompt: Sequence[int], params: SamplingParams, *, deadline_s: float = 60.0
    ) -> Asking:
        """Send a request; it ends within `deadline_s`."""
        asking = Asking()
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
        errors, num_ends, last = [], 0, pb2.RequestOutput()
        prompt_logprobs: list[Position] = []
        try:
            # A salt of its own keeps what others have cached from hiding a transfer.
            salt = uuid.uuid4().hex
            stream = self._client.generate(prompt, params, timeout_s=deadline_s, cache_salt=salt)
            for output in stream:
                for completion in output.outputs:
                    _add(asking.completions[completion.index], completion)
                prompt_logprobs += _logprobs(output.prompt_logprobs)
                # The failure of a request is told with each of its completions.
                errors += dict.fromkeys(_errors(output))
                num_ends += output.finished
                last = output if output.finished else last
        except grpc.RpcError as error:
            errors.append(f"grpc {error.code().name}")
        except BaseException as error:  # the waiting test has to see it, whatever it is
            asking.answer.set_exception(error)
            return
        seconds = time.monotonic() - started
        completions = dict(sorted(asking.completions.items()))
        answer = Answer(
            completions, errors, num_ends, seconds, last.metrics, last.usage, prompt_logprobs
        )
        asking.answer.set_result(answer)


def _add(known: Completion, new: pb2.CompletionOutput) -> None:
    known.token_ids += new.token_ids
    known.text += new.text
    known.logprobs += _logprobs(new.logprobs)
    known.finish_reason = new.finish_reason or known.finish_reason
    if (reason := new.WhichOneof("stop_reason")) is not None:
        known.stop_reason = getattr(new, reason)


def _logprobs(lists: core_pb2.LogprobsLists) -> list[Position]:
    return [(list(position.token_ids), list(position.logprobs)) for position in lists.positions]


def check_answer(
    answer: Answer, expected: Answer, *, within_s: float, may_fail: bool = False
) -> None:
    """Assert that a request under a fault had what the run without it had or, if it may fail, that
    it got exactly one typed error in time, and no token that is not of that run. `within_s` is of
    an idle machine; twice of it shows that nobody waited for a deadline, and is not for chance.
    """
    allowed_s = 2 * within_s * busyness()
    assert answer.seconds <= allowed_s, (
        f"took {answer.seconds:.1f} s, allowed are {allowed_s:.1f} s"
    )
    if not answer.errors:
        assert answer.num_ends == 1, f"the stream said {answer.num_ends} times that it ends"
        _check_completions(answer, expected)
        return
    assert may_fail, f"failed with {answer.errors} after {answer.seconds:.1f} s"
    assert len(answer.errors) == 1, f"more than one error: {answer.errors}"
    assert answer.errors[0] in TYPED_ERRORS
    assert answer.num_ends == (not answer.errors[0].startswith("grpc"))
    for index, completion in answer.completions.items():
        whole = expected.completions[index].token_ids
        assert completion.token_ids == whole[: len(completion.token_ids)]


def _check_completions(answer: Answer, expected: Answer) -> None:
    for index, right in expected.completions.items():
        completion = answer.completions[index]
        assert completion.token_ids == right.token_ids, f"of completion {index}"
        assert completion.text == right.text
        assert completion.finish_reason == right.finish_reason
        assert completion.stop_reason == right.stop_reason
        _check_logprobs(completion.logprobs, right.logprobs)
    _check_logprobs(answer.prompt_logprobs, expected.prompt_logprobs)
    assert answer.completions.keys() == expected.completions.keys()
    assert answer.usage.num_prompt_tokens == expected.usage.num_prompt_tokens
    assert answer.usage.num_output_tokens == expected.usage.num_output_tokens


def _check_logprobs(logprobs: Sequence[Position], expected: Sequence[Position]) -> None:
    assert len(logprobs) == len(expected)
    for (ids, values), (right_ids, right_values) in zip(logprobs, expected, strict=True):
        assert ids == right_ids
        differences = (abs(a - b) for a, b in zip(values, right_values, strict=True))
        assert max(differences, default=0.0) < 1e-5


def wait_until_handing_off(
    cluster: Cluster, asker: Asker, *, timeout_s: float = HANDOFF_TIMEOUT_S
) -> None:
    """Wait until every router has proven all pairs: a proof would be held at a stage in a request's
    stead. Then send requests until each pair has handed off at the first try, and nothing else has
    come since: after a fault a link may still be the old one, or wait for its next try. Raises
    ClusterError.
    """
    cluster.wait_for(lambda: find_unproven(cluster), timeout_s=timeout_s)
    good: set[tuple[str, str]] = set()

    def find_missing() -> str:
        answer = asker.ask([3, 4, 5], TWO_TOKENS, deadline_s=timeout_s)
        is_first_try = not answer.errors and not answer.metrics.num_redrives
        if not is_first_try or answer.path != "disaggregated":
            good.clear()
            return f"not handed off: {answer}"
        good.add((answer.metrics.prefill_engine_id, answer.metrics.decode_engine_id))
        return "" if len(good) == _num_pairs(cluster) else f"handed off only between {good}"

    cluster.wait_for(find_missing, timeout_s=timeout_s)


def _num_pairs(cluster: Cluster) -> int:
    return len(cluster.of_role("prefill")) * len(cluster.of_role("decode"))


def find_unproven(cluster: Cluster) -> str:
    """Return which router has not proven all pairs, or that it does not answer; "" if all have."""
    for router in cluster.routers:
        try:
            num_proven = cluster.metrics(router).get(PROVEN)
        except OSError as error:
            return f"{router}: {error}"
        if num_proven != _num_pairs(cluster):
            return f"{router} has proven {num_proven} pairs"
    return ""


class Held(NamedTuple):
    """What a process holds. Of a router: requests, descriptors, threads and memory."""

    blocks: float = 0
    sessions: float = 0
    unlanded: float = 0
    running: float = 0
    waiting: float = 0
    handles: float = 0
    registered_bytes: float = 0
    # NIXL's, of which there is no KvLink.
    orphans: float = 0
    fds: float = 0
    threads: float = 0
    rss_mib: float = 0


def held(cluster: Cluster) -> dict[str, Held]:
    """Return what each process holds now. Raises OSError or ControlError if one does not answer."""
    return {name: _held(cluster, name) for name in cluster.members}


def wait_for_baseline(
    cluster: Cluster,
    baseline: dict[str, Held],
    *,
    slack: Mapping[str, int] = SLACK,
    timeout_s: float = SETTLE_TIMEOUT_S,
) -> None:
    """Wait until each running process holds what it did, but for `slack`. Raises ClusterError with
    the rest.
    """

    def find_more() -> str:
        try:
            more = [
                line
                for name, member in cluster.members.items()
                if member.is_running
                for line in _compare(name, baseline[name], _held(cluster, name), slack)
            ]
        except (OSError, ControlError) as error:
            return f"no answer: {error}"
        return "; ".join(more)

    cluster.wait_for(find_more, timeout_s=timeout_s)


def _compare(name: str, before: Held, now: Held, slack: Mapping[str, int]) -> Iterator[str]:
    for what, old, new in zip(Held._fields, before, now, strict=True):
        if new > old + slack[what] if what in slack else new != old:
            yield f"{name} holds {new:g} {what}, held {old:g}"


def _held(cluster: Cluster, name: str) -> Held:
    process = psutil.Process(cluster.members[name].pid)
    system = {
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "rss_mib": process.memory_info().rss / 2**20,
    }
    samples = cluster.metrics(name)
    if name in cluster.routers:
        return Held(running=samples["pdserve_requests_in_flight"], **system)
    sessions = sum(v for key, v in samples.items() if key.startswith("pdserve_kv_sessions{"))
    counts = cluster.controls(name).counts()
    nixl = {
        "handles": counts["handles"],
        "registered_bytes": counts["registered_bytes"],
        # D has a peer for each rank of P.
        "orphans": max(0, counts["peers"] // NUM_RANKS - int(samples["pdserve_kv_links"])),
    }
    gauges = {what: samples[sample] for what, sample in HELD_SAMPLES.items()}
    return Held(sessions=sessions, **gauges, **nixl, **system)


def _errors(output: pb2.RequestOutput) -> Iterator[str]:
    for completion in output.outputs:
        if completion.HasField("error"):
            yield core_pb2.ErrorCode.Name(completion.error.code).removeprefix("ERROR_CODE_")
