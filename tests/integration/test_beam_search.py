"""Beams through a router and a decode worker are those of Hugging Face transformers."""

import random
from collections.abc import Callable
from typing import Any

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import EarlyStopping, SamplingParams
from support.beams import hf_beams

EOS = 1
NUM_TOKENS = 20
# Stop tokens make ends as likely as a trained model's EOS does.
STOPS = tuple(range(50, 54))


async def test_beams_equal_transformers(stack: Any, hf_model: Callable[..., Any]) -> None:
    reference = hf_model(stack.config.model)
    rng = random.Random(3)
    cases = [
        ({"n": 3}, EarlyStopping.FALSE),
        ({"n": 2, "best_of": 5}, EarlyStopping.TRUE),
        ({"n": 4, "length_penalty": 2.0}, EarlyStopping.NEVER),
        ({"n": 4, "length_penalty": -1.0}, EarlyStopping.FALSE),
    ]
    lengths = set()
    hits = "pdserve_prefix_cache_hits_total"
    num_hits = stack.metrics("decode-0")[hits]
    client = AsyncClient(stack.grpc_address)
    for length in (3, 33):
        for fields, early_stopping in cases:
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
            beams = [tuple(item.token_ids) for item in output.outputs]
            expected = hf_beams(reference, prompt, params, (EOS, *STOPS))
            assert beams == [token_ids for token_ids, _ in expected], (length, fields)
            assert output.metrics.path == "local"
            lengths.update(map(len, beams))
    await client.close()
    assert stack.metrics("decode-0")[hits] > num_hits, "steps share what earlier ones computed"
    assert NUM_TOKENS in lengths
    assert len(lengths) > 3, "some beams were stopped"
