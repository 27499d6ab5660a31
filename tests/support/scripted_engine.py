"""A scheduler with a stand-in executor, whose tokens depend on the request's tokens only, and
stand-in connectors for both roles: the test says when KV arrives.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

from pdserve_common.tokens.block_hash import ROOT_HASH, truncated_hashes
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    FinishReason,
    Generate,
    KVLost,
    KVTransferParams,
    KVTransferStats,
)
from pdserve_common.types.kv import KVCacheEvents
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.features.adapter_pool import AdapterPool
from pdserve_engine.core.features.waiting_for_fsm import CompileGrammar
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.kv.block_pool import NULL_BLOCK_ID, BlockPool, KVCacheBlock
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_transfer.ports import (
    BlocksConfirmed,
    BlocksFreed,
    BlocksLanded,
    BlocksReturned,
    GrantRequested,
    KVEvent,
    OffloadPort,
    PrefixConsumerPort,
    PrefixProducerPort,
    PullFinished,
    PullLost,
    RequestFailed,
    StartAllowed,
    StartDeferred,
    StartForbidden,
)
from pdserve_engine.request.request import Request, RequestContainer, RequestStatus
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput
from pdserve_engine.spec_decode.draft_lengths import DraftLengths
from pdserve_engine.spec_decode.proposer import Proposer
from support.drafts import AllOfThem, lengths_chosen_by

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
EOS = 999


def next_token(token_ids: tuple[int, ...] | list[int]) -> int:
    return (sum(token_ids) * 31 + len(token_ids)) % 500


class ScriptedRank:
    """Keeps its own view of every request from the scheduler's diffs, as the model runner does."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.steps: list[SchedulerOutput] = []
        self.num_nans: dict[str, int] = {}
        self.errors: dict[str, EngineError] = {}
        # Tokens to return instead of the usual ones, per request.
        self.script: dict[str, list[int]] = {}
        # Of a request that has so many tokens: is its grammar late with the next one?
        self.is_late: Callable[[str, int], bool] = lambda request_id, num_tokens: False
        # Those whose last token is to be computed again.
        self.late: set[str] = set()
        # Runs before a step is computed; may raise.
        self.on_step: Callable[[SchedulerOutput], object] = lambda step: None

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        self.on_step(step)
        for request_id in step.finished_req_ids | step.preempted_req_ids:
            for state in (self.tokens, self.num_computed, self.blocks):
                state.pop(request_id, None)
            self.late.discard(request_id)
        for new in step.scheduled_new_reqs:
            assert new.request_id not in self.tokens
            self.tokens[new.request_id] = list(new.all_token_ids)
            self.blocks[new.request_id] = list(new.block_ids[0])
            self.num_computed[new.request_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request_id, blocks, num_computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            assert self.num_computed[request_id] == num_computed or request_id in self.late
            self.num_computed[request_id] = num_computed
            self.blocks[request_id].extend(blocks[0] if blocks else [])
        sampled: list[tuple[int, ...]] = []
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            num_known = len(self.tokens[request_id])
            drafts = step.scheduled_spec_decode_tokens.get(request_id, ())
            if self.num_computed[request_id] == num_known and request_id in self.late:
                sampled.append(())  # planned before it was known to be late
                continue
            self.num_computed[request_id] += num_tokens - len(drafts)
            assert self.num_computed[request_id] <= num_known
            num_slots = len(self.blocks[request_id]) * BLOCK_SIZE
            assert self.num_computed[request_id] + len(drafts) <= num_slots
            if self.num_computed[request_id] == num_known and self.is_late(request_id, num_known):
                self.late.add(request_id)
                sampled.append(())
            elif self.num_computed[request_id] == num_known:
                self.late.discard(request_id)
                sampled.append(self._sample(request_id, drafts))
            else:
                sampled.append(())
        return ModelRunnerOutput(
            request_ids=tuple(step.num_scheduled_tokens),
            sampled_token_ids=tuple(sampled),
            num_nans_in_logits={
                name: num
                for name, num in self.num_nans.items()
                if name in step.num_scheduled_tokens
            },
            errors=self.errors,
        )

    def _sample(self, request_id: str, drafts: tuple[int, ...]) -> tuple[int, ...]:
        sampled: list[int] = []
        for draft in (*drafts, None):
            if sampled and self.is_late(request_id, len(self.tokens[request_id])):
                break
            token = next_token(self.tokens[request_id])
            if self.script.get(request_id):
                token = self.script[request_id].pop(0)
            self.tokens[request_id].append(token)
            sampled.append(token)
            if token != draft:
                break
        self.num_computed[request_id] += len(sampled) - 1
        return tuple(sampled)


class Engine:
    """A scheduler with its executor, and everything that came out of it."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        producer: "ScriptedProducer | None" = None,
        consumer: "ScriptedConsumer | None" = None,
        prefix_producer: PrefixProducerPort | None = None,
        prefix_consumer: PrefixConsumerPort | None = None,
        make_offload: Callable[[BlockPool], OffloadPort] | None = None,
        enable_caching: bool = True,
        async_scheduling: bool = False,
        windows: tuple[int | None, ...] = (None,),
        clock: Callable[[], float] = time.monotonic,
        compile_grammar: CompileGrammar | None = None,
        adapters: AdapterPool | None = None,
        proposer: Proposer | None = None,
        draft_lengths: type[DraftLengths] = AllOfThem,
        **config: object,
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching)
        self.kv = KVCacheManager(
            self.pool, BLOCK_SIZE, windows, max_tokens_in_flight=2 * max_num_batched_tokens
        )
        with lengths_chosen_by(draft_lengths):
            self.scheduler = Scheduler(
                SchedulerConfig(
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    **config,  # type: ignore[arg-type]
                ),
                self.kv,
                producer=producer,
                consumer=consumer,
                prefix_producer=prefix_producer,
                prefix_consumer=prefix_consumer,
                offload=None if make_offload is None else make_offload(self.pool),
                compile_grammar=compile_grammar,
                adapters=adapters,
                proposer=proposer,
                wakeup=self._on_wakeup,
                clock=clock,
            )
        self.num_wakeups = 0
        self.producer, self.consumer = producer, consumer
        for port in (producer, consumer):
            if port is not None:
                port.clock = clock
        self.rank = ScriptedRank()
        self.core = EngineCore(
            scheduler=self.scheduler,
            executor=UniprocExecutor(
                self.rank,  # type: ignore[arg-type]
                async_scheduling=async_scheduling,
                clock=clock,
            ),
            max_model_len=MAX_MODEL_LEN,
            clock=clock,
        )
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        # What the engine has said that its pool has cached.
        self.cached: set[int] = set()
        self.pool.record_events()

    def _on_wakeup(self) -> None:
        self.num_wakeups += 1

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int = 4, **fields: object
    ) -> None:
        params = fields.pop("sampling_params", None) or SamplingParams(max_tokens=max_tokens)
        self.core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                task=Generate(params),  # type: ignore[arg-type]
                eos_token_id=EOS,
                **fields,  # type: ignore[arg-type]
            )
        )

    def step(self) -> SchedulerOutput | None:
        result = self.core.step() if self.core.has_work() else self.core.poll()
        if result.kv_cache_events is not None:
            apply_events(self.cached, result.kv_cache_events)
        for outputs in result.outputs.values():
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
        return self.rank.steps[-1] if self.rank.steps else None

    def pretend_last_step(self, seconds: float) -> None:
        """As if it had taken so long: the next one is planned ahead of short ones."""
        self.core._last = self.core._last._replace(num_tokens=1, duration_s=seconds)

    def run(self, max_steps: int = 1000) -> None:
        num_polls = 0
        for _ in range(max_steps):
            # A connector would wake the engine up: D is asked in one poll, answers in the next.
            num_polls = 0 if self.core.has_work() else num_polls + 1
            if num_polls > 2:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        found: list[int] = []
        for output in self.outputs[request_id]:
            assert output.first_token_index == len(found)
            found.extend(output.new_token_ids)
        return found

    def finish_reason(self, request_id: str) -> FinishReason | None:
        finished = [output for output in self.outputs[request_id] if output.finished]
        assert len(finished) == 1, "exactly one terminal output"
        assert self.outputs[request_id][-1] is finished[0]
        return finished[0].finish_reason

    def assert_idle(self) -> None:
        self.kv.check_integrity()
        assert self.pool.num_free_blocks == self.pool.num_blocks
        assert not self.scheduler.has_requests()


def apply_events(cached: set[int], events: KVCacheEvents) -> None:
    """Do with a set of blocks what the events say."""
    if events.all_blocks_cleared:
        cached.clear()
    cached.difference_update(events.blocks_removed)
    cached.update(events.blocks_stored)


def cached_blocks(pool: BlockPool) -> list[tuple[bytes, KVCacheBlock]]:
    """The blocks that the pool has cached, with what they are found by."""
    return [(block.block_hash, block) for block in pool.blocks if block.block_hash is not None]


def cached_in(pool: BlockPool) -> set[int]:
    """What events call the blocks that the pool has cached; of the first KV group."""
    hashes = [block_hash for block_hash, _ in cached_blocks(pool)]
    return set(truncated_hashes(each for each in hashes if len(each) == len(ROOT_HASH)))


def num_requests_alive() -> int:
    """How many requests something of this process still holds."""
    gc.collect()
    return sum(type(item) is Request for item in gc.get_objects())


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def next_drafts(request: Request, num: int) -> list[int]:
    """What scripted ranks sample next."""
    return expected(list(request.all_token_ids), num)


def check_containers(scheduler: Scheduler) -> None:
    """Each request that has not ended is in one container, as its field and status say; those that
    wait for a turn, a source, decode or a grammar hold no blocks. All compute their own tokens in
    their own blocks.
    """
    containers = [
        each for each in vars(scheduler.containers).values() if isinstance(each, RequestContainer)
    ]
    found = [request for each in containers for request in each]
    assert len(found) == sum(map(len, containers)) == len(scheduler.requests)
    assert set(found) == set(scheduler.requests.values())
    for each in containers:
        assert all(r.container is each and r.status in each.statuses for r in each)
    with_blocks = {r for r in found if scheduler.kv.num_blocks_of(r.request_id)}
    assert all(bool(r.progress.num_slots) == (r in with_blocks) for r in found)
    here = scheduler.containers
    for each in (here.waiting, here.forks, here.remote_decodes, here.waiting_for_fsm):
        assert with_blocks.isdisjoint(each)
    for request in found:
        progress = request.progress
        num_tokens = request.num_tokens + progress.num_output_placeholders
        assert 0 <= progress.num_computed_tokens <= min(num_tokens, progress.num_slots)
        # A first step that was rolled back may be in flight.
        assert progress.num_finished_tokens >= 0 or request in here.remote_prefills
    num_preempted = sum(request.status is RequestStatus.PREEMPTED for request in found)
    assert scheduler.containers.num_preempted == num_preempted


def held(block_ids: tuple[list[int], ...]) -> list[int]:
    return [block_id for ids in block_ids for block_id in ids if block_id != NULL_BLOCK_ID]


class ScriptedPort:
    """What the connectors of both roles have; the test says when things happen."""

    # Its engine's.
    clock: Callable[[], float] = time.monotonic

    def __init__(self) -> None:
        self.pending_events: list[KVEvent] = []

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        pass

    def take_events(self) -> list[KVEvent]:
        events, self.pending_events = self.pending_events, []
        return events

    def failure(self) -> str | None:
        return None

    def shutdown(self) -> None:
        pass


class ScriptedProducer(ScriptedPort):
    """P's connector without any D."""

    def __init__(self) -> None:
        super().__init__()
        # Whether D reserves blocks at once, when it is asked.
        self.grants_at_once = True
        self.asked: dict[str, Request] = {}
        self.revoked: set[str] = set()
        self.announced: dict[str, int] = {}
        self.preempted: list[str] = []
        self.held: dict[str, list[int]] = {}
        self.aborted_sessions: list[str] = []

    # ---- what the scheduler calls

    def ask(self, request: Request) -> None:
        self.asked[request.request_id] = request
        if self.grants_at_once:
            self.allow(request.request_id)

    def on_started(self, request: Request) -> bool:
        return request.request_id not in self.revoked

    def on_blocks_computed(
        self, request: Request, num_tokens: int, block_ids: tuple[list[int], ...]
    ) -> None:
        assert num_tokens <= len(block_ids[0]) * BLOCK_SIZE
        self.announced[request.request_id] = num_tokens

    def on_preempted(self, request: Request) -> None:
        self.preempted.append(request.request_id)
        self.announced.pop(request.request_id, None)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        if not request.is_handed_off:
            return frozenset()
        self.held[request.request_id] = held(block_ids)
        return frozenset(held(block_ids))

    def abort_session(self, request_id: str) -> None:
        self.aborted_sessions.append(request_id)

    def fence_all(self, reason: str) -> None:
        for request_id in list(self.held):
            self.release(request_id)

    def num_open_sessions(self) -> int:
        return len(self.held)

    # ---- what the test makes happen

    def allow(self, request_id: str) -> None:
        self.pending_events.append(StartAllowed(self.asked[request_id], self.clock()))

    def later(self, request_id: str) -> None:
        """D is full."""
        self.pending_events.append(StartDeferred(self.asked[request_id]))

    def forbid(self, request_id: str) -> None:
        """D takes its blocks back; the scheduler hears of it with its next step."""
        self.revoked.add(request_id)
        self.pending_events.append(StartForbidden(self.asked[request_id]))

    def release(self, request_id: str) -> None:
        self.pending_events.append(BlocksFreed(tuple(self.held.pop(request_id))))


class ScriptedConsumer(ScriptedPort):
    """D's connector without any P."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: dict[str, Request] = {}
        self.loading: dict[str, tuple[list[int], int]] = {}
        self.confirmed: dict[str, int] = {}
        self.deferred: list[str] = []
        self.unlanded: dict[str, list[int]] = {}

    # ---- what the scheduler calls

    def on_new_request(self, request: Request) -> None:
        self.tickets[request.request_id] = request

    def grant(
        self, request: Request, block_ids: tuple[list[int], ...], num_cached_tokens: int
    ) -> bool:
        num_external = request.num_tokens - num_cached_tokens
        self.loading[request.request_id] = (held(block_ids), num_external)
        return True

    def defer(self, request: Request) -> None:
        self.deferred.append(request.request_id)

    def reclaim(self) -> Request | None:
        for request_id in reversed(self.loading):
            if request_id not in self.confirmed:
                del self.loading[request_id]
                return self.tickets[request_id]
        return None

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        del self.tickets[request.request_id]
        if request.request_id not in self.loading:
            return frozenset()
        del self.loading[request.request_id]
        self.unlanded.setdefault(request.request_id, []).extend(held(block_ids))
        return frozenset(held(block_ids))

    def fence_all(self, reason: str) -> None:
        pass

    def num_open_sessions(self) -> int:
        return len(self.loading)

    # ---- what the test makes happen

    def claim(self, request_id: str, asked_time: float | None = None) -> None:
        """P asks for blocks, or has done so at `asked_time`."""
        requested_time = self.clock() if asked_time is None else asked_time
        self.pending_events.append(GrantRequested(self.tickets[request_id], requested_time))

    def confirm(self, request_id: str, num_tokens: int) -> None:
        self.confirmed[request_id] = num_tokens
        self.pending_events.append(BlocksConfirmed(self.tickets[request_id], num_tokens))

    def land_all(self, request_id: str) -> None:
        """All KV is here, and P's first token; the release is not acknowledged."""
        request = self.tickets[request_id]
        del self.loading[request_id]
        tokens = (next_token(list(request.all_token_ids)),)
        self.pending_events.append(BlocksLanded(request, tokens, landed_time=self.clock()))

    def finish_load(self, request_id: str) -> None:
        """All KV is here, and P's first token."""
        self.land_all(request_id)
        self.accept(request_id)

    def accept(self, request_id: str) -> None:
        """The release is acknowledged: what has landed is right."""
        stats = KVTransferStats(
            num_bytes=1,
            num_blocks=1,
            num_reads=1,
            transport="test",
            transfer_s=0,
            exposed_s=0,
            release_ack_s=0,
        )
        self.pending_events.append(PullFinished(self.tickets[request_id], stats))

    def fail(self, request_id: str, error: EngineError) -> None:
        self.pending_events.append(RequestFailed(self.tickets[request_id], error))

    def lose(self, request_id: str) -> None:
        """P is gone; what is confirmed stays."""
        lost = KVLost(
            num_confirmed_tokens=self.confirmed.get(request_id, 0), reason="test", message="lost"
        )
        self.pending_events.append(PullLost(self.tickets[request_id], lost))

    def give_back(self, request_id: str, *, is_reading: bool) -> None:
        """P has preempted the request; a READ may still land in its blocks."""
        block_ids, _ = self.loading.pop(request_id)
        self.confirmed.pop(request_id, None)
        if is_reading:
            self.unlanded.setdefault(request_id, []).extend(block_ids)
        kept = frozenset(block_ids if is_reading else ())
        self.pending_events.append(BlocksReturned(self.tickets[request_id], kept))

    def land(self, request_id: str) -> None:
        self.pending_events.append(BlocksFreed(tuple(self.unlanded.pop(request_id))))


ON_P = KVTransferParams(do_remote_decode=True, remote_engine_id="d")
ON_D = KVTransferParams(do_remote_prefill=True, remote_engine_id="p")


def decode_engine(**options: Any) -> Engine:
    """Return a D whose P and transport do what the test says. Options are Engine's."""
    return Engine(consumer=ScriptedConsumer(), **options)
