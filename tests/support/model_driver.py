"""Drives a ModelRunner as a scheduler would, by hand, for tests of models."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pdserve_common.types.engine import MultiModalFeatureSpec
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.lora.adapter import read_adapter
from pdserve_engine.models.base import SupportsLora
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.models.stage import ALL_LAYERS
from pdserve_engine.request.sched_output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from pdserve_engine.runner.load.make_runner import make_runner
from pdserve_engine.runner.load.model_source import shard_of
from pdserve_engine.runner.run.model_runner import NO_DRAFTS
from pdserve_kernels.groups import Group
from pdserve_kernels.reference import argmax
from support.adapters import merged_greedy

CPU = torch.device("cpu")
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)
NO_PICTURES: Mapping[MultiModalFeatureSpec, bytes] = MappingProxyType({})


@dataclass(slots=True)
class Tracked:
    """What the test's scheduler knows of a request."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    # Per KV group.
    block_ids: tuple[list[int], ...]
    grammar: CompiledGrammar | None = None
    adapter: str | None = None
    pooling: PoolingParams | None = None
    mm_features: tuple[MultiModalFeatureSpec, ...] = ()
    num_computed_tokens: int = 0
    is_known: bool = False

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """Schedules by hand: each step computes up to `chunk` tokens of every request it is given."""

    def __init__(
        self,
        model_dir: Path,
        *,
        num_blocks: int = 512,
        device: torch.device = CPU,
        adapters: Sequence[Path] = (),
        max_lora_rank: int = 64,
        max_num_seqs: int = 12,
        group: Group | None = None,
        **config: Any,
    ) -> None:
        """With a group it is one rank's; all ranks do the same, with the same requests."""
        self.config = read_model_config(model_dir, **config)
        model = load_model(model_dir, self.config, device=device, group=group)
        spec = KVCacheSpec.from_model(self.config, block_size=BLOCK_SIZE, device=device)
        if group is not None:
            spec = replace(spec, shard=shard_of(spec, group, ALL_LAYERS))
        self.cache = KVCache(spec, num_blocks=num_blocks, device=device)
        # What no test may read: memory that nobody has written.
        self.cache.tensor.fill_(torch.nan)
        self.runner = make_runner(
            model,
            self.cache,
            max_num_seqs=max_num_seqs,
            max_model_len=model.config.max_model_len,
        )
        # By folder.
        self.digests: dict[Path, str] = {}
        if adapters:
            self.runner.reserve_adapters(len(adapters), max_lora_rank)
        for folder in adapters:
            self.load_adapter(folder)
        self._groups = spec.groups
        self.sequences: dict[str, Tracked] = {}
        self._free_blocks = list(range(num_blocks))
        random.Random(0).shuffle(self._free_blocks)
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._new_pictures: dict[str, bytes] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        output: Sequence[int] = (),
        params: SamplingParams = GREEDY,
        seed: int = 0,
        grammar: CompiledGrammar | None = None,
        adapter: Path | None = None,
        pooling: PoolingParams | None = None,
        pictures: Mapping[MultiModalFeatureSpec, bytes] = NO_PICTURES,
    ) -> Tracked:
        tables: tuple[list[int], ...] = tuple([] for _ in self._groups)
        digest = None if adapter is None else self.digests[adapter]
        sequence = Tracked([*prompt, *output], len(prompt), params, seed, tables, grammar, digest)
        sequence.pooling = pooling
        sequence.mm_features = tuple(pictures)
        self._new_pictures |= {each.identifier: pixels for each, pixels in pictures.items()}
        self.sequences[request_id] = sequence
        return sequence

    def load_adapter(self, folder: Path) -> None:
        model: Any = self.runner.model
        assert isinstance(model, SupportsLora)
        adapter = read_adapter(folder, model.lora_targets, dtype=self.config.dtype, max_rank=64)
        self.runner.add_adapter(adapter.digest, model.pack_adapter(adapter))
        self.digests[folder] = adapter.digest

    def unload_adapter(self, folder: Path) -> None:
        self.runner.remove_adapter(self.digests.pop(folder))

    def finish(self, request_id: str) -> None:
        self._free_blocks += chain.from_iterable(self.sequences.pop(request_id).block_ids)
        self._finished.add(request_id)

    def preempt(self, request_id: str) -> None:
        sequence = self.sequences[request_id]
        self._free_blocks += chain.from_iterable(sequence.block_ids)
        sequence.block_ids = tuple([] for _ in self._groups)
        sequence.num_computed_tokens, sequence.is_known = 0, False
        self._preempted.add(request_id)

    def step(
        self, chunks: dict[str, int], drafts: Mapping[str, tuple[int, ...]] = NO_DRAFTS
    ) -> ModelRunnerOutput:
        """Run up to chunks[id] tokens of each request named, and take in what was sampled. Drafts
        are for requests of which all tokens but one are computed.
        """
        new: list[NewRequestData] = []
        cached = CachedRequestData()
        scheduled: dict[str, int] = {}
        for request_id, chunk in chunks.items():
            sequence = self.sequences[request_id]
            count = min(chunk, len(sequence.token_ids) - sequence.num_computed_tokens)
            count += len(drafts.get(request_id, ()))
            scheduled[request_id] = count
            blocks = self._allocate(sequence, sequence.num_computed_tokens + count)
            if sequence.is_known:
                cached.request_ids.append(request_id)
                cached.new_block_ids.append(blocks if any(blocks) else None)
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
                scheduled_spec_decode_tokens=dict(drafts),
                finished_req_ids=frozenset(self._finished),
                preempted_req_ids=frozenset(self._preempted),
                scheduled_encoder_inputs=self._new_pictures,
            )
        ).get_output()
        self._new_pictures = {}
        self._finished.clear()
        self._preempted.clear()
        for request_id, tokens in zip(output.request_ids, output.sampled_token_ids, strict=True):
            sequence = self.sequences[request_id]
            sequence.num_computed_tokens += scheduled[request_id]
            # What was computed behind a draft that was wrong does not count.
            sequence.num_computed_tokens -= (
                len(drafts[request_id]) + 1 - len(tokens) if request_id in drafts else 0
            )
            if sequence.num_computed_tokens == len(sequence.token_ids) and not tokens:
                sequence.num_computed_tokens -= 1  # its mask was late
            sequence.token_ids += tokens
            self._spoil_skipped_blocks(self.sequences[request_id])
        return output

    def run(self, *request_ids: str, num_tokens: int, chunk: int = 10_000) -> None:
        """Step the requests together until each has num_tokens output tokens."""
        while unfinished := {
            i: chunk for i in request_ids if len(self.sequences[i].output) < num_tokens
        }:
            self.step(unfinished)

    def _allocate(self, sequence: Tracked, num_tokens: int) -> tuple[list[int], ...]:
        missing = -(-num_tokens // BLOCK_SIZE) - len(sequence.block_ids[0])
        blocks = tuple([self._free_blocks.pop() for _ in range(missing)] for _ in self._groups)
        for table, new in zip(sequence.block_ids, blocks, strict=True):
            table += new
        return blocks

    def _spoil_skipped_blocks(self, sequence: Tracked) -> None:
        """No token may see what lies before its window, and its block may be anyone's."""
        for group, table in zip(self._groups, sequence.block_ids, strict=True):
            if group.window is not None:
                first_seen = max(0, sequence.num_computed_tokens + 1 - group.window)
                self.cache.tensor[table[: first_seen // BLOCK_SIZE]] = torch.nan

    def _describe(self, request_id: str, sequence: Tracked) -> NewRequestData:
        return NewRequestData(
            request_id=request_id,
            all_token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling_params=sequence.params,
            seed=sequence.seed,
            eos_token_id=self.config.eos_token_ids[0],
            block_ids=tuple(map(list, sequence.block_ids)),
            num_computed_tokens=sequence.num_computed_tokens,
            grammar=sequence.grammar,
            adapter=sequence.adapter,
            pooling_params=sequence.pooling,
            mm_features=sequence.mm_features,
        )


def make_prompt(length: int, *, seed: int = 0) -> list[int]:
    generator = random.Random(f"{seed} {length}")
    return [generator.randrange(199) for _ in range(length)]


def run_as_merged(
    folder: Path,
    adapters: Sequence[Path | None],
    lengths: Sequence[int],
    hf_greedy: Callable[..., list[int]],
) -> Driver:
    """Run a request with each adapter, all in one batch; each has its merged weights' tokens."""
    driver = Driver(folder, adapters=[each for each in adapters if each is not None])
    prompts = {str(length): make_prompt(length) for length in lengths}
    for (request_id, prompt), adapter in zip(prompts.items(), adapters, strict=True):
        driver.add(request_id, prompt, adapter=adapter)
    driver.run(*prompts, num_tokens=12, chunk=30)
    for (request_id, prompt), adapter in zip(prompts.items(), adapters, strict=True):
        expected = hf_greedy(folder, prompt, 12)
        if adapter is not None:
            base, expected = expected, merged_greedy(folder, adapter, prompt, 12)
            assert expected != base, "the adapter changes nothing"
        assert driver.sequences[request_id].output == expected, request_id
    return driver


def record_logits(driver: Driver) -> list[torch.Tensor]:
    """Return a list that from now on gets the logits of each step that samples."""
    model: Any = driver.runner.model
    seen: list[torch.Tensor] = []
    compute_logits = model.compute_logits

    def record(hidden_rows: torch.Tensor) -> torch.Tensor:
        seen.append(compute_logits(hidden_rows).float())
        return seen[-1].clone()

    model.compute_logits = record
    model.choose_greedily = lambda hidden_rows, mask: argmax(record(hidden_rows), mask=mask)
    return seen


def row_major(cache: KVCache, block_ids: Sequence[int]) -> torch.Tensor:
    """Copy some blocks of a pool, each tile of them as [block_size, head_dim]."""
    blocks = cache.tensor[list(block_ids)]
    if cache.spec.tile_format == "row_major":
        return blocks
    assert cache.spec.tile_format == "vnni16"
    *outer, block_size, head_dim = blocks.select(3, 0).shape
    keys = blocks[:, :, :, 0].reshape(*outer, block_size // 16, head_dim // 2, 16, 2)
    values = blocks[:, :, :, 1].reshape(*outer, block_size // 2, head_dim, 2)
    tiles = keys.transpose(-3, -2), values.transpose(-2, -1)
    return torch.stack([tile.reshape(*outer, block_size, head_dim) for tile in tiles], 3)
