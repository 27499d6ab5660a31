"""A decode's token is applied in a way of its own: it does what the general one does."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_common.types.sampling_params import RepetitionDetectionParams, SamplingParams
from pdserve_engine.core.step_plan import DECODE
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import ModelRunnerOutput
from support.scripted_engine import BLOCK_SIZE, EOS, Engine

NUM_STEPS = 60
REPETITION = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=2)


def without_shortcut(engine: Engine) -> None:
    results: Any = engine.scheduler._results

    def apply_token(request: Request, token_id: int) -> None:
        results.apply_step(request, DECODE, (token_id,), ModelRunnerOutput())

    results.apply_token = apply_token


def a_request(rng: random.Random, request_ids: list[str]) -> dict[str, Any]:
    prefix = [rng.randrange(2)] * rng.choice((0, BLOCK_SIZE, 2 * BLOCK_SIZE))
    prompt = prefix + rng.choices(range(9), k=rng.randrange(1, 9))
    source = rng.choice(request_ids) if request_ids and rng.random() < 0.2 else None
    params = SamplingParams(
        max_tokens=rng.randrange(1, 20),
        min_tokens=rng.choice((0, 3)),
        stop_token_ids=tuple(rng.sample(range(500), 30)),
        ignore_eos=rng.random() < 0.5,
        repetition_detection=rng.choice((None, None, REPETITION)),
    )
    return {"prompt": prompt, "sampling_params": params, "fork_of": source}


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([(None,), (None, 2 * BLOCK_SIZE - 1)]))
def test_it_does_what_the_general_way_does(seed: int, windows: tuple[int | None, ...]) -> None:
    rng = random.Random(seed)
    engines = [
        Engine(num_blocks=24 * len(windows), windows=windows, clock=lambda: 0.0) for _ in range(2)
    ]
    without_shortcut(engines[1])
    prompts: dict[str, list[int]] = {}
    for step in range(NUM_STEPS):
        if rng.random() < 0.4:
            fields = a_request(rng, list(prompts))
            prompts[str(step)] = fields["prompt"]
            if fields["fork_of"] is not None:
                fields["prompt"] = prompts[str(step)] = prompts[fields["fork_of"]]
            for engine in engines:
                engine.add(str(step), **fields)
        if prompts and rng.random() < 0.05:
            aborted = rng.choice(list(prompts))
            for engine in engines:
                engine.core.abort_requests([aborted])
        script = rng.choices((1, 2, EOS, None), k=3)
        for engine in engines:
            for name in engine.rank.tokens:
                engine.rank.script[name] = [token for token in script if token is not None]
            engine.step()
    for engine in engines:
        engine.run()
        engine.kv.check_integrity()
    assert engines[0].rank.steps == engines[1].rank.steps
    assert engines[0].outputs == engines[1].outputs
    assert engines[0].cached == engines[1].cached
