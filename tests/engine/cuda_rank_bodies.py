"""What the ranks of test_cuda_ranks.py do, importable in their processes."""

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.types.engine import LogprobsLists
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.runner.run.cuda_stepper import CudaStepper
from pdserve_kernels.groups import Group
from support.cuda_traffic import any_text, launches_of, recorded_launches
from support.interpreted import (
    convert_fp8_as_gpus_do,
    interpreted_kernels,
    prepare_interpreter,
    prompt_events,
)
from support.model_driver import Driver, make_prompt

NUM_STEPS = 7
# Of requests that are launched ahead, one of them behind its prompt: without filters, and with one.
UNFILTERED = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, prompt_logprobs=1))
FILTERED = SamplingParams(temperature=1.0, top_k=5, top_p=0.9)
# Of those that rank 0 leads.
LOOKING_BACK = (
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.8, logprobs=2, prompt_logprobs=1, logit_bias={3: 2.0}),
)

# Tokens, and logprobs of both kinds in the order in which they came, by request.
Answers = dict[str, tuple[list[int], list[LogprobsLists]]]


def answers_of_rank(
    group: Group | None, folder: Path, options: dict[str, Any], *, deterministic: bool = False
) -> Answers:
    """What a rank says, with the code of CUDA; without a group it is the only one."""
    from pdserve_kernels.triton import deterministic as deterministic_kernels

    prepare_interpreter()
    with prompt_events(), pytest.MonkeyPatch.context() as patch:
        convert_fp8_as_gpus_do(patch)
        with interpreted_kernels(deterministic_kernels if deterministic else None):
            driver = Driver(folder, group=group, **options)
        assert isinstance(driver.runner.stepper, CudaStepper)
        return answers_of(driver)


def answers_of(driver: Driver) -> Answers:
    """What comes of requests that come and go, some of them in chunks, with the driver's adapters
    and without.
    """
    adapters = itertools.cycle([*driver.digests, None])
    logprobs: dict[str, list[LogprobsLists]] = {}
    for i, params in enumerate(UNFILTERED):
        prompt = make_prompt(5 + 9 * i)
        driver.add(f"unfiltered-{i}", prompt, params=params, seed=i, adapter=next(adapters))
    outputs: dict[str, list[int]] = {}
    for step in range(NUM_STEPS):
        if step == 2:
            prompt, adapter = make_prompt(20), next(adapters)
            driver.add("filtered", prompt, params=FILTERED, seed=7, adapter=adapter)
        if step == 4:
            for i, params in enumerate(LOOKING_BACK):
                prompt, adapter = make_prompt(7 + i), next(adapters)
                driver.add(f"looking-back-{i}", prompt, params=params, seed=i, adapter=adapter)
            driver.preempt("unfiltered-1")
        if step == 5:
            driver.finish("filtered")
        output = driver.step(dict.fromkeys(driver.sequences, 12))
        for lists in (output.logprobs, output.prompt_logprobs):
            for name, found in lists.items():
                logprobs.setdefault(name, []).append(found)
        outputs |= {name: list(sequence.output) for name, sequence in driver.sequences.items()}
    return {name: (tokens, logprobs.get(name, [])) for name, tokens in outputs.items()}


def cold_launches_of_rank(
    group: Group, folder: Path, options: dict[str, Any], kernels: str
) -> dict[str, list[str]]:
    """The variants of kernels that a rank launches in traffic only."""
    with recorded_launches() as recorder, any_text() as grammar:
        with interpreted_kernels(importlib.import_module(f"pdserve_kernels.{kernels}")):
            driver = Driver(folder, group=group, **options)
        return launches_of(recorder, driver, grammar, num_steps=20).cold()
