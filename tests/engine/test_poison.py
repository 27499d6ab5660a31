"""Freed blocks filled with NaN: whoever still used one would sample something else, or nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.engine_types import EngineCoreRequest
from pdserve_common.metrics import KVTransferMetrics
from pdserve_common.sampling_params import SamplingParams
from pdserve_engine.clients.loading import LoadedEngine, load_engine
from pdserve_engine.config import EngineConfig

PROMPTS = [tuple(range(5 + 3 * index, 45 + 3 * index)) for index in range(4)]
# The pool holds about two of the requests: they are preempted, and their blocks change hands.
SETTINGS = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 80}


def start(model: Path, **fields: object) -> LoadedEngine:
    settings = SETTINGS | {"model": str(model), "kv_connector": "none", "num_threads": 1} | fields
    return load_engine(
        EngineConfig(**settings),  # type: ignore[arg-type]
        role="decode",
        engine_id="d",
        metrics=KVTransferMetrics(CollectorRegistry()),
    )


def generate(engine: LoadedEngine) -> dict[str, list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(PROMPTS))}
    for name, prompt in zip(tokens, PROMPTS, strict=True):
        engine.core.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
        )
    while engine.core.has_work():
        for outputs in engine.core.step().outputs.values():
            for output in outputs:
                assert output.error is None, output.error
                tokens[output.request_id].extend(output.new_token_ids)
    return tokens


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model()


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    engine = start(model, num_blocks=128)
    tokens = generate(engine)
    assert engine.core.scheduler.num_preemptions == 0
    engine.close()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_poisoned_blocks_change_no_token(
    model: Path, expected: dict[str, list[int]], *, is_async: bool
) -> None:
    engine = start(
        model,
        poison_freed_blocks=True,
        async_scheduling=is_async,
        enable_prefix_caching=not is_async,
    )
    for _ in range(2):  # with blocks that were used, and perhaps cached, before
        assert generate(engine) == expected
    assert engine.core.scheduler.num_preemptions > 0
    executor: Any = engine.core.executor
    assert executor.rank.kv_cache.tensor.isnan().any()
    engine.close()
