"""Requests that share the prompt of another one (n > 1): one prefill, blocks by reference."""

from unittest import mock

import pytest

from pdserve_common.types.engine import FinishReason
from pdserve_common.types.lora import LoRARequest
from pdserve_engine.core.executor import AdapterStore, PackedAdapter
from pdserve_engine.core.features.adapter_pool import AdapterPool
from support.scripted_engine import (
    BLOCK_SIZE,
    ON_D,
    Engine,
    ScriptedConsumer,
    decode_engine,
    expected,
)

PROMPT = list(range(10))  # two full blocks and a half


def add_branches(engine: Engine, num: int, **fields: object) -> list[str]:
    names = [f"{index}_r" for index in range(num)]
    engine.add(names[0], PROMPT, **fields)
    for name in names[1:]:
        engine.add(name, PROMPT, fork_of=names[0])
    return names


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("scheduling_mode", ["v1", "v0"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_branches_compute_the_prompt_once(
    enable_caching: bool, scheduling_mode: str, async_scheduling: bool
) -> None:
    engine = Engine(
        enable_caching=enable_caching,
        scheduling_mode=scheduling_mode,
        async_scheduling=async_scheduling,
    )
    names = add_branches(engine, 4)
    engine.step()
    engine.step()
    blocks = [engine.kv.get_block_ids(name)[0] for name in names]
    if not async_scheduling:
        assert all(ids[:2] == blocks[0][:2] for ids in blocks), "full blocks are shared"
        assert len({ids[2] for ids in blocks}) == 4, "the border's is everyone's own"
    engine.run()
    computed = [
        sum(step.num_scheduled_tokens.get(name, 0) for step in engine.rank.steps) for name in names
    ]
    assert computed[0] == len(PROMPT) + 3
    assert computed[1:] == [len(PROMPT) - 2 * BLOCK_SIZE + 3] * 3
    for name in names:
        assert engine.tokens(name) == expected(PROMPT, 4)
    engine.assert_idle()
    engine.core.close()


def test_branches_share_what_was_pulled() -> None:
    engine = decode_engine(enable_caching=False)
    names = add_branches(engine, 3, kv_transfer_params=ON_D)
    engine.step()
    assert not engine.rank.steps or not engine.rank.steps[-1].num_scheduled_tokens
    engine.consumer.claim(names[0])
    engine.step()
    engine.step()
    engine.consumer.finish_load(names[0])
    engine.step()
    engine.run()
    for name in names:
        assert engine.tokens(name) == expected(PROMPT, 4)
    computed = [
        sum(step.num_scheduled_tokens.get(name, 0) for step in engine.rank.steps) for name in names
    ]
    assert computed == [3, 5, 5], "the prompt's full blocks are not computed here"
    engine.assert_idle()


def test_branches_wait_for_the_next_attempt_of_their_source() -> None:
    engine = decode_engine()
    names = add_branches(engine, 3, kv_transfer_params=ON_D)
    engine.step()
    engine.consumer.lose(names[0])
    engine.step()
    engine.outputs.clear()
    engine.add(names[0], PROMPT, kv_transfer_params=ON_D, attempt=1)
    engine.run()
    assert not engine.outputs, "nobody computes what is about to be pulled"
    engine.consumer.claim(names[0])
    engine.run()
    engine.consumer.finish_load(names[0])
    engine.run()
    for name in names:
        assert engine.tokens(name) == expected(PROMPT, 4)
    computed = sum(step.total_num_scheduled_tokens for step in engine.rank.steps)
    assert computed == 3 + 5 + 5
    engine.assert_idle()


def test_branches_do_not_wait_for_an_attempt_with_another_prompt() -> None:
    engine = Engine(consumer=ScriptedConsumer())
    names = add_branches(engine, 2, kv_transfer_params=ON_D)
    engine.step()
    engine.add(names[0], PROMPT[:-1], attempt=1)
    engine.run()
    assert engine.tokens(names[0]) == expected(PROMPT[:-1], 4)
    assert engine.tokens(names[1]) == expected(PROMPT, 4)
    engine.assert_idle()


def test_branches_outlive_their_source() -> None:
    engine = decode_engine()
    names = add_branches(engine, 3, kv_transfer_params=ON_D)
    engine.step()
    engine.core.abort_requests([names[0]])
    engine.run()
    assert engine.finish_reason(names[0]) == FinishReason.ABORT
    for name in names[1:]:
        assert engine.tokens(name) == expected(PROMPT, 4)
    engine.assert_idle()


def test_a_branch_that_comes_late_shares_at_once_and_one_without_source_is_computed() -> None:
    engine = Engine()
    engine.add("0_r", PROMPT, max_tokens=8)
    engine.step()
    engine.add("1_r", PROMPT, fork_of="0_r")
    assert engine.kv.get_block_ids("1_r")[0] == engine.kv.get_block_ids("0_r")[0][:2]
    engine.add("2_r", PROMPT, fork_of="unknown")
    engine.run()
    for name in ("1_r", "2_r"):
        assert engine.tokens(name) == expected(PROMPT, 4)
    engine.assert_idle()


ADAPTER = LoRARequest(lora_name="a", digest="a")


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "other tenant"},
        {"client_index": 7},
        {"prompt": [9] * 10},
        {"lora_request": ADAPTER},
    ],
)
def test_nothing_is_shared_with_a_request_that_only_names_a_source(
    other: dict[str, object],
) -> None:
    adapters = AdapterPool(mock.create_autospec(AdapterStore), max_loras=1)
    adapters.add(ADAPTER.lora_name, PackedAdapter(ADAPTER.digest, 8, None))
    engine = Engine(enable_caching=False, adapters=adapters)
    engine.add("0_r", PROMPT, max_tokens=8)
    engine.step()
    prompt = other.pop("prompt", PROMPT)
    engine.add("1_r", prompt, fork_of="0_r", **other)  # type: ignore[arg-type]
    engine.step()
    shared = set(engine.kv.get_block_ids("1_r")[0]) & set(engine.kv.get_block_ids("0_r")[0])
    assert not shared
    engine.run()
    assert engine.tokens("1_r") == expected(prompt, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_blocks", "num_computed"), [(6, len(PROMPT) + 3), (7, 2 + 3)])
def test_a_branch_shares_if_all_that_both_still_need_is_free(
    num_blocks: int, num_computed: int
) -> None:
    """The source has three blocks and needs one more, the branch two besides those it shares."""
    engine = Engine(num_blocks=num_blocks, enable_caching=False)
    _, branch = add_branches(engine, 2)
    engine.run()
    assert sum(step.num_scheduled_tokens.get(branch, 0) for step in engine.rank.steps) == (
        num_computed
    )
    engine.assert_idle()


def test_a_waiting_branch_can_be_aborted() -> None:
    engine = Engine()
    names = add_branches(engine, 3)
    engine.core.abort_requests([names[2]])
    engine.run()
    assert engine.finish_reason(names[2]) == FinishReason.ABORT
    assert engine.tokens(names[1]) == expected(PROMPT, 4)
    engine.assert_idle()
