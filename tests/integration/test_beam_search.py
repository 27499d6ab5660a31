"""Beams through a router and a decode worker are those of Hugging Face transformers."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pdserve_client.client import AsyncClient
from pdserve_common.sampling_params import EarlyStopping, SamplingParams

EOS = 1
NUM_TOKENS = 20
# Stop tokens make ends as likely as a trained model's EOS does.
STOPS = tuple(range(50, 54))

pytestmark = pytest.mark.slow


@torch.inference_mode()
def hf_beams(model: Any, prompt: list[int], params: SamplingParams, early_stopping: Any) -> Any:
    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=params.best_of or params.n,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=early_stopping,
        eos_token_id=[EOS, *params.stop_token_ids],
        pad_token_id=0,
    )
    beams = []
    for row in answer[:, len(prompt) :].tolist():
        ends = [i + 1 for i, token in enumerate(row) if token in (EOS, *params.stop_token_ids)]
        beams.append(row[: min(ends, default=len(row))])
    return beams


async def test_beams_equal_transformers(stack: Any, hf_model: Callable[..., Any]) -> None:
    reference = hf_model(stack.config.model)
    rng = random.Random(3)
    cases = [
        ({"n": 3}, EarlyStopping.FALSE, False),
        ({"n": 2, "best_of": 5}, EarlyStopping.TRUE, True),
        ({"n": 4, "length_penalty": 2.0}, EarlyStopping.NEVER, "never"),
        ({"n": 4, "length_penalty": -1.0}, EarlyStopping.FALSE, False),
    ]
    lengths = set()
    hits = "pdserve_prefix_cache_hits_total"
    num_hits = stack.metrics("decode-0")[hits]
    client = AsyncClient(stack.grpc_address)
    for length in (3, 33):
        for fields, early_stopping, hf_early_stopping in cases:
            prompt = [rng.randrange(3, 190) for _ in range(length)]
            params = SamplingParams(
                use_beam_search=True,
                temperature=0.0,
                max_tokens=NUM_TOKENS,
                stop_token_ids=STOPS,
                early_stopping=early_stopping,
                **fields,  # type: ignore[arg-type]
            )
            outputs = [o async for o in client.generate(prompt, params, timeout_s=60)]
            (output,) = outputs
            beams = [list(item.token_ids) for item in output.outputs]
            expected = hf_beams(reference, prompt, params, hf_early_stopping)
            assert beams == expected, (length, fields)
            assert output.metrics.path == "local"
            lengths.update(map(len, beams))
    await client.close()
    assert stack.metrics("decode-0")[hits] > num_hits, "steps share what earlier ones computed"
    assert NUM_TOKENS in lengths
    assert len(lengths) > 3, "some beams were stopped"
