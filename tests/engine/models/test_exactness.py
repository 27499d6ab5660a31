"""A native model on a CPU computes the same bits of a request however it is scheduled."""

from typing import NamedTuple

import pytest
import torch

from support.model_driver import BLOCK_SIZE, Driver, make_prompt, record_logits, row_major

# in_features of 1100 and more: below, fewer kernels sum in an order of their own.
SHAPE = {"hidden_size": 128, "intermediate_size": 1100, "head_dim": 32, "num_hidden_layers": 2}
PROMPT = make_prompt(600)
NUM_OUTPUT = 3


class Computed(NamedTuple):
    """What one request got: its KV, layer by layer, its tokens, and the logits they came from."""

    kv: list[torch.Tensor]
    tokens: list[int]
    logits: torch.Tensor


@pytest.fixture(params=[pytest.param(1, id="1 thread"), pytest.param(2, id="2 threads")])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def compute(model_dir, dtype, schedule, neighbours=()):
    """Run the prompt to NUM_OUTPUT tokens, `schedule` giving the tokens of each step in turn."""
    driver = Driver(model_dir, dtype=dtype)
    seen, logits = record_logits(driver), []
    request = driver.add("it", PROMPT)
    for index, length in enumerate(neighbours):
        driver.add(f"other-{index}", make_prompt(length, seed=index))
    step = 0
    while len(request.output) < NUM_OUTPUT:
        chunks = {f"other-{index}": 1 + 40 * (index % 2) for index in range(len(neighbours))}
        output = driver.step(chunks | {"it": schedule[step % len(schedule)]})
        pairs = zip(output.request_ids, output.sampled_token_ids, strict=True)
        sampled = [request_id for request_id, tokens in pairs if tokens]
        if "it" in sampled:
            logits.append(seen[-1][sampled.index("it")])
        step += 1
    computed = Computed(kv_of(driver, request), request.output, torch.stack(logits))
    driver.cache.close()
    return computed


def kv_of(driver, request):
    """Of each KV group [heads, slots, k|v, num_tokens, head_dim], in the order of positions."""
    num_tokens = request.num_computed_tokens
    assert len(request.block_ids[0]) == -(-num_tokens // BLOCK_SIZE)
    return [
        row_major(driver.cache, table).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :num_tokens]
        for table in request.block_ids
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.usefixtures("_threads")
def test_the_bits_of_a_request_do_not_depend_on_how_it_is_scheduled(
    make_model, architecture, dtype
):
    model_dir = make_model(architecture, dtype=dtype, **SHAPE)
    alone = compute(model_dir, dtype, [len(PROMPT)])
    for schedule, neighbours in [
        ([490, *[1] * 40], ()),
        ([300, *[3] * 20], ()),
        ([16, 17], ()),
        ([512], ()),
        ([len(PROMPT)], (1, 200, 17)),
        ([17, 1, 3, 120], (90, 5, 333, 31)),
    ]:
        scheduled = compute(model_dir, dtype, schedule, neighbours)
        case = (schedule, neighbours)
        assert scheduled.tokens == alone.tokens, case
        assert torch.equal(scheduled.logits, alone.logits), case
        for kv, expected in zip(scheduled.kv, alone.kv, strict=True):
            assert torch.equal(kv, expected), case
