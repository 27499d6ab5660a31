"""Random traffic for a runner on CUDA, and what Triton has to compile for it.

Launches are recorded as an H100 would compile them; none is computed.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.grammar.compile_queue import GrammarCompiler
from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.grammar.vocabulary import make_tokenizer_info
from support.grammars import EOS, MODEL, VOCAB_SIZE, structural_tag
from support.interpreted import prompt_events
from support.model_driver import Driver, make_prompt
from support.recorded_graphs import recorded_graphs
from support.triton_variants import Recorder, Variants, recorded_variants

# What all draws bring here; grammars take it.
TOKEN_ID = 300


@contextmanager
def recorded_launches() -> Iterator[Recorder]:
    """Within, launches and graphs are recorded; each draw brings TOKEN_ID, and no NaN."""
    from pdserve_engine.sampling import logprobs
    from pdserve_kernels import triton
    from pdserve_kernels.triton.sampling import sample as sampling

    def results(num_rows: int, num_parts: int, device: torch.device) -> Iterator[torch.Tensor]:
        chosen = torch.tensor([[TOKEN_ID], [0]]).repeat(1, num_rows)
        yield from (*torch.zeros(2, num_rows, num_parts, dtype=torch.int64), chosen)

    with (
        pytest.MonkeyPatch.context() as patch,
        prompt_events(),
        recorded_graphs(),
        recorded_variants() as recorder,
    ):
        patch.setattr(sampling, "_parts_and_results", results)
        patch.setattr(logprobs, "select", lambda device: triton)
        # So that a step's are looked at in several pieces.
        patch.setattr(logprobs, "MAX_LOGITS_AT_ONCE_ON_CPU", 3 * VOCAB_SIZE)
        yield recorder


@contextmanager
def any_text() -> Iterator[CompiledGrammar]:
    """A grammar that takes all text."""
    info = make_tokenizer_info(MODEL, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    compiler = GrammarCompiler(info)
    try:
        yield compiler.submit(structural_tag({"type": "any_text"})).result()
    finally:
        compiler.close()


def make_params(rng: random.Random) -> SamplingParams:
    """Most ask for nothing special, so that steps have all kinds alone and together."""
    options: dict[str, Any] = {"temperature": rng.choice((0.0, 0.8))}
    special: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.5, "presence_penalty": 0.1},
        {"logit_bias": {3: 2.0}},
        {"allowed_token_ids": (3, 5, TOKEN_ID)},
        {"bad_words_token_ids": ((3, 4),)},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
    ]
    for each in rng.sample(special, rng.choice((0, 0, 1, 2))):
        options |= each
    return SamplingParams(**options)


def serve(driver: Driver, grammar: CompiledGrammar, num_steps: int = 60) -> None:
    """Have requests of all kinds and lengths come and go, some with adapters, grammars, drafts."""
    rng = random.Random(0)
    adapters = [None, None, *driver.digests]
    for step in range(num_steps):
        for i in range(rng.choice((0, 0, 1, 1, 3))):
            if len(driver.sequences) < 12:
                driver.add(
                    f"{step}-{i}",
                    make_prompt(rng.choice((1, 2, 7, 30, 200, rng.randint(520, 900))), seed=step),
                    params=make_params(rng),
                    seed=i,
                    grammar=grammar if rng.random() < 0.2 else None,
                    adapter=rng.choice(adapters),
                )
        for name in rng.sample(sorted(driver.sequences), len(driver.sequences) // 4):
            driver.finish(name)
        names = rng.sample(sorted(driver.sequences), min(len(driver.sequences), rng.randint(1, 12)))
        if not names:
            continue
        drafts = {
            name: (TOKEN_ID,) * rng.randint(1, 3)
            for name in names
            if driver.sequences[name].output and rng.random() < 0.1
        }
        driver.step(dict.fromkeys(names, rng.choice((1, 16, 300, 2000))), drafts)


class Launches(NamedTuple):
    """What a runner launches at its start, and in traffic."""

    warm: Variants
    served: Variants

    def cold(self) -> dict[str, list[str]]:
        """Return by kernel the variants that a request would wait for."""
        found = {
            name: sorted(all_ - self.warm.get(name, set())) for name, all_ in self.served.items()
        }
        return {name: variants for name, variants in found.items() if variants}


def launches_of(
    recorder: Recorder, driver: Driver, grammar: CompiledGrammar, num_steps: int = 60
) -> Launches:
    def start() -> None:
        driver.runner.warm_up()
        driver.runner.capture_graphs()

    return Launches(recorder.of(start), recorder.of(lambda: serve(driver, grammar, num_steps)))
