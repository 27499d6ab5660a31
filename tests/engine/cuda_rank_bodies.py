"""What the ranks of test_cuda_ranks.py do, importable in their processes."""

from pathlib import Path
from typing import Any

from pdserve_common.engine_types import LogprobsLists
from pdserve_common.sampling_params import SamplingParams
from pdserve_engine.runner.cuda_runner import CudaModelRunner
from pdserve_kernels.groups import Group
from support.interpreted import interpreted_kernels, prompt_events
from support.model_driver import Driver, make_prompt

NUM_STEPS = 7
# Of requests that are launched ahead: without filters, and with one.
UNFILTERED = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0))
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

    with prompt_events():
        with interpreted_kernels(deterministic_kernels if deterministic else None):
            driver = Driver(folder, group=group, **options)
        assert isinstance(driver.runner, CudaModelRunner)
        return answers_of(driver)


def answers_of(driver: Driver) -> Answers:
    """What comes of requests that come and go, some of them in chunks."""
    logprobs: dict[str, list[LogprobsLists]] = {}
    for i, params in enumerate(UNFILTERED):
        driver.add(f"unfiltered-{i}", make_prompt(5 + 9 * i), params=params, seed=i)
    outputs: dict[str, list[int]] = {}
    for step in range(NUM_STEPS):
        if step == 2:
            driver.add("filtered", make_prompt(20), params=FILTERED, seed=7)
        if step == 4:
            for i, params in enumerate(LOOKING_BACK):
                driver.add(f"looking-back-{i}", make_prompt(7 + i), params=params, seed=i)
            driver.preempt("unfiltered-1")
        if step == 5:
            driver.finish("filtered")
        output = driver.step(dict.fromkeys(driver.sequences, 12))
        for lists in (output.logprobs, output.prompt_logprobs):
            for name, found in lists.items():
                logprobs.setdefault(name, []).append(found)
        outputs |= {name: list(sequence.output) for name, sequence in driver.sequences.items()}
    return {name: (tokens, logprobs.get(name, [])) for name, tokens in outputs.items()}
