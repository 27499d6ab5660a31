"""Scheduler and block pool under random traffic: nothing lost, nobody starved, order kept."""

import dataclasses
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_common.limits.validation import MAX_PROBE_BLOCKS, MAX_PROBE_TOKENS, PROBE_PRIORITY
from pdserve_common.types.engine import FinishReason
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_engine.config import NUM_PROBE_SLOTS
from pdserve_engine.core.scheduler import PauseState
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import SchedulerOutput
from support.drafts import MixedProposer
from support.grammars import ScriptedCompiler
from support.scripted_engine import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    ON_D,
    ON_P,
    Engine,
    ScriptedConsumer,
    ScriptedProducer,
    cached_in,
    check_containers,
    expected,
    next_drafts,
)

NUM_EXAMPLES = 50
NUM_STEPS = 200  # per example: 10,000 in all
MAX_SETTLE_STEPS = 3000
FAR = 1e9  # a deadline passes when the test says so
# What may happen between two steps, and how often.
EVENTS = {
    "nothing": 8,
    "kv": 6,
    "allow": 3,
    "forbid": 0.5,
    "confirm": 2,
    "lose": 0.5,
    "give_back": 0.5,
    "again": 1,
    "add": 4,
    "claim": 4,
    "add_d": 3,
    "add_p": 2,
    "abort": 2,
    "branches": 1,
    "deadline": 1,
    "reset": 1,
    "pause": 0.5,
    "finish_steps": 0.5,
    "fault": 0.2,
    "compile": 2,
    "refuse": 0.3,
}
# Of requests that follow a grammar, of the engine's looks for one during which one comes, and of
# steps in which a row's mask is late.
CONSTRAINED, COMPILED, LATE = 0.3, 0.05, 0.1


@dataclasses.dataclass(frozen=True)
class Added:
    """A request as the test sent it."""

    prompt: list[int]
    num_tokens: int
    grammar: str | None


class Traffic:
    """Random events around an engine, and the checks after each of its steps."""

    def __init__(
        self,
        engine: Engine,
        producer: ScriptedProducer,
        consumer: ScriptedConsumer,
        compiler: ScriptedCompiler,
        rng: random.Random,
    ) -> None:
        self.engine = engine
        self.producer = producer
        self.consumer = consumer
        self.compiler = compiler
        self.rng = rng
        self.added: dict[str, Added] = {}
        self.claimed: set[str] = set()
        self.attempts: dict[str, int] = {}
        self.num_resets = 0
        self._ids = itertools.count()
        self._fault: Exception | None = None
        engine.rank.on_step = self._maybe_fail
        masks = random.Random(rng.random())  # of the rank's thread
        engine.rank.is_late = lambda request_id, num_tokens: masks.random() < LATE
        compiler.on_look = self._maybe_compile

    def event(self) -> None:
        pools = (self.consumer.loading, self.consumer.unlanded, self.producer.held)
        ends = (self.consumer.finish_load, self.consumer.land, self.producer.release)
        kind = self.rng.choices(list(EVENTS), weights=list(EVENTS.values()))[0]
        if kind.startswith("add"):
            self.add(kind, {"add": None, "add_p": ON_P, "add_d": ON_D}[kind])
        elif kind == "branches":
            source = self.add("source", self.rng.choice([None, ON_D]))
            for _ in range(self.rng.randrange(1, 4)):
                self.add("fork", None, fork_of=source)
        elif kind == "abort" and self.added:
            self.engine.core.abort_requests([self.rng.choice(list(self.added))])
        elif kind == "claim":
            self.claim(limit=1)
        elif kind == "kv":
            for pool, end in zip(pools, ends, strict=True):
                if pool:
                    end(self.rng.choice(list(pool)))
        elif kind in ("allow", "forbid"):
            self.grant(kind)
        elif kind in ("confirm", "lose", "give_back"):
            self.disturb_pull(kind)
        elif kind == "again" and self.added:
            self.send_again(self.rng.choice(list(self.added)))
        elif kind == "deadline":
            self.engine.scheduler.expire_deadlines(self.engine.scheduler.next_deadline() or 0.0)
        elif kind == "reset":
            self.reset()
        elif kind == "fault":
            for batch in self.engine.core._batch_queue:
                batch.pending.exception()
            self._fault = RuntimeError("a passing fault")  # of the next step
        elif kind in ("compile", "refuse"):
            self.compile(kind)
        elif kind == "pause":
            self.engine.scheduler.pause_state = self.rng.choice(list(PauseState))
        elif kind == "finish_steps":
            self.engine.core.finish_steps()
            assert not self.engine.scheduler.in_flight

    def add(self, kind: str, params: object, fork_of: str | None = None) -> str:
        request_id = f"{kind}-{next(self._ids)}"
        is_probe = fork_of is None and self.rng.random() < 0.1
        if fork_of is not None:
            prompt, grammar = self.added[fork_of].prompt, self.added[fork_of].grammar
        else:
            grammar = self.pick_grammar(request_id)
            max_tokens = MAX_PROBE_BLOCKS * BLOCK_SIZE if is_probe else 40
            prompt = [self.rng.randrange(3)] * self.rng.randrange(1, max_tokens + 1)
        num_tokens = self.rng.randrange(1, 1 + (MAX_PROBE_TOKENS if is_probe else 12))
        self.engine.add(
            request_id,
            prompt,
            sampling_params=_sampling_params(num_tokens, grammar),
            kv_transfer_params=params,
            priority=PROBE_PRIORITY if is_probe else self.rng.randrange(3),
            fork_of=fork_of,
            deadline=FAR + self.rng.random() if self.rng.random() < 0.1 else None,
        )
        self.added[request_id] = Added(
            prompt, min(num_tokens, MAX_MODEL_LEN - len(prompt)), grammar
        )
        return request_id

    def pick_grammar(self, request_id: str) -> str | None:
        """Its own, one that others have asked for, or none."""
        if self.rng.random() >= CONSTRAINED:
            return None
        return self.rng.choice([request_id, *self.compiler.futures])

    def compile(self, kind: str) -> None:
        if self.compiler.compiling:
            end = self.compiler.refuse if kind == "refuse" else self.compiler.finish
            end(self.rng.choice(self.compiler.compiling))

    def claim(self, limit: int) -> None:
        tickets = [rid for rid in self.consumer.tickets if rid not in self.claimed]
        for request_id in tickets[:limit]:
            self.claimed.add(request_id)
            self.consumer.claim(request_id)

    def grant(self, kind: str) -> None:
        """P: D gives its blocks, or takes them back from a request that has not started."""
        scheduler = self.engine.scheduler
        decodes = scheduler.containers.remote_decodes
        asked = [r for r in decodes if r.request_id in self.producer.asked]
        if kind == "forbid":
            asked = [r for r in scheduler.waiting if r.do_remote_decode]
        if not asked:
            return
        request_id = self.rng.choice(asked).request_id
        if kind == "allow":
            self.producer.revoked.discard(request_id)
            self.producer.allow(request_id)
        else:
            self.producer.forbid(request_id)

    def disturb_pull(self, kind: str) -> None:
        consumer = self.consumer
        if not consumer.loading:
            return
        request_id = self.rng.choice(list(consumer.loading))
        if kind == "confirm":
            num_tokens = consumer.tickets[request_id].num_tokens
            consumer.confirm(request_id, self.rng.randrange(num_tokens + 1))
        elif kind == "lose":
            consumer.lose(request_id)
        else:
            consumer.give_back(request_id, is_reading=self.rng.random() < 0.5)
            self.claimed.discard(request_id)

    def send_again(self, request_id: str) -> None:
        """The next attempt, with what has come so far, on whatever way."""
        outputs = self.engine.outputs.get(request_id, [])
        if request_id not in self.engine.scheduler.requests or "source" in request_id:
            return
        self.attempts[request_id] = self.attempts.get(request_id, 0) + 1
        delivered = tuple(token for output in outputs for token in output.new_token_ids)
        added = self.added[request_id]
        self.claimed.discard(request_id)
        self.producer.asked.pop(request_id, None)
        self.producer.revoked.discard(request_id)
        self.engine.add(
            request_id,
            added.prompt,
            sampling_params=_sampling_params(added.num_tokens, added.grammar),
            attempt=self.attempts[request_id],
            resume_output_token_ids=delivered,
            kv_transfer_params=ON_P
            if request_id.startswith("add_p")
            else self.rng.choice([None, ON_D]),
        )

    def reset(self) -> None:
        """A reset succeeds exactly when nobody holds a block, and then nothing is cached."""
        pool = self.engine.pool
        is_idle = pool.num_free_blocks == pool.num_blocks
        assert pool.reset_prefix_cache() == is_idle
        self.num_resets += is_idle
        assert not is_idle or pool.num_cached_blocks == 0

    def step(self) -> None:
        scheduler = self.engine.scheduler
        queue = list(scheduler.waiting)
        was_faulty = bool(scheduler.containers.isolated)
        # As if steps took so long: the next one is planned ahead of short ones.
        self.engine.pretend_last_step(self.rng.choice([0.0, 0.0, 1.0]))
        self.engine.step()
        self.engine.kv.check_integrity()
        assert self.engine.cached == cached_in(self.engine.pool)
        check_containers(scheduler)
        num_probes = sum(request.is_probe for request in scheduler.running)
        assert scheduler.running.num_probes == num_probes, "they come first"
        assert num_probes <= NUM_PROBE_SLOTS
        assert len(scheduler.running) - num_probes <= scheduler.config.max_num_seqs
        # Requests of a failed step come first, and short prompts may overtake chunked ones.
        is_faulty = was_faulty or bool(scheduler.containers.isolated)
        is_chunked = scheduler.config.long_prefill_token_threshold > 0
        if not (is_faulty or is_chunked or scheduler.pause_state):
            forbidden = set(scheduler.containers.remote_decodes)
            # Probes have slots of their own to wait for.
            before = [r for r in queue if r not in forbidden and not r.is_probe]
            self._check_order(before, set(scheduler.waiting))
        if scheduler.config.scheduling_policy == "fcfs":
            self._check_arrival(list(scheduler.waiting))

    def give_up_grammars(self) -> None:
        """Some are never compiled: their requests end, by a deadline or their clients."""
        never = [name for name in self.compiler.compiling if self.rng.random() < 0.5]
        known = self.engine.scheduler.requests
        waiting = [name for name, added in self.added.items() if added.grammar in never]
        self.engine.core.abort_requests([name for name in waiting if name in known])
        self.compiler.on_look = lambda: None
        for name in set(self.compiler.compiling) - set(never):
            self.compiler.finish(name)

    def settle(self) -> None:
        """Let everything that can happen happen, until nothing is left."""
        self.engine.scheduler.pause_state = PauseState.UNPAUSED
        self.give_up_grammars()
        for _ in range(MAX_SETTLE_STEPS):
            self.claim(limit=1000)
            for request in self.engine.scheduler.containers.remote_decodes:
                if request.request_id in self.producer.asked:
                    self.producer.revoked.discard(request.request_id)
                    self.producer.allow(request.request_id)
            for pool, end in (
                (self.consumer.loading, self.consumer.finish_load),
                (self.consumer.unlanded, self.consumer.land),
                (self.producer.held, self.producer.release),
            ):
                for request_id in list(pool):
                    end(request_id)
            self.step()
            is_busy = self.engine.scheduler.has_requests() or self.engine.core.has_work()
            if not (is_busy or self.producer.held or self.consumer.unlanded):
                self.engine.step()
                return
        raise AssertionError("does not settle: somebody starves")

    def check_steps(self) -> None:
        for step in self.engine.rank.steps:
            num_tokens = sum(step.num_scheduled_tokens.values())
            assert num_tokens == step.total_num_scheduled_tokens
            assert num_tokens <= self.engine.scheduler.config.max_num_batched_tokens
            for new in step.scheduled_new_reqs:
                is_constrained = self.added[new.request_id].grammar is not None
                assert is_constrained == (new.grammar is not None)

    def check_answers(self) -> None:
        for request_id, added in self.added.items():
            tokens = self.engine.tokens(request_id)
            num_tokens = 1 if request_id.startswith("add_p") else added.num_tokens
            if self.engine.finish_reason(request_id) != FinishReason.LENGTH:
                num_tokens = len(tokens)  # aborted, or its deadline has passed
            assert tokens == expected(added.prompt, num_tokens)

    @staticmethod
    def _check_order(before: list[Request], after: set[Request]) -> None:
        """Who left the queue by being admitted was ahead of everyone who did not."""
        is_left = [request in after for request in before if not request.status.is_finished]
        assert is_left == sorted(is_left), "a request was overtaken"

    @staticmethod
    def _check_arrival(waiting: list[Request]) -> None:
        """One that has waited for its grammar is where it would be without."""
        others = [r for r in waiting if not (r.is_probe or r.has_begun or r.core_request.fork_of)]
        times = [r.queued_time for r in others if not r.do_remote_decode]
        assert times == sorted(times), "a request has lost its place"

    def _maybe_compile(self) -> None:
        if self.rng.random() < COMPILED:
            self.compile(self.rng.choice(["compile", "compile", "refuse"]))

    def _maybe_fail(self, step: SchedulerOutput) -> None:
        # A step of one request would be its fault.
        if self._fault is not None and len(step.num_scheduled_tokens) > 1:
            fault, self._fault = self._fault, None
            raise fault


def _sampling_params(num_tokens: int, grammar: str | None) -> SamplingParams:
    constraint = None if grammar is None else StructuredOutputsParams(regex=grammar)
    return SamplingParams(max_tokens=num_tokens, structured_outputs=constraint)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(["fcfs", "priority"]),
    mode=st.sampled_from(["v1", "v0"]),
    is_async=st.booleans(),
    enable_caching=st.booleans(),
    windows=st.sampled_from([(None,), (None, 6), (5, 9)]),
    threshold=st.sampled_from([0, 0, 5]),
    watermark=st.sampled_from([0.0, 0.1]),
    has_drafts=st.booleans(),
    num_blocks=st.integers(16, 26),
)
def test_random_traffic_loses_no_block_and_no_request_and_keeps_its_order(
    seed: int,
    policy: str,
    mode: str,
    is_async: bool,
    enable_caching: bool,
    windows: tuple[int | None, ...],
    threshold: int,
    watermark: float,
    has_drafts: bool,
    num_blocks: int,
) -> None:
    producer, consumer, compiler = ScriptedProducer(), ScriptedConsumer(), ScriptedCompiler()
    producer.grants_at_once = False
    engine = Engine(
        num_blocks=num_blocks * len(windows),
        producer=producer,
        consumer=consumer,
        compile_grammar=compiler,
        proposer=MixedProposer(random.Random(seed), next_drafts) if has_drafts else None,
        has_draft_model=has_drafts and windows == (None,),
        max_num_seqs=4,
        max_num_batched_tokens=MAX_MODEL_LEN if mode == "v0" else 16,
        enable_caching=enable_caching,
        async_scheduling=is_async,
        windows=windows,
        scheduling_policy=policy,
        scheduling_mode=mode,
        long_prefill_token_threshold=threshold,
        kv_watermark=watermark,
    )
    traffic = Traffic(engine, producer, consumer, compiler, random.Random(seed))
    try:
        for _ in range(NUM_STEPS):
            traffic.event()
            traffic.step()
        traffic.settle()
        traffic.check_steps()
        traffic.check_answers()
        engine.assert_idle()
        traffic.reset()
        assert traffic.num_resets
    finally:
        engine.core.close()
