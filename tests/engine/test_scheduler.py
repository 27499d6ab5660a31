"""The scheduler alone: a stand-in executor returns a token that depends on the request's tokens
only.
"""

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    FinishReason,
    KVTransferParams,
    KVTransferStats,
    SamplingParams,
)
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.block_pool import BlockPool
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.kv_cache_manager import KVCacheManager
from pdserve_engine.core.request import Request
from pdserve_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.kv_transfer.base import KVConnector, KVConnectorMetadata, KVConnectorOutput

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
EOS = 999


def next_token(token_ids: tuple[int, ...] | list[int]) -> int:
    return (sum(token_ids) * 31 + len(token_ids)) % 500


class ScriptedExecutor:
    """Keeps its own view of every request from the scheduler's diffs, as the model runner does."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.steps: list[SchedulerOutput] = []
        self.num_nans: dict[str, int] = {}

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        for request_id in step.finished_req_ids | step.preempted_req_ids:
            for state in (self.tokens, self.num_computed, self.blocks):
                state.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            assert new.request_id not in self.tokens
            self.tokens[new.request_id] = list(new.all_token_ids)
            self.blocks[new.request_id] = list(new.block_ids[0])
            self.num_computed[new.request_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request_id, blocks, num_computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            assert self.num_computed[request_id] == num_computed
            self.blocks[request_id].extend(blocks[0] if blocks else [])
        sampled = []
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self.num_computed[request_id] += num_tokens
            num_known = len(self.tokens[request_id])
            assert self.num_computed[request_id] <= num_known
            assert self.num_computed[request_id] <= len(self.blocks[request_id]) * BLOCK_SIZE
            if self.num_computed[request_id] == num_known:
                token = next_token(self.tokens[request_id])
                self.tokens[request_id].append(token)
                sampled.append((token,))
            else:
                sampled.append(())
        return ModelRunnerOutput(
            request_ids=tuple(step.num_scheduled_tokens),
            sampled_token_ids=tuple(sampled),
            num_nans_in_logits=self.num_nans,
        )


class Engine:
    """A scheduler with its executor, and everything that came out of it."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        connector: KVConnector | None = None,
        enable_caching: bool = True,
        **config: object,
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching)
        self.kv = KVCacheManager(self.pool, BLOCK_SIZE)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                **config,  # type: ignore[arg-type]
            ),
            self.kv,
            connector,
        )
        self.executor = ScriptedExecutor()
        self.core = EngineCore(
            scheduler=self.scheduler,
            executor=self.executor,
            connector=connector,
            max_model_len=MAX_MODEL_LEN,
        )
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int = 4, **fields: object
    ) -> None:
        params = fields.pop("sampling_params", None) or SamplingParams(max_tokens=max_tokens)
        self.core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling_params=params,  # type: ignore[arg-type]
                eos_token_id=EOS,
                **fields,  # type: ignore[arg-type]
            )
        )

    def step(self) -> SchedulerOutput | None:
        result = self.core.step() if self.core.has_work() else self.core.poll()
        for outputs in result.outputs.values():
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
        return self.executor.steps[-1] if self.executor.steps else None

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work():
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


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = Engine(max_num_batched_tokens=5)
    prompt = list(range(12))
    engine.add("a", prompt, max_tokens=2)
    sizes = []
    while engine.core.has_work():
        sizes.append(engine.step().total_num_scheduled_tokens)
    assert sizes[:4] == [5, 5, 2, 1]
    assert engine.tokens("a") == expected(prompt, 2)
    engine.assert_idle()


def test_decodes_and_a_prefill_chunk_share_a_step() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", [1, 2, 3], max_tokens=6)
    engine.step()
    engine.add("b", list(range(20)), max_tokens=2)
    step = engine.step()
    assert step.num_scheduled_tokens == {"a": 1, "b": 7}


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    engine = Engine(max_num_batched_tokens=16, enable_chunked_prefill=False)
    engine.add("a", list(range(10)), max_tokens=3)
    engine.add("b", list(range(100, 110)), max_tokens=3)
    assert engine.step().num_scheduled_tokens == {"a": 10}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 10}
    engine.run()
    engine.assert_idle()


def test_a_shared_prefix_is_computed_once() -> None:
    engine = Engine()
    prompt = list(range(10))
    engine.add("a", prompt)
    engine.run()
    engine.add("b", prompt)
    assert engine.step().num_scheduled_tokens == {"b": 2}
    engine.run()
    assert engine.tokens("a") == engine.tokens("b") == expected(prompt, 4)
    stats = engine.outputs["b"][0].prefill_stats
    assert stats is not None
    assert stats.num_cached_tokens == 8


def test_a_whole_cached_prompt_still_computes_its_last_block() -> None:
    engine = Engine()
    prompt = list(range(8))
    engine.add("a", prompt)
    engine.run()
    engine.add("b", prompt)
    assert engine.step().num_scheduled_tokens == {"b": 4}


def test_cache_salt_keeps_tenants_apart() -> None:
    engine = Engine()
    prompt = list(range(8))
    engine.add("a", prompt, cache_salt="one")
    engine.run()
    engine.add("b", prompt, cache_salt="two")
    assert engine.step().num_scheduled_tokens == {"b": 8}


def test_the_last_request_is_preempted_and_resumes_with_the_same_tokens() -> None:
    engine = Engine(num_blocks=8, max_num_batched_tokens=64, enable_caching=False)
    prompts = {"a": list(range(8)), "b": list(range(20, 28))}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens=16)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for request_id, prompt in prompts.items():
        assert engine.tokens(request_id) == expected(prompt, 16)
    engine.assert_idle()


def test_lower_priority_numbers_go_first_and_are_preempted_last() -> None:
    engine = Engine(
        num_blocks=8, max_num_seqs=2, scheduling_policy="priority", enable_caching=False
    )
    engine.add("late", list(range(8)), max_tokens=16, priority=5)
    engine.add("early", list(range(20, 28)), max_tokens=16, priority=-1)
    assert list(engine.step().num_scheduled_tokens) == ["early", "late"]
    engine.run()
    finished = [rid for rid, outs in engine.outputs.items() if outs[-1].finished]
    assert set(finished) == {"early", "late"}
    preempted = set().union(*(step.preempted_req_ids for step in engine.executor.steps))
    assert preempted == {"late"}


def test_max_num_seqs_bounds_the_batch() -> None:
    engine = Engine(max_num_seqs=2)
    for index in range(5):
        engine.add(str(index), [index, 1], max_tokens=3)
    while engine.core.has_work():
        assert len(engine.step().num_scheduled_tokens) <= 2
    engine.assert_idle()


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason"),
    [
        (SamplingParams(max_tokens=3), 3, FinishReason.LENGTH),
        (SamplingParams(max_tokens=None), MAX_MODEL_LEN - 3, FinishReason.LENGTH),
        (SamplingParams(max_tokens=20, stop_token_ids=(0,)), None, FinishReason.STOP),
        (SamplingParams(max_tokens=20, stop_token_ids=(0,), min_tokens=7), None, FinishReason.STOP),
    ],
)
def test_a_request_stops_where_its_parameters_say(
    params: SamplingParams, num_tokens: int | None, reason: FinishReason
) -> None:
    whole = expected([5, 6, 7], 20)
    if num_tokens is None:
        # Stop at the token that comes fifth, or, with min_tokens, let it pass.
        stop = whole[4]
        params = SamplingParams(
            max_tokens=20, stop_token_ids=(stop, whole[8]), min_tokens=params.min_tokens
        )
        num_tokens = 5 if params.min_tokens < 5 else 9
    engine = Engine()
    engine.add("a", [5, 6, 7], sampling_params=params)
    engine.run()
    assert engine.finish_reason("a") == reason
    assert engine.tokens("a") == expected([5, 6, 7], num_tokens)


def test_abort_ends_a_request_wherever_it_is() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("running", [1, 2, 3], max_tokens=50)
    engine.add("waiting", [4, 5, 6], max_tokens=50)
    engine.step()
    engine.core.abort_requests(["running", "waiting", "unknown"])
    engine.run()
    assert engine.finish_reason("running") == FinishReason.ABORT
    assert engine.finish_reason("waiting") == FinishReason.ABORT
    engine.assert_idle()


def test_a_passed_deadline_ends_the_request_with_a_typed_error() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=50, deadline=time.monotonic() + 0.05)
    engine.step()
    assert engine.scheduler.next_deadline() is not None
    time.sleep(0.06)
    engine.run()
    assert engine.outputs["a"][-1].error.code == ErrorCode.DEADLINE_EXCEEDED
    engine.assert_idle()


def test_a_deadline_ends_only_the_request_it_came_with() -> None:
    engine = Engine()
    engine.add("a", [1, 2, 3], max_tokens=1, deadline=time.monotonic() + 0.05)
    engine.run()
    engine.add("a", [1, 2, 3], max_tokens=50, deadline=time.monotonic() + 100)
    time.sleep(0.06)
    engine.run()
    assert engine.outputs["a"][-1].finish_reason == FinishReason.LENGTH


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    engine = Engine()
    for index in range(500):
        engine.add(str(index), [1, 2], max_tokens=1, deadline=time.monotonic() + 100 + index)
        engine.core.abort_requests([str(index)])
    assert len(engine.scheduler._deadlines) < 100


def test_a_step_that_only_preempts_is_worth_another() -> None:
    """Or the engine would wait for an event although its blocks would let others run."""
    engine = Engine(num_blocks=4, max_num_seqs=1, enable_caching=False)
    engine.add("a", [1] * 8, max_tokens=8)
    engine.step()
    engine.pool.get_new_blocks(engine.pool.num_free_blocks)
    result = engine.core.step()
    assert not result.has_computed
    assert result.has_progressed


def test_nan_logits_fail_only_their_request() -> None:
    engine = Engine()
    engine.add("bad", [1, 2], max_tokens=5)
    engine.add("good", [3, 4], max_tokens=5)
    engine.executor.num_nans = {"bad": 7}
    engine.run()
    assert engine.finish_reason("bad") == FinishReason.ERROR
    assert engine.outputs["bad"][-1].num_nans_in_logits == 7
    assert engine.tokens("good") == expected([3, 4], 5)
    engine.assert_idle()


class ScriptedConnector(KVConnector):
    """Both roles of a connector without any transport: the test says when things happen."""

    def __init__(self) -> None:
        self.output = KVConnectorOutput()
        self.first_tokens: dict[str, int] = {}
        self.loading: dict[str, tuple[list[int], int]] = {}
        self.held: dict[str, list[int]] = {}
        self.zombies: dict[str, list[int]] = {}
        self.aborted_sessions: list[str] = []

    def on_new_request(self, request: Request) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return request.num_prompt_tokens - num_computed_tokens, True

    def transferred_output_token_ids(self, request_id: str) -> tuple[int, ...]:
        return (self.first_tokens[request_id],)

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        self.loading[request.request_id] = (block_ids[0], num_external_tokens)

    def build_connector_meta(self) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> bool:
        if request.request_id in self.loading:
            del self.loading[request.request_id]
            self.zombies[request.request_id] = block_ids[0]
            return True
        if request.is_handed_off:
            self.held[request.request_id] = block_ids[0]
            return True
        return False

    def failure(self) -> str | None:
        return None

    def abort_session(self, request_id: str) -> None:
        self.aborted_sessions.append(request_id)

    def fence_all(self, reason: str) -> None:
        raise NotImplementedError

    def take_output(self) -> KVConnectorOutput:
        output, self.output = self.output, KVConnectorOutput()
        return output

    def num_open_sessions(self) -> int:
        return len(self.loading) + len(self.held)

    def register_kv_cache(self, kv_cache: object) -> None:
        raise NotImplementedError

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def announce(self, request_id: str, first_token: int) -> None:
        self.first_tokens[request_id] = first_token
        self.output.ready_to_load.append(request_id)

    def finish_load(self, request_id: str) -> None:
        del self.loading[request_id]
        self.output.finished_recving[request_id] = KVTransferStats(
            num_bytes=1,
            num_blocks=1,
            transport="test",
            admit_s=0,
            transfer_s=0,
            release_ack_s=0,
            exposed_s=0,
        )

    def land(self, request_id: str) -> None:
        self.output.landed_block_ids.extend(self.zombies.pop(request_id))

    def release(self, request_id: str) -> None:
        self.output.released_block_ids.extend(self.held.pop(request_id))


ON_P = KVTransferParams(do_remote_decode=True, remote_engine_id="d")
ON_D = KVTransferParams(do_remote_prefill=True, remote_engine_id="p")


def test_a_prefill_worker_stops_after_the_first_token_and_keeps_the_blocks_until_released() -> None:
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    prompt = list(range(10))
    engine.add("a", prompt, max_tokens=8, kv_transfer_params=ON_P)
    engine.run()
    assert engine.tokens("a") == expected(prompt, 1)
    last = engine.outputs["a"][-1]
    assert last.finish_reason == FinishReason.LENGTH
    assert last.kv_transfer_params == ON_P
    assert engine.pool.num_free_blocks == engine.pool.num_blocks - 3
    connector.release("a")
    engine.step()
    engine.assert_idle()


def test_aborting_a_handed_off_request_ends_its_session() -> None:
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    engine.add("a", [1, 2, 3], kv_transfer_params=ON_P)
    engine.run()
    engine.core.abort_requests(["a"])
    assert connector.aborted_sessions == ["a"]


def test_a_prefill_that_ends_for_good_is_not_handed_off() -> None:
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    (first,) = expected([1, 2, 3], 1)
    params = SamplingParams(max_tokens=8, stop_token_ids=(first,))
    engine.add("a", [1, 2, 3], sampling_params=params, kv_transfer_params=ON_P)
    engine.run()
    assert engine.finish_reason("a") == FinishReason.STOP
    assert engine.outputs["a"][-1].kv_transfer_params is None
    engine.assert_idle()


def test_a_ticket_holds_no_blocks_until_it_is_announced() -> None:
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    engine.add("a", list(range(10)), kv_transfer_params=ON_D)
    engine.step()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    assert not engine.core.has_work()


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 10])
def test_a_decode_worker_goes_on_after_the_transferred_token_and_repeats_it_first(
    prompt_len: int,
) -> None:
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    prompt = list(range(prompt_len))
    engine.add("a", prompt, max_tokens=6, kv_transfer_params=ON_D)
    engine.step()
    connector.announce("a", expected(prompt, 1)[0])
    engine.step()
    engine.step()
    assert connector.loading["a"][1] == prompt_len
    assert not engine.core.has_work()
    connector.finish_load("a")
    engine.step()
    engine.run()
    assert engine.tokens("a") == expected(prompt, 6)
    assert engine.outputs["a"][0].new_token_ids == tuple(expected(prompt, 2))
    assert engine.outputs["a"][0].kv_transfer_stats is not None
    computed = sum(step.total_num_scheduled_tokens for step in engine.executor.steps)
    assert computed == 5, "no prompt token is computed on D"
    engine.assert_idle()


def test_a_pull_skips_what_the_decode_worker_has_cached() -> None:
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    prompt = list(range(10))
    engine.add("a", prompt)
    engine.run()
    engine.add("b", prompt, kv_transfer_params=ON_D)
    engine.step()
    connector.announce("b", expected(prompt, 1)[0])
    engine.step()
    engine.step()
    assert connector.loading["b"][1] == 2
    connector.finish_load("b")
    engine.step()
    engine.run()
    assert engine.tokens("b") == engine.tokens("a")
    engine.assert_idle()


def test_blocks_of_an_aborted_pull_come_back_only_when_its_read_has_landed() -> None:
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    engine.add("a", list(range(10)), kv_transfer_params=ON_D)
    engine.step()
    connector.announce("a", 1)
    engine.step()
    engine.step()
    engine.core.abort_requests(["a"])
    engine.step()
    assert engine.finish_reason("a") == FinishReason.ABORT
    assert engine.pool.num_free_blocks == engine.pool.num_blocks - 3
    connector.land("a")
    engine.step()
    engine.assert_idle()


def test_a_failed_pull_ends_the_request_with_the_connectors_error() -> None:
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    engine.add("a", list(range(10)), kv_transfer_params=ON_D)
    engine.step()
    error = EngineError(code=ErrorCode.KV_EXPIRED, message="gone", is_retryable=True)
    connector.output.failed_recving["a"] = error
    engine.step()
    assert engine.outputs["a"][-1].error == error
    engine.assert_idle()


def test_a_worker_without_a_connector_refuses_a_handoff() -> None:
    engine = Engine()
    engine.add("a", [1, 2], kv_transfer_params=ON_D)
    engine.step()
    assert engine.outputs["a"][-1].error.code == ErrorCode.INVALID_ARGUMENT
    engine.assert_idle()


Operation = tuple[str, int, int]


@settings(max_examples=120, deadline=None)
@given(
    operations=st.lists(
        st.tuples(
            st.sampled_from(
                ["add", "add_p", "add_d", "abort", "announce", "load", "land", "release"]
            ),
            st.integers(0, 40),
            st.integers(1, 12),
        ),
        max_size=60,
    ),
    policy=st.sampled_from(["fcfs", "priority"]),
    num_blocks=st.integers(16, 24),
)
def test_random_traffic_loses_no_block_and_no_request(
    operations: list[Operation], policy: str, num_blocks: int
) -> None:
    connector = ScriptedConnector()
    engine = Engine(
        num_blocks=num_blocks, connector=connector, scheduling_policy=policy, max_num_seqs=4
    )
    ids = itertools.count()
    added: dict[str, tuple[list[int], int]] = {}
    announced: set[str] = set()
    act: dict[str, Callable[[int], None]] = {
        "load": lambda i: connector.finish_load(_pick(connector.loading, i)),
        "land": lambda i: connector.land(_pick(connector.zombies, i)),
        "release": lambda i: connector.release(_pick(connector.held, i)),
    }
    pools = {"load": connector.loading, "land": connector.zombies, "release": connector.held}
    for name, value, size in operations:
        if name.startswith("add"):
            request_id = f"{name}-{next(ids)}"
            prompt = [value % 3] * (value + 1)
            params = {"add": None, "add_p": ON_P, "add_d": ON_D}[name]
            engine.add(request_id, prompt, size, kv_transfer_params=params, priority=value % 3)
            added[request_id] = (prompt, size)
        elif name == "abort" and added:
            engine.core.abort_requests([_pick(added, value)])
        elif name == "announce":
            tickets = [rid for rid in engine.scheduler.remote_kvs if rid not in announced]
            if tickets:
                request_id = _pick(dict.fromkeys(tickets), value)
                announced.add(request_id)
                connector.announce(request_id, expected(added[request_id][0], 1)[0])
        elif pools.get(name):
            act[name](value)
        engine.step()
        engine.kv.check_integrity()
    _settle(engine, connector, added, announced)
    for request_id, (prompt, size) in added.items():
        reason = engine.finish_reason(request_id)
        if reason != FinishReason.ABORT:
            count = 1 if request_id.startswith("add_p") else min(size, MAX_MODEL_LEN - len(prompt))
            assert engine.tokens(request_id) == expected(prompt, count)
    engine.assert_idle()


def _pick(choices: dict[str, object] | dict[str, tuple[list[int], int]], index: int) -> str:
    return list(choices)[index % len(choices)]


def _settle(
    engine: Engine,
    connector: ScriptedConnector,
    added: dict[str, tuple[list[int], int]],
    announced: set[str],
) -> None:
    """Let everything that can happen happen, until nothing is left."""
    for _ in range(3000):
        for request_id in [r for r in engine.scheduler.remote_kvs if r not in announced]:
            announced.add(request_id)
            connector.announce(request_id, expected(added[request_id][0], 1)[0])
        for request_id in list(connector.loading):
            connector.finish_load(request_id)
        for request_id in list(connector.zombies):
            connector.land(request_id)
        for request_id in list(connector.held):
            connector.release(request_id)
        engine.step()
        quiet = not (engine.core.has_work() or connector.loading or connector.held)
        if quiet and not engine.scheduler.has_requests() and not connector.zombies:
            engine.step()
            return
    raise AssertionError("does not settle")
