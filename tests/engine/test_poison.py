"""Freed blocks filled with NaN: whoever still used one would sample something else, or nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import generate_greedily, loaded

PROMPTS = {str(index): range(5 + 3 * index, 45 + 3 * index) for index in range(4)}
# The pool holds about two of the requests: they are preempted, and their blocks change hands.
SETTINGS = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 24, "max_model_len": 80}


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model()


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    with loaded(model, **SETTINGS | {"num_blocks": 128}) as engine:
        tokens = generate_greedily(engine, PROMPTS, 24)
        assert engine.core.scheduler.num_preemptions == 0
    return tokens


@pytest.mark.parametrize("is_async", [False, True])
def test_poisoned_blocks_change_no_token(
    model: Path, expected: dict[str, list[int]], *, is_async: bool
) -> None:
    with loaded(
        model,
        poison_freed_blocks=True,
        async_scheduling=is_async,
        enable_prefix_caching=not is_async,
        **SETTINGS,
    ) as engine:
        for _ in range(2):  # with blocks that were used, and perhaps cached, before
            assert generate_greedily(engine, PROMPTS, 24) == expected
        assert engine.core.scheduler.num_preemptions > 0
        executor: Any = engine.core.executor
        assert executor.rank.kv_cache.tensor.isnan().any()
