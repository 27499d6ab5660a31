"""What an engine says and settles when it starts, and the settings it refuses to start with."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engines import load


def test_a_start_says_what_was_measured_and_what_is_served(
    make_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    with caplog.at_level(logging.INFO, logger="pdserve_engine"):
        engine = load(model, num_blocks=160)
    engine.close()
    assert "MiB besides weights and KV" in caplog.text
    (loaded,) = [m for m in caplog.messages if m.startswith(f"loaded {model.name} in ")]
    assert "160 blocks of 16 tokens" in loaded
    assert "max_model_len 2048 (1.2 requests of it at once), float32" in loaded


def test_what_is_loaded_is_kept_from_the_collector_until_the_end(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    engine = load(make_model(), num_blocks=160)
    assert calls[-1] == "freeze"
    engine.close()
    assert calls[-1] == "unfreeze"


@pytest.mark.parametrize(
    ("model_impl", "determinism"), [("native", "exact"), ("transformers", "consistent")]
)
def test_an_engine_says_how_much_of_a_token_depends_on_the_batch(
    model_impl: str, determinism: str, make_model: Callable[..., Path]
) -> None:
    engine = load(make_model(), num_blocks=160, model_impl=model_impl)
    engine.close()
    assert engine.info.determinism == determinism


@pytest.mark.parametrize("setting", [{"scheduling_mode": "v0"}, {"enable_chunked_prefill": False}])
def test_prompts_that_no_step_could_hold_whole_are_refused_at_the_start(
    make_model: Callable[..., Path], setting: dict[str, Any]
) -> None:
    """Such a request would wait for ever, and everybody behind it."""
    model = make_model()
    refusal = r"max_num_batched_tokens is 512, .* must be at least max_model_len \(2048\)"
    with pytest.raises(ValueError, match=refusal):
        load(model, num_blocks=160, max_num_batched_tokens=512, **setting)
    load(model, num_blocks=160, max_num_batched_tokens=2048, **setting).close()
