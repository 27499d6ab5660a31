"""What the runner remembers of a request's blocks."""

import numpy as np
import pytest
import torch

from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.kv.block_pool import NULL_BLOCK_ID
from pdserve_engine.request.sched_output import NewRequestData
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.sampling.logits_rows import LogitsRows
from pdserve_engine.sampling.state import SamplingState


def make_batch(num_groups: int) -> InputBatch:
    sampling = SamplingState(max_num_seqs=2, vocab_size=8, device=torch.device("cpu"))
    return InputBatch(
        sampling, max_num_seqs=2, max_model_len=64, block_size=4, num_groups=num_groups
    )


def describe(request_id: str, block_ids: tuple[list[int], ...]) -> NewRequestData:
    return NewRequestData(
        request_id=request_id,
        all_token_ids=(1, 2, 3),
        num_prompt_tokens=3,
        sampling_params=SamplingParams(),
        seed=0,
        eos_token_id=None,
        block_ids=block_ids,
        num_computed_tokens=0,
    )


def test_every_group_has_its_own_block_table() -> None:
    batch = make_batch(2)
    batch.add(describe("a", ([3, 4], [5, 6])))
    batch.add(describe("b", ([7], [8])))
    row = batch.row_of("a")
    batch.append_blocks(row, ([9], [10]))
    assert batch.block_tables[:, row, :4].tolist() == [[3, 4, 9, 0], [5, 6, 10, 0]]
    assert batch.block_tables[:, batch.row_of("b"), :2].tolist() == [[7, 0], [8, 0]]
    batch.remove("a")
    assert not batch.block_tables[:, row].any()


def test_null_blocks_become_ids_that_kernels_can_load_through() -> None:
    batch = make_batch(2)
    batch.add(describe("a", ([3, 4], [NULL_BLOCK_ID, 6])))
    assert batch.block_tables[:, batch.row_of("a"), :2].tolist() == [[3, 4], [0, 6]]


def test_a_request_may_get_several_tokens_in_a_step_or_none() -> None:
    batch = make_batch(1)
    for request_id in "ab":
        batch.add(describe(request_id, ([0],)))
    a, b = batch.row_of("a"), batch.row_of("b")
    positions = batch.next_rows(np.array([a, b])).positions
    assert positions.tolist() == [0, 0]
    rows = LogitsRows(np.array([b, b, b]), np.array([0, 1, 2]), {1: (5,), 2: (5, 6)})
    batch.append_tokens(rows, np.array([5, 6, 7]))
    assert batch.next_rows(np.array([a, b])).positions.tolist() == [0, 3]
    assert batch.output_token_ids(b).tolist() == [5, 6, 7]
    assert batch.output_token_ids(a).tolist() == []


@pytest.mark.parametrize("block_ids", [([1],), ([1], [2, 3]), ([1], [2], [3])])
def test_tables_that_do_not_fit_the_groups_are_refused(block_ids: tuple[list[int], ...]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        make_batch(2).add(describe("a", block_ids))


def test_a_token_that_is_on_the_device_only_counts_until_it_comes() -> None:
    batch = make_batch(1)
    batch.add(describe("a", ([0],)))
    row = batch.row_of("a")
    rows = batch.next_rows(np.array([row]))
    batch.append_placeholders(rows, -1)
    assert batch.num_tokens[row] == 4
    assert batch.next_rows(np.array([row])).positions.tolist() == [1]
    batch.replace_placeholders(rows, np.array([7]))
    assert batch.output_token_ids(row).tolist() == [7]


def test_a_row_tells_its_requests_apart() -> None:
    batch = make_batch(1)
    batch.add(describe("a", ([0],)))
    row = batch.row_of("a")
    before = batch.generations[row]
    batch.remove("a")
    batch.add(describe("a", ([0],)))
    assert batch.row_of("a") == row
    assert batch.generations[row] != before
