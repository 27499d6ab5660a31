"""ModelRunner against transformers, driven by a small scheduler written here."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve_common.engine_types import SamplingParams
from pdserve_engine.core.sched_output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from pdserve_engine.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.model_runner import ModelRunner
from pdserve_engine.models.config import ModelConfig
from pdserve_engine.models.registry import load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Tracked:
    """What the test's scheduler knows of a request."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_known: bool = False

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """Schedules by hand: each step computes up to `chunk` tokens of every request it is given."""

    def __init__(self, model_dir: Path, *, num_blocks: int = 256, **config: Any) -> None:
        self.config = ModelConfig.from_dir(model_dir, **config)
        model = load_model(model_dir, self.config, device=CPU)
        spec = KVCacheSpec.from_model(self.config, block_size=BLOCK_SIZE)
        self.cache = KVCache(spec, num_blocks=num_blocks, device=CPU)
        # What no test may read: memory that nobody has written.
        self.cache.tensor.fill_(torch.nan)
        self.runner = ModelRunner(model, self.cache, max_num_seqs=8)
        self.sequences: dict[str, Tracked] = {}
        self._free_blocks = list(range(num_blocks))
        random.Random(0).shuffle(self._free_blocks)
        self._finished: set[str] = set()
        self._preempted: set[str] = set()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        output: Sequence[int] = (),
        params: SamplingParams = GREEDY,
        seed: int = 0,
    ) -> Tracked:
        sequence = Tracked([*prompt, *output], len(prompt), params, seed)
        self.sequences[request_id] = sequence
        return sequence

    def finish(self, request_id: str) -> None:
        self._free_blocks += self.sequences.pop(request_id).block_ids
        self._finished.add(request_id)

    def preempt(self, request_id: str) -> None:
        sequence = self.sequences[request_id]
        self._free_blocks += sequence.block_ids
        sequence.block_ids, sequence.num_computed_tokens, sequence.is_known = [], 0, False
        self._preempted.add(request_id)

    def step(self, chunks: dict[str, int]) -> ModelRunnerOutput:
        """Run up to chunks[id] tokens of each request named, and take in what was sampled."""
        new: list[NewRequestData] = []
        cached = CachedRequestData()
        scheduled: dict[str, int] = {}
        for request_id, chunk in chunks.items():
            sequence = self.sequences[request_id]
            count = min(chunk, len(sequence.token_ids) - sequence.num_computed_tokens)
            scheduled[request_id] = count
            blocks = self._allocate(sequence, sequence.num_computed_tokens + count)
            if sequence.is_known:
                cached.request_ids.append(request_id)
                cached.new_block_ids.append((blocks,) if blocks else None)
                cached.num_computed_tokens.append(sequence.num_computed_tokens)
            else:
                new.append(self._describe(request_id, sequence))
                sequence.is_known = True
        output = self.runner.execute_model(
            SchedulerOutput(
                scheduled_new_reqs=new,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                finished_req_ids=frozenset(self._finished),
                preempted_req_ids=frozenset(self._preempted),
            )
        )
        self._finished.clear()
        self._preempted.clear()
        for request_id, tokens in zip(output.request_ids, output.sampled_token_ids, strict=True):
            self.sequences[request_id].num_computed_tokens += scheduled[request_id]
            self.sequences[request_id].token_ids += tokens
        return output

    def run(self, *request_ids: str, num_tokens: int, chunk: int = 10_000) -> None:
        """Step the requests together until each has num_tokens output tokens."""
        while unfinished := {
            i: chunk for i in request_ids if len(self.sequences[i].output) < num_tokens
        }:
            self.step(unfinished)

    def _allocate(self, sequence: Tracked, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // BLOCK_SIZE) - len(sequence.block_ids)
        blocks = [self._free_blocks.pop() for _ in range(missing)]
        sequence.block_ids += blocks
        return blocks

    def _describe(self, request_id: str, sequence: Tracked) -> NewRequestData:
        return NewRequestData(
            request_id=request_id,
            all_token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling_params=sequence.params,
            seed=sequence.seed,
            eos_token_id=self.config.eos_token_ids[0],
            block_ids=(list(sequence.block_ids),),
            num_computed_tokens=sequence.num_computed_tokens,
        )


def make_prompt(length: int, *, seed: int = 0) -> list[int]:
    generator = random.Random(f"{seed} {length}")
    return [generator.randrange(199) for _ in range(length)]


def record_logits(driver: Driver) -> list[torch.Tensor]:
    """Return a list that from now on gets the logits of each step that samples."""
    model, seen = driver.runner.model, []
    compute_logits = model.compute_logits

    def record(hidden_rows: torch.Tensor) -> torch.Tensor:
        seen.append(compute_logits(hidden_rows))
        return seen[-1]

    model.compute_logits = record
    return seen


@pytest.fixture
def driver(make_model: Callable[..., Path]) -> Iterator[Driver]:
    driver = Driver(make_model())
    yield driver
    driver.cache.close()


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied-sharded": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "shard_size": "100KB"},
    ),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-wide-heads": ("Qwen3ForCausalLM", {"head_dim": 32, "attention_bias": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], name: str
) -> None:
    architecture, overrides = MODELS[name]
    folder = make_model(architecture, **overrides)
    driver = Driver(folder)
    prompts = {str(n): make_prompt(n) for n in (1, 15, 16, 17, 300)}
    for request_id, prompt in prompts.items():
        driver.add(request_id, prompt)
    # Chunks of 70 are cut inside blocks, and the short prompts decode beside the long one's.
    driver.run(*prompts, num_tokens=20, chunk=70)
    for request_id, prompt in prompts.items():
        expected = hf_greedy(folder, prompt, 20)
        assert driver.sequences[request_id].output == expected, request_id
        assert len(set(expected)) > 5, "degenerate text proves nothing"


@pytest.mark.parametrize("chunk", [10_000, 256, 100])
def test_a_long_prompt_in_any_chunks_is_that_of_transformers(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], chunk: int
) -> None:
    folder = make_model("Qwen3ForCausalLM")
    driver = Driver(folder)
    prompt = make_prompt(1100)
    driver.add("long", prompt)
    driver.run("long", num_tokens=8, chunk=chunk)
    assert driver.sequences["long"].output == hf_greedy(folder, prompt, 8)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", 0.5)])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_logits_are_close_to_transformers(
    make_model: Callable[..., Path],
    hf_model: Callable[..., Any],
    name: str,
    dtype: str,
    atol: float,
) -> None:
    architecture, overrides = MODELS[name]
    folder = make_model(architecture, **overrides)
    driver = Driver(folder, dtype=dtype)
    seen = record_logits(driver)
    prompt = make_prompt(75)
    driver.add("a", prompt)
    driver.run("a", num_tokens=2, chunk=40)
    token_ids = torch.tensor([driver.sequences["a"].token_ids[:-1]])
    with torch.inference_mode():
        expected = hf_model(folder)(token_ids).logits[0, -2:]
    assert [tuple(logits.shape) for logits in seen] == [(1, 199)] * 2
    assert seen[0].dtype == torch.float32
    scale = expected.std() if dtype == "bfloat16" else 1.0
    assert float((torch.cat(seen) - expected).abs().max() / scale) < atol


@pytest.mark.parametrize("chunk", [10_000, 96, 50])
def test_bfloat16_logits_have_the_same_bits_in_any_batch_and_chunking(
    make_model: Callable[..., Path], chunk: int
) -> None:
    def last_logits(*neighbours: int, chunk: int) -> torch.Tensor:
        driver = Driver(make_model("Qwen3ForCausalLM"), dtype="bfloat16")
        driver.add("a", make_prompt(150))
        for length in neighbours:
            driver.add(str(length), make_prompt(length))
        driver.run("a", *map(str, neighbours), num_tokens=4, chunk=chunk)
        seen = record_logits(driver)
        output = driver.step(dict.fromkeys(driver.sequences, 1))
        return seen[0][output.request_ids.index("a")]

    alone = last_logits(chunk=10_000)
    assert torch.equal(last_logits(3, 65, 140, chunk=chunk), alone)


def test_requests_may_come_and_go_and_share_steps(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    expected = {n: hf_greedy(make_model(), make_prompt(n), 12) for n in (5, 40, 33, 64)}
    for request_id in (5, 40):
        driver.add(str(request_id), make_prompt(request_id))
    driver.run("5", "40", num_tokens=6, chunk=16)
    driver.add("33", make_prompt(33))
    driver.run("33", "5", num_tokens=12, chunk=7)
    assert driver.sequences["5"].output == expected[5]
    driver.finish("5")
    driver.add("64", make_prompt(64))
    driver.run("40", "64", num_tokens=12, chunk=30)
    for request_id in (40, 33, 64):
        assert driver.sequences[str(request_id)].output == expected[request_id]


def test_a_preempted_request_continues_where_it_was(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    driver.add("a", make_prompt(30))
    driver.add("b", make_prompt(20))
    driver.run("a", "b", num_tokens=5)
    driver.preempt("a")
    driver.run("b", num_tokens=9)
    driver.run("a", num_tokens=12, chunk=16)
    assert driver.sequences["a"].output == hf_greedy(make_model(), make_prompt(30), 12)
    assert driver.sequences["b"].output == hf_greedy(make_model(), make_prompt(20), 9)


def test_a_request_preempted_and_scheduled_in_one_step_starts_over(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    driver.add("a", make_prompt(30))
    driver.run("a", num_tokens=3)
    driver.preempt("a")
    driver.run("a", num_tokens=6)
    assert driver.sequences["a"].output == hf_greedy(make_model(), make_prompt(30), 6)


def test_a_request_that_arrives_with_output_tokens_and_kv_goes_on(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    expected = hf_greedy(make_model(), make_prompt(50), 10)
    donor = driver.add("donor", make_prompt(50))
    driver.run("donor", num_tokens=4)
    moved = driver.add("moved", make_prompt(50), output=expected[:4])
    moved.block_ids, moved.num_computed_tokens = donor.block_ids, donor.num_computed_tokens
    driver.run("moved", num_tokens=10)
    assert moved.output == expected


def test_chunks_before_the_last_sample_nothing_and_decodes_come_first(driver: Driver) -> None:
    driver.add("decode", make_prompt(4))
    driver.run("decode", num_tokens=1)
    driver.add("prefill", make_prompt(60))
    output = driver.step({"prefill": 20, "decode": 1})
    assert output.request_ids == ("decode", "prefill")
    assert len(output.sampled_token_ids[0]) == 1
    assert output.sampled_token_ids[1] == ()
    assert driver.step({"prefill": 20}).sampled_token_ids == ((),)
    assert output.num_nans_in_logits == {}


def test_a_step_without_tokens_only_forgets(driver: Driver) -> None:
    driver.add("a", make_prompt(4))
    driver.run("a", num_tokens=1)
    driver.finish("a")
    assert driver.step({}).request_ids == ()
    driver.add("a", make_prompt(5))
    driver.run("a", num_tokens=1)


def test_random_tokens_depend_on_the_seed_not_on_the_company(driver: Driver) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95)
    alone = driver.add("alone", make_prompt(20), params=params, seed=7)
    driver.run("alone", num_tokens=15)
    again = driver.add("again", make_prompt(20), params=params, seed=7)
    other = driver.add("other", make_prompt(20), params=params, seed=8)
    driver.add("greedy", make_prompt(33))
    driver.run("other", "greedy", "again", num_tokens=15, chunk=12)
    assert again.output == alone.output
    assert other.output != alone.output
    # A worker that takes over in mid-text draws on from the same position.
    resumed = driver.add("resumed", make_prompt(20), output=alone.output[:6], params=params, seed=7)
    driver.run("resumed", num_tokens=15)
    assert resumed.output == alone.output


def test_min_tokens_keeps_end_tokens_away(
    driver: Driver, make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    first, second, *_ = hf_greedy(make_model(), make_prompt(9), 4)
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(first, second))
    sequence = driver.add("a", make_prompt(9), params=params)
    driver.run("a", num_tokens=2)
    assert not {first, second, driver.config.eos_token_ids[0]} & set(sequence.output)


def test_nans_are_counted_for_the_request_they_are_in(driver: Driver) -> None:
    driver.add("good", make_prompt(20))
    bad = driver.add("bad", make_prompt(20))
    driver.run("good", "bad", num_tokens=1)
    driver.cache.tensor[bad.block_ids[0]] = torch.nan
    output = driver.step({"good": 1, "bad": 1})
    assert output.num_nans_in_logits == {"bad": 199}
    assert all(0 <= tokens[0] < 199 for tokens in output.sampled_token_ids)
