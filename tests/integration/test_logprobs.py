"""Log-probabilities through router, P, NIXL and D are those of Hugging Face transformers."""

from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import Client
from pdserve_common.types.sampling_params import SamplingParams

# Several chunks of `plain_stack`, the last of them not full.
PROMPT = [3 + (7 * i) % 180 for i in range(3 * 32 + 5)]
NUM_TOKENS = 6
TOLERANCE = 1e-3

HfLogprobs = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def hf_logprobs(plain_stack: Any, hf_model: Callable[..., Any]) -> HfLogprobs:
    """[num_tokens, vocab_size] fp64; row i is about the token behind token i."""

    def compute(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = hf_model(plain_stack.config.model)(
                torch.tensor([token_ids])
            ).logits[0]
        return logits.double().log_softmax(dim=-1)

    return compute


def assert_position(
    position: core_pb2.LogprobsLists.Position, token_id: int, expected: torch.Tensor, num_top: int
) -> None:
    """`expected` is the vocabulary's row of log-probabilities."""
    assert len(position.token_ids) == len(position.logprobs) == 1 + num_top
    assert position.token_ids[0] == token_id
    wanted = [float(expected[i]) for i in position.token_ids]
    assert list(position.logprobs) == pytest.approx(wanted, abs=TOLERANCE)
    top = expected.topk(num_top).values.tolist()
    assert list(position.logprobs)[1:] == pytest.approx(top, abs=TOLERANCE)
    num_better = int((expected > expected[token_id] + TOLERANCE).sum())
    num_alike = int((expected > expected[token_id] - TOLERANCE).sum())
    assert num_better < position.sampled_token_rank <= num_alike


@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS], ids=["decode alone", "prefill and decode"])
def test_logprobs_equal_transformers(stack: Any, hf_logprobs: HfLogprobs, num_tokens: int) -> None:
    client = Client(stack.grpc_address)
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    outputs: list[pb2.RequestOutput] = list(client.generate(PROMPT, params, timeout_s=60))
    client.close()
    path = outputs[-1].metrics.path
    assert path == ("local" if num_tokens == 1 else "disaggregated")
    completions = [output.outputs[0] for output in outputs]
    token_ids = [token_id for completion in completions for token_id in completion.token_ids]
    expected = hf_logprobs(PROMPT + token_ids)

    prompt_positions = outputs[0].prompt_logprobs.positions
    assert len(prompt_positions) == len(PROMPT)
    assert not prompt_positions[0].token_ids
    for i in range(1, len(PROMPT)):
        assert_position(prompt_positions[i], PROMPT[i], expected[i - 1], 2)

    positions = [position for each in completions for position in each.logprobs.positions]
    assert len(positions) == len(token_ids) == num_tokens
    for i, token_id in enumerate(token_ids):
        assert_position(positions[i], token_id, expected[len(PROMPT) + i - 1], 3)
    total = sum(position.logprobs[0] for position in positions)
    assert completions[-1].cumulative_logprob == pytest.approx(total)


def test_a_scored_prompt_has_the_logprobs_of_transformers(
    stack: Any, hf_logprobs: HfLogprobs
) -> None:
    """The way evaluation harnesses ask for the likelihood of a text."""
    url = f"http://127.0.0.1:{stack.http_port}/v1"
    expected = hf_logprobs(PROMPT)
    with openai.OpenAI(base_url=url, api_key="unused") as client:
        answer = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=PROMPT,
            max_tokens=0,
            echo=True,
            logprobs=1,
            temperature=0,
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    wanted = [float(expected[i - 1, PROMPT[i]]) for i in range(1, len(PROMPT))]
    assert logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=TOLERANCE)
    best = expected.max(dim=-1).values.tolist()
    tops = [max(top.values()) for top in logprobs.top_logprobs[1:]]
    assert tops == pytest.approx(best[:-1], abs=TOLERANCE)
