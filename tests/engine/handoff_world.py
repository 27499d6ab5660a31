"""Prefill and decode workers with real schedulers and connectors, and all around them made by
chance: when a message arrives, when a block is copied, what fails.

A block's memory holds a number for each of its tokens, made of all tokens up to it, and -1 when
nobody can ask for it any more. So every step can check what it is about to read. A step that runs
before P's acknowledgement may read what is wrong: then its token and its KV are wrong as well.
"""

import collections
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from pdserve_common.errors import KVTransferError
from pdserve_common.limits.validation import MAX_PROBE_BLOCKS, MAX_PROBE_TOKENS, PROBE_PRIORITY
from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    Generate,
    KVTransferParams,
)
from pdserve_common.types.kv import (
    KVEndpoint,
    KVGroup,
    KVGroupKind,
    KVLayout,
    KVLinkWelcome,
    KVMemoryRegion,
    KVRankEndpoint,
    new_epoch,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.clients.owners import RequestOwners
from pdserve_engine.config import NUM_PROBE_SLOTS, SchedulerConfig
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.scheduler import PauseState, Scheduler
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.kv.block_pool import BlockPool
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_transfer.base import ConnectorContext, KVIdentity, KVTransport, ReadResult
from pdserve_engine.kv_transfer.connectors.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_engine.kv_transfer.connectors.producer import ProducerConnector
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput
from support.drafts import MixedProposer, lengths_chosen_by
from support.handoff import Wire
from support.modelled_rank import DEAD, ModelledRank
from support.scripted_engine import (
    BLOCK_SIZE,
    EOS,
    MAX_MODEL_LEN,
    check_containers,
    expected,
    next_drafts,
)

NUM_BLOCKS = 20
MAX_LIVE = 12
# Before and after each of these calls of the scheduler other threads may get their turn.
SEAMS = (
    "take_events", "on_new_request", "ask", "on_started", "on_blocks_computed", "on_preempted",
    "grant", "defer", "reclaim", "request_finished",
)  # fmt: skip


class Rank(ModelledRank):
    """Checks the slots as well, and lets other threads run in the middle of a step."""

    def __init__(self, worker: "Worker") -> None:
        super().__init__(worker.memory, worker.windows)
        self._worker = worker
        self.fails_next = False

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self.fails_next and step.num_scheduled_tokens:
            self.fails_next = False
            raise RuntimeError("a passing fault")
        return super().execute_model(step)

    def compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._check_slots()
        self._worker.world.other_threads()
        output = super().compute(step)
        self._worker.world.num_drafts += sum(
            len(drafts)
            for request_id, drafts in step.scheduled_spec_decode_tokens.items()
            if output.sampled_token_ids[output.request_ids.index(request_id)]
        )
        self._worker.world.other_threads()
        return output

    def _check_slots(self) -> None:
        scheduler = self._worker.scheduler
        num_probes = sum(request.is_probe for request in scheduler.running)
        assert num_probes <= NUM_PROBE_SLOTS
        assert len(scheduler.running) - num_probes <= scheduler.config.max_num_seqs
        assert self.num_known <= scheduler.config.max_batch_size, "no row is left"

    def watch(self, request_id: str, is_right: bool) -> None:
        request = self._worker.scheduler.requests.get(request_id)
        if request is not None and request.handoff.needs_remote_kv:
            self._worker.world.num_first_steps[is_right] += 1
        else:
            assert is_right, "a step reads KV that is not its own"


@dataclass(eq=False)
class Read:
    """A posted READ; `pairs` of block ids are still to be copied."""

    peer: str
    source: "Worker"
    pairs: list[tuple[int, int]]
    on_done: Callable[[ReadResult], None]
    on_stall: Callable[[], None]
    is_stalled: bool = False


class Nic(KVTransport):
    """Copies block by block, in any order, when the world says so."""

    name = "nic"

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._peers: dict[str, tuple[Worker, Callable[[str], None]]] = {}
        self._numbers = itertools.count()
        self.reads: list[Read] = []

    def endpoint(self) -> KVEndpoint:
        region = KVMemoryRegion(
            base_address=1, first_block=0, num_blocks=self._worker.pool.num_blocks
        )
        rank = KVRankEndpoint(memory_type="DRAM", regions=(region,), nixl_metadata=b"")
        return KVEndpoint(ranks=(rank,), transport="")

    def add_peer(self, peer: KVLinkWelcome, on_lost: Callable[[str], None]) -> str:
        key = f"{peer.engine_id}#{next(self._numbers)}"
        self._peers[key] = (self._worker.world.workers[peer.engine_id], on_lost)
        return key

    def remove_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def read(
        self,
        peer: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        timeout_s: float,
        on_done: Callable[[ReadResult], None],
        on_stall: Callable[[], None],
    ) -> None:
        if peer not in self._peers:
            raise KVTransferError(f"no connection to {peer}")
        pairs = list(zip(remote_block_ids, local_block_ids, strict=True))
        self._worker.world.random.shuffle(pairs)
        self.reads.append(Read(peer, self._peers[peer][0], pairs, on_done, on_stall))

    def progress(self) -> None:
        """Copy some blocks of a READ, or let it fail or stall; then it still copies."""
        if not self.reads:
            return
        world = self._worker.world
        read = world.random.choice(self.reads)
        if world.happens(0.02) and not read.is_stalled:
            read.is_stalled = True
            read.on_stall()
            self._lose(read, "stalled")
        elif world.happens(0.02):
            self._end(read, "failed")
            self._lose(read, "failed")
        elif not read.is_stalled or not world.happens(0.8):
            self._copy(read, world.random.randint(1, 4))

    def _copy(self, read: Read, num_blocks: int) -> None:
        for remote, local in read.pairs[:num_blocks]:
            target = self._worker.pool.blocks[local]
            assert target.ref_cnt == 1, "a READ writes into a block that is free (K5)"
            assert target.block_hash is None, "a READ writes into a block that others may use (K4)"
            self._worker.memory[local] = read.source.memory[remote]
        del read.pairs[:num_blocks]
        if not read.pairs:
            self._end(read, "stalled" if read.is_stalled else "")

    def _end(self, read: Read, error: str) -> None:
        self.reads.remove(read)
        result = ReadResult(
            is_ok=not error, num_bytes=1, duration_s=0.0, transport=self.name, error=error
        )
        read.on_done(result)

    def _lose(self, read: Read, reason: str) -> None:
        _, on_lost = self._peers.pop(read.peer, (None, lambda reason: None))
        on_lost(reason)

    def register(self, kv_cache: Any) -> None:
        """The memory is there."""

    self_check = expect_peer = poll_soon = close = lambda self: None
    set_exporting = lambda self, is_exporting: None  # noqa: E731


class Link:
    """A KvLink. Once it is cut nothing arrives any more, and each side learns of it in its time."""

    def __init__(self, d: "Worker", p: "Worker") -> None:
        self.d, self.p = d, p
        self.to_d, self.to_p = Wire(), Wire()
        self.is_cut = False
        self.d_link: KVLink | None = None
        self.unaware = [d, p]
        self.p_link: KVLink = p.connector.accept_link(d.connector.hello(), self.to_d)

    def progress(self, chance: random.Random) -> None:
        if self.is_cut or self.to_d.closed_because or self.to_p.closed_because:
            self.is_cut = True
            self._notice(self.unaware.pop(chance.randrange(len(self.unaware))))
        elif chance.random() < 0.5:
            self._deliver(self.to_d, self._take_on_d)
        else:
            self._deliver(self.to_p, lambda m: self.p.connector.on_message(self.p_link, m))

    def _deliver(self, wire: Wire, take: Callable[[Any], None]) -> None:
        if wire.messages:
            take(wire.messages.popleft())

    def _take_on_d(self, message: Any) -> None:
        if self.d_link is None:
            self.d_link = self.d.connector.link_up(self.p.name, message, self.to_p)
        else:
            self.d.connector.on_message(self.d_link, message)

    def _notice(self, worker: "Worker") -> None:
        if worker is self.p:
            worker.connector.link_lost(self.p_link, "cut")
        elif self.d_link is not None:
            worker.connector.link_lost(self.d_link, "cut")
        else:
            worker.connector.link_failed(self.p.name, "cut")


class Worker:
    """An engine without a model and without a process."""

    def __init__(self, world: "World", name: str, windows: tuple[int | None, ...]) -> None:
        self.world, self.name, self.windows = world, name, windows
        self.memory = np.full((NUM_BLOCKS * len(windows), BLOCK_SIZE), DEAD, dtype=np.int64)
        # Without a cache freed blocks are dead at once.
        has_cache = world.random.random() < 0.6
        self.pool = BlockPool(len(self.memory), enable_caching=has_cache, on_dead=self._poison)
        budget = world.random.choice([6, 16])
        kv = KVCacheManager(self.pool, BLOCK_SIZE, windows, max_tokens_in_flight=2 * budget)
        self.nic = Nic(self)
        self.role = "producer" if name.startswith("p") else "consumer"
        self.connector = self._make_connector()
        self._open_seams()
        config = SchedulerConfig(
            max_num_seqs=world.random.choice([2, 6]),
            max_num_batched_tokens=budget,
            scheduling_policy=world.random.choice(["fcfs", "priority"]),
        )
        with lengths_chosen_by():
            self.scheduler = Scheduler(
                config,
                kv,
                **{self.role: self.connector},
                proposer=MixedProposer(world.random, next_drafts),
                clock=self._clock,
            )
        self.rank = Rank(self)
        self.core = EngineCore(
            scheduler=self.scheduler,
            executor=UniprocExecutor(
                self.rank,  # type: ignore[arg-type]
                async_scheduling=False,
                clock=self._clock,
            ),
            max_model_len=MAX_MODEL_LEN,
            clock=self._clock,
        )
        self.owners = RequestOwners()
        self.inbox: collections.deque[Callable[[], None]] = collections.deque()
        self.outputs: collections.deque[EngineCoreOutput] = collections.deque()

    def _clock(self) -> float:
        return self.world.now

    def _make_connector(self) -> Any:
        groups = tuple(
            KVGroup(
                id=i,
                layers=(i,),
                kind=KVGroupKind.FULL if window is None else KVGroupKind.SLIDING,
                window=window or 0,
            )
            for i, window in enumerate(self.windows)
        )
        identity = KVIdentity(
            engine_id=self.name,
            epoch=new_epoch(),
            compatibility_hash="",
            layout=KVLayout(
                groups=groups,
                block_size=BLOCK_SIZE,
                block_bytes=8 * BLOCK_SIZE,
                num_kv_heads=1,
                head_bytes=8 * BLOCK_SIZE,
            ),
            vocab_size=EOS,
        )
        context = ConnectorContext(
            transport=self.nic,
            identity=identity,
            metrics=KVTransferMetrics(CollectorRegistry()),
            wakeup=lambda: None,
            step_seq=lambda: 0,
            session_timeout_s=60.0,
            clock=self._clock,
        )
        if self.role == "producer":
            return ProducerConnector(context)
        consumer = ConsumerConnector(context)
        consumer.bind_link_pool(lambda p, host, port: self.world.dials.append((self.name, p)))
        return consumer

    def _open_seams(self) -> None:
        for name in filter(partial(hasattr, self.connector), SEAMS):
            setattr(self.connector, name, self._with_others(getattr(self.connector, name)))

    def _with_others(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def interleaved(*args: Any) -> Any:
            self.world.other_threads()
            result = call(*args)
            self.world.other_threads()
            return result

        return interleaved

    def _poison(self, block_ids: Sequence[int]) -> None:
        self.memory[list(block_ids)] = DEAD

    def add(self, request: EngineCoreRequest) -> None:
        self.owners.add(request)
        self.inbox.append(lambda: self.core.add_request(request))

    def abort(self, request_id: str) -> None:
        self.inbox.append(lambda: self.core.abort_requests([request_id]))

    def step(self) -> None:
        while self.inbox:
            self.inbox.popleft()()
        result = self.core.step() if self.core.has_work() else self.core.poll()
        check_containers(self.scheduler)
        for outputs in result.outputs.values():
            self.outputs.extend(self.owners.release_ended(outputs))

    def preempt(self) -> None:
        victims = [r for r in self.scheduler.running if not r.handoff.needs_remote_kv]
        if victims:
            self.scheduler.containers.preempt(self.world.random.choice(victims))

    @property
    def is_busy(self) -> bool:
        """Is anything under way, with or without its router?"""
        has_requests = bool(self.inbox or self.outputs or self.scheduler.requests)
        return has_requests or bool(self.nic.reads or self.connector.num_open_sessions())

    def assert_idle(self) -> None:
        self.scheduler.kv.check_integrity()
        assert not self.scheduler.requests
        assert self.pool.num_free_blocks == self.pool.num_blocks, "blocks have leaked"
        assert not len(self.owners)
        check_containers(self.scheduler)
        assert self.connector.num_open_sessions() == 0
        self.connector.check_idle()


@dataclass(eq=False)
class Live:
    """A client's request as its router sees it."""

    request_id: str
    prompt: tuple[int, ...]
    num_tokens: int
    p: str | None
    d: str
    fork_of: str | None = None
    is_probe: bool = False
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def expected(self) -> list[int]:
        return expected(list(self.prompt), self.num_tokens)

    def take_tokens(self, output: EngineCoreOutput) -> None:
        first, new = output.first_token_index, list(output.new_token_ids)
        assert not new or first <= len(self.tokens), "a token is missing"
        assert new == self.expected[first : first + len(new)], "a wrong token"
        self.tokens += new[len(self.tokens) - first :]


class World:
    """Two P, two D and a router."""

    def __init__(self, seed: int, windows: tuple[int | None, ...]) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.is_calm = False
        self.dials: list[tuple[str, str]] = []
        self.links: list[Link] = []
        self.workers: dict[str, Worker] = {}
        for name in ("p0", "p1", "d0", "d1"):
            self.workers[name] = Worker(self, name, windows)
        self.live: dict[str, Live] = {}
        self.ended: collections.Counter[str] = collections.Counter()
        # Speculative first steps, by whether they read what is right.
        self.num_first_steps: collections.Counter[bool] = collections.Counter()
        # Tokens that steps of D have computed and nobody had sampled.
        self.num_drafts = 0
        self._ids = itertools.count()
        self._is_other_thread = False

    def happens(self, probability: float) -> bool:
        """Something bad."""
        return not self.is_calm and self.random.random() < probability

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._disturb()
            self._step()

    def settle(self, max_steps: int = 5000) -> None:
        """Nothing bad happens any more: all that is under way ends. Time passes for deadlines."""
        self.is_calm = True
        for worker in self.workers.values():
            worker.scheduler.pause_state = PauseState.UNPAUSED
        for step in range(max_steps):
            self._step()
            if step % 20 == 0:
                self._tick(1.0)
            if not self.live and not any(w.is_busy for w in self.workers.values()):
                break
        assert not self.live, f"{list(self.live)} never end"
        for worker in self.workers.values():
            worker.step()
            worker.assert_idle()

    # ---- what happens beside the engines' threads

    def other_threads(self) -> None:
        """Event loops and transfer threads get on, between any two things that an engine does."""
        if self._is_other_thread or self.random.random() < 0.7:
            return
        self._is_other_thread = True
        for _ in range(self.random.randint(1, 6)):
            self._other_thread()
        self._is_other_thread = False

    def _other_thread(self) -> None:
        if self.dials and self.random.random() < 0.1:
            self._dial(*self.dials.pop())
        elif self.links and self.random.random() < 0.6:
            link = self.random.choice(self.links)
            link.is_cut = link.is_cut or self.happens(0.005)
            link.progress(self.random)
            if not link.unaware:
                self.links.remove(link)
        else:
            self.workers[self.random.choice(["d0", "d1"])].nic.progress()

    def _dial(self, d: str, p: str) -> None:
        if self.happens(0.1):
            self.workers[d].connector.link_failed(p, "unreachable")
        else:
            self.links.append(Link(self.workers[d], self.workers[p]))

    def _tick(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.workers.values():
            worker.connector.on_tick()

    # ---- what happens to the engines

    def _step(self) -> None:
        self.other_threads()
        for worker in self.workers.values():
            if self.random.random() < 0.7:
                worker.step()
            while worker.outputs and self.random.random() < 0.7:
                self._take_output(worker.name, worker.outputs.popleft())

    def _disturb(self) -> None:
        worker = self.workers[self.random.choice(list(self.workers))]
        live = self.random.choice([*self.live.values(), None])
        event = self.random.random()
        if event < 0.12 and len(self.live) < MAX_LIVE:
            self._send()
        elif event < 0.14 and live is not None:
            self._end(live, "aborted")
        elif event < 0.16 and live is not None:
            self._send_again(live)
        elif event < 0.20:
            worker.preempt()
        elif event < 0.205:
            worker.rank.fails_next = True
        elif event < 0.21:
            worker.connector.fence_all("sleep")
        elif event < 0.215:
            worker.core.hand_back()
        elif event < 0.225:
            worker.scheduler.pause_state = self.random.choice(list(PauseState))
        elif event < 0.23:
            worker.pool.reset_prefix_cache()
        elif event < 0.24:
            worker.scheduler.containers.remote_prefills.reclaim()
        elif event < 0.25:
            self._tick(self.random.choice([0.1, 1.0]))

    # ---- the router

    def _send(self) -> None:
        chance = self.random
        prompt = tuple(chance.choices(range(chance.choice([1, 3])), k=chance.randrange(1, 30)))
        num_tokens = chance.randrange(1, 12)
        p = chance.choice(["p0", "p1", None]) if num_tokens > 1 else None
        is_probe = chance.random() < 0.2
        if is_probe:
            prompt = prompt[: MAX_PROBE_BLOCKS * BLOCK_SIZE]
            num_tokens = min(num_tokens, MAX_PROBE_TOKENS)
        d = chance.choice(["d0", "d1"])
        live = Live(f"r{next(self._ids)}", prompt, num_tokens, p, d, is_probe=is_probe)
        self._dispatch(live)
        for _ in range(0 if is_probe else chance.choice([0, 0, 0, 2])):
            fork_id = f"f{next(self._ids)}"
            self._dispatch(Live(fork_id, prompt, num_tokens, None, live.d, live.request_id))

    def _dispatch(self, live: Live) -> None:
        self.live[live.request_id] = live
        if live.p is None:
            self._send_leg(live, live.d, None)
            return
        p_leg = KVTransferParams(do_remote_decode=True, remote_engine_id=live.d)
        d_leg = KVTransferParams(
            do_remote_prefill=True, remote_engine_id=live.p, remote_host="h", remote_port=1
        )
        self._send_leg(live, live.p, p_leg)
        self._send_leg(live, live.d, d_leg)

    def _send_leg(self, live: Live, worker: str, params: KVTransferParams | None) -> None:
        request = EngineCoreRequest(
            request_id=live.request_id,
            prompt_token_ids=live.prompt,
            task=Generate(SamplingParams(max_tokens=live.num_tokens)),
            kv_transfer_params=params,
            attempt=live.attempt,
            resume_output_token_ids=tuple(live.tokens),
            fork_of=live.fork_of,
            priority=PROBE_PRIORITY if live.is_probe else 0,
        )
        self.workers[worker].add(request)

    def _send_again(self, live: Live) -> None:
        """On the same or another D, with a P or without."""
        before = {live.p, live.d}
        live.attempt += 1
        live.d = self.random.choice([live.d, "d0", "d1"])
        is_worth_it = live.num_tokens - len(live.tokens) > 1 and live.attempt < 8
        live.p = self.random.choice(["p0", "p1", None]) if is_worth_it else None
        self._abort(live, before - {live.p, live.d})
        self._dispatch(live)

    def _end(self, live: Live, how: str) -> None:
        del self.live[live.request_id]
        self.ended[how] += 1
        self._abort(live, {live.p, live.d})

    def _abort(self, live: Live, workers: set[str | None]) -> None:
        for name in sorted(workers - {None}, key=str):
            self.workers[str(name)].abort(live.request_id)

    def _take_output(self, worker: str, output: EngineCoreOutput) -> None:
        live = self.live.get(output.request_id)
        if live is None or live.attempt != output.attempt:
            return
        live.take_tokens(output)
        if output.kv_lost is not None:
            self._send_again(live)
        elif output.error is not None:
            self._take_error(live, output.error)
        elif output.finished and output.kv_transfer_params is None:
            assert len(live.tokens) == live.num_tokens
            self._end(live, "finished")

    def _take_error(self, live: Live, error: EngineError) -> None:
        if error.is_retryable:
            self._send_again(live)
        elif "a passing fault" in error.message:
            self._end(live, "failed")
        else:
            assert error.code is ErrorCode.CANCELLED, error  # P's own end follows
