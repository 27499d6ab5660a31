"""Measures a `CostProfile` of workers that are up, by what any client sees: token times, and the
metrics on the last message of a stream.
"""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.advisor.cost_profile import CostProfile, HandoffCost, StepCost, WorkerLimits
from pdserve_client.advisor.least_squares import Fit, fit
from pdserve_client.client import AsyncClient
from pdserve_common.rpc.channels import open_blocking_channel
from pdserve_common.rpc.tls import Tls
from pdserve_common.types.engine import EngineInfo, WorkerRole
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.wire import from_proto

# Below it most tokenizers have their special tokens.
FIRST_TOKEN_ID = 3
INFO_TIMEOUT_S = 10.0
# A prompt's probe has its first token, the first step of decode, and one more.
PROBE_OUTPUT_TOKENS = 3
# Steps with a full batch that count as a measurement, and that are asked for.
MIN_STEPS, WANTED_STEPS = 8, 24
# The measurement fills at most this part of the pool, so that nobody is preempted.
MAX_POOL_SHARE = 0.7


class Probe(NamedTuple):
    """One request as its client saw it."""

    num_prompt_tokens: int
    start: float
    token_times: list[float]
    metrics: pb2.RequestMetrics

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.start


class DecodeSample(NamedTuple):
    """Steps of a batch that did not change."""

    num_rows: int
    num_context_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. Raises ValueError."""

    max_prompt_tokens: int = 4096
    max_batch: int = 64
    repeats: int = 5
    timeout_s: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        lowest = {"max_prompt_tokens": 64, "max_batch": 1, "repeats": 1}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {low}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"timeout_s is {self.timeout_s}, must be a number above 0")


def get_info(address: str, tls: Tls | None) -> EngineInfo:
    """Return what the worker at `address` says of itself. Raises grpc.RpcError."""
    with open_blocking_channel(address, tls) as channel:
        stub = service_grpc.EngineCoreServiceStub(channel)
        response = stub.GetInfo(service_pb2.GetInfoRequest(), timeout=INFO_TIMEOUT_S)
    return from_proto(EngineInfo, response.info)


@dataclass(slots=True)
class Profiler:
    """Measures through one router with at most one worker of each role, which nobody else uses."""

    client: AsyncClient
    decode: EngineInfo
    # None: decode workers compute prompts.
    prefill: EngineInfo | None
    plan: Plan
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.plan.seed)
        for info, role in ((self.decode, WorkerRole.DECODE), (self.prefill, WorkerRole.PREFILL)):
            if info is not None and info.role is not role:
                raise ValueError(f"{info.engine_id} is a {info.role.name.lower()} worker")

    async def measure(self, machine: str, measured_at: str) -> CostProfile:
        """Measure all. Raises ValueError if requests go other ways than the workers given, or
        grpc.RpcError.
        """
        probes = await self._probe_prompts()
        chunk_tokens = (self.prefill or self.decode).max_num_batched_tokens
        prefill = fit_prefill(probes, chunk_tokens)
        samples = await self._sample_decode(prefill, probes)
        decode = fit_decode(samples)
        residuals = {"prefill": prefill, "decode": decode}
        handoff = None
        if self.prefill is not None:
            transfer = fit_transfer(probes, chunk_tokens)
            residuals["transfer"] = transfer
            handoff = _handoff(probes, transfer)
        return CostProfile(
            model=self.decode.model,
            machine=machine,
            measured_at=measured_at,
            step=_step_cost(prefill, decode),
            decode_worker=_limits(self.decode),
            prefill_worker=None if self.prefill is None else _limits(self.prefill),
            handoff=handoff,
            overhead_s=max(0.0, statistics.median(map(_overhead_s, probes))),
            residuals={
                name: [each.median_error, each.max_error] for name, each in residuals.items()
            },
        )

    async def _probe_prompts(self) -> list[Probe]:
        """One request at a time, prompts of many lengths in random order."""
        lengths = prompt_lengths(self._max_prompt_tokens) * self.plan.repeats
        await self._send(lengths[0], PROBE_OUTPUT_TOKENS)  # the first ones of a process take longer
        await self._send(max(lengths), PROBE_OUTPUT_TOKENS)
        self._rng.shuffle(lengths)
        probes = []
        for number, length in enumerate(lengths, 1):
            self.say(f"prompts: {number} of {len(lengths)}, {length} tokens")
            probes.append(await self._send(length, PROBE_OUTPUT_TOKENS))
        return probes

    @property
    def _max_prompt_tokens(self) -> int:
        limits = [info.num_blocks * info.block_size // 2 for info in self._infos]
        longest = min(info.max_model_len for info in self._infos) - PROBE_OUTPUT_TOKENS
        return min(self.plan.max_prompt_tokens, longest, *limits)

    @property
    def _infos(self) -> list[EngineInfo]:
        return [info for info in (self.prefill, self.decode) if info is not None]

    async def _sample_decode(self, prefill: Fit, probes: Sequence[Probe]) -> list[DecodeSample]:
        """Batches of several sizes, with short and with long contexts."""
        step_s = statistics.median(b - a for p in probes for a, b in [p.token_times[-2:]])
        sizes = batch_sizes(min(self.plan.max_batch, self.decode.max_num_seqs))
        cases = [(size, length) for size in sizes for length in self._contexts()]
        samples = []
        for number, (size, length) in enumerate(cases, 1):
            # So many steps until the last prompt is there.
            base_s, token_s, pair_s = prefill.coefficients
            prompt_s = base_s + token_s * length + pair_s * length**2 / 2
            num_tokens = WANTED_STEPS + math.ceil(1.5 * size * prompt_s / step_s)
            if not self._has_room(size, length, num_tokens):
                continue
            self.say(f"batches: {number} of {len(cases)}, {size} x {length} tokens")
            found = [await self._sample(size, length, num_tokens) for _ in range(self.plan.repeats)]
            if good := [sample for sample in found if sample is not None]:
                samples.append(sorted(good, key=lambda sample: sample.step_s)[len(good) // 2])
        if len(samples) < 3:
            raise ValueError("fewer than 3 batches could be held long enough to be measured")
        return samples

    def _contexts(self) -> list[int]:
        longest = self._max_prompt_tokens // 2
        return sorted({min(32, longest), longest // 4, longest})

    def _has_room(self, size: int, length: int, num_tokens: int) -> bool:
        longest = length + num_tokens
        in_pool = self.decode.num_blocks * self.decode.block_size * MAX_POOL_SHARE
        return size * longest <= in_pool and longest <= self.decode.max_model_len

    async def _sample(self, size: int, length: int, num_tokens: int) -> DecodeSample | None:
        """None if the batch was not held for long enough."""
        probes = await asyncio.gather(*(self._send(length, num_tokens) for _ in range(size)))
        return sample_of(probes)

    async def _send(self, num_prompt_tokens: int, num_output_tokens: int) -> Probe:
        """Send a prompt of random tokens, which nobody has cached."""
        vocab_size = self.decode.vocab_size
        prompt = [self._rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(num_prompt_tokens)]
        params = SamplingParams(
            max_tokens=num_output_tokens, ignore_eos=True, seed=self._rng.getrandbits(31)
        )
        probe = Probe(num_prompt_tokens, self.clock(), [], pb2.RequestMetrics())
        async for output in self.client.generate(prompt, params, timeout_s=self.plan.timeout_s):
            for completion in output.outputs:
                if completion.HasField("error"):
                    raise ValueError(f"a probe failed: {completion.error.message}")
                probe.token_times.extend([self.clock()] * len(completion.token_ids))
            if output.finished:
                probe.metrics.CopyFrom(output.metrics)
        self._check_workers(probe.metrics)
        return probe

    def _check_workers(self, metrics: pb2.RequestMetrics) -> None:
        """Raises ValueError if others than the workers given took a request."""
        prefill = "" if self.prefill is None else self.prefill.engine_id
        found = metrics.prefill_engine_id, metrics.decode_engine_id
        if found != (prefill, self.decode.engine_id):
            raise ValueError(
                f"a probe went to prefill {found[0] or 'none'} and decode {found[1]}: the router "
                f"must have {prefill or 'no prefill worker'} and {self.decode.engine_id} alone"
            )


def prompt_lengths(longest: int) -> list[int]:
    """Return lengths from 16 to `longest` tokens, each about 1.5 times the one before."""
    lengths = [16.0]
    while lengths[-1] * 1.5 < longest:
        lengths.append(lengths[-1] * 1.5)
    return [*map(round, lengths), longest]


def batch_sizes(most: int) -> list[int]:
    """Return powers of two up to `most`, and `most`."""
    return sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)})


def sample_of(probes: Sequence[Probe]) -> DecodeSample | None:
    """Return the mean step while all of the requests were in the batch; None if that were few."""
    # The second token is the first that decode brought.
    begin = max(probe.token_times[1] for probe in probes)
    end = min(probe.token_times[-1] for probe in probes)
    counts = [sum(begin < moment <= end for moment in probe.token_times) for probe in probes]
    if min(counts) < MIN_STEPS:
        return None
    num_context = sum(
        probe.num_prompt_tokens + sum(moment <= begin for moment in probe.token_times) + count / 2
        for probe, count in zip(probes, counts, strict=True)
    )
    return DecodeSample(len(probes), num_context, (end - begin) / statistics.mean(counts))


def fit_prefill(probes: Sequence[Probe], chunk_tokens: int) -> Fit:
    """Fit seconds of a chunk, of a token, and of a pair of tokens of which one sees the other."""
    rows = [
        (math.ceil(n / chunk_tokens), n, n**2 / 2) for n in (p.num_prompt_tokens for p in probes)
    ]
    return fit(*_medians(rows, [probe.metrics.prefill_ns / 1e9 for probe in probes]))


def fit_transfer(probes: Sequence[Probe], chunk_tokens: int) -> Fit:
    """Fit seconds of a chunk that is read, and of a token."""
    rows = [(math.ceil(n / chunk_tokens), n) for n in (p.num_prompt_tokens for p in probes)]
    return fit(*_medians(rows, [probe.metrics.kv_transfer_ns / 1e9 for probe in probes]))


def fit_decode(samples: Sequence[DecodeSample]) -> Fit:
    """Fit seconds of a step, of a row, and of a token that a row sees."""
    rows = [(1.0, sample.num_rows, sample.num_context_tokens) for sample in samples]
    return fit(rows, [sample.step_s for sample in samples])


def _medians(
    rows: Sequence[tuple[float, ...]], values: Sequence[float]
) -> tuple[list[tuple[float, ...]], list[float]]:
    """Return each row once, with the median of its values. Raises ValueError for a value of 0."""
    by_row: dict[tuple[float, ...], list[float]] = {}
    for row, value in zip(rows, values, strict=True):
        by_row.setdefault(row, []).append(value)
    medians = [statistics.median(found) for found in by_row.values()]
    if min(medians) <= 0:
        raise ValueError("the router's metrics say that prompts or transfers took no time")
    return list(by_row), medians


def _grant_s(probe: Probe) -> float:
    """What a request waits for an idle decode worker's grant; 0 without a handoff."""
    metrics = probe.metrics
    waited_ns = metrics.prefill_queue_ns + metrics.decode_queue_ns
    return waited_ns / 1e9 if metrics.prefill_engine_id else 0.0


def _overhead_s(probe: Probe) -> float:
    return probe.ttft_s - probe.metrics.prefill_ns / 1e9 - _grant_s(probe)


def _step_cost(prefill: Fit, decode: Fit) -> StepCost:
    prefill_base_s, prompt_token_s, prompt_pair_s = prefill.coefficients
    decode_base_s, row_s, context_token_s = decode.coefficients
    return StepCost(
        prefill_base_s=prefill_base_s,
        prompt_token_s=prompt_token_s,
        prompt_pair_s=prompt_pair_s,
        decode_base_s=decode_base_s,
        row_s=row_s,
        context_token_s=context_token_s,
    )


def _handoff(probes: Sequence[Probe], transfer: Fit) -> HandoffCost:
    chunk_s, token_s = transfer.coefficients
    admits = [
        m.first_itl_ns - m.kv_transfer_exposed_ns - m.first_decode_step_ns
        for m in (probe.metrics for probe in probes)
    ]
    num_bytes = [p.metrics.kv_transfer_bytes / p.num_prompt_tokens for p in probes]
    return HandoffCost(
        grant_s=statistics.median(map(_grant_s, probes)),
        chunk_s=chunk_s,
        token_s=token_s,
        admit_s=max(0.0, statistics.median(admits) / 1e9),
        bytes_per_token=statistics.median(num_bytes),
    )


def _limits(info: EngineInfo) -> WorkerLimits:
    return WorkerLimits(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
    )


def check_reachable(error: grpc.RpcError, address: str) -> ValueError:
    """Return what to tell of a worker that does not answer."""
    return ValueError(
        f"{address}: {error.code().name}: {error.details()}; it must be the gRPC host:port of a "
        "worker that is up; one that speaks TLS wants all three files of --tls-*-file"
    )
