"""Workers that round a little differently: no token is lost or changed, and each is nearly the best
one.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, run_case
from checks import Answer, Asker, wait_until_handing_off
from ground import DEADLINE_S, PARAMS, restored
from transformers import AutoTokenizer

from support.cluster import Cluster

MODEL = Path(__file__).parent.parent.parent / "models/pdserve-tiny"
TEXT = "Once upon a time there was a little girl who lived in a house near the forest. " * 4
NUM_TOKENS = 64
GREEDY = dataclasses.replace(PARAMS["greedy"], max_tokens=NUM_TOKENS)
MID_STREAM = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """All compute in bfloat16 with transformers' modules, whose rounding depends on the batch; P
    with other threads than D.
    """
    with Cluster(
        model=MODEL,
        log_dir=tmp_path_factory.mktemp("logs"),
        prefill=1,
        flags={"model-impl": "transformers", "dtype": "bfloat16"},
        prefill_flags={"num-threads": 2},
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    token_ids: list[int] = AutoTokenizer.from_pretrained(MODEL)(TEXT)["input_ids"]
    return token_ids


@pytest.mark.parametrize("case", [None, Case("mid_stream", "restart", "decode", MID_STREAM)])
def test_greedy_tokens_are_nearly_the_best(
    cluster: Cluster, prompt: list[int], hf_model: Callable[..., Any], case: Case | None
) -> None:
    answer = ask(cluster, prompt, case)
    assert not answer.errors
    assert answer.metrics.determinism == "consistent"
    assert len(answer.token_ids) == NUM_TOKENS
    exact = logits_of(hf_model(MODEL, "float32"), prompt, answer.token_ids)
    rounded = logits_of(hf_model(MODEL, "bfloat16"), prompt, answer.token_ids)
    # The best and the chosen one may each be off by as much as bfloat16 is from float32.
    margin = 2 * (exact - rounded).abs().max()
    best_two = exact.topk(2).values
    chosen = exact[range(NUM_TOKENS), answer.token_ids]
    assert (best_two[:, 0] - chosen).max() <= margin
    # So the margin tells wrong tokens: mostly even the second best is one.
    assert (best_two[:, 0] - best_two[:, 1]).median() > margin


def ask(cluster: Cluster, prompt: list[int], case: Case | None) -> Answer:
    with restored(cluster), Asker(cluster.addresses) as asker:
        wait_until_handing_off(cluster, asker)
        if case is None:
            return asker.ask(prompt, GREEDY)
        (answer,) = run_case(cluster, asker, case, [(prompt, GREEDY)], deadline_s=DEADLINE_S)
        assert answer.metrics.num_redrives > 0
        return answer


def logits_of(model: Any, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """Return what the model computes for each of the answer's tokens, fp32 [tokens, vocabulary]."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0].float()
    return logits[len(prompt) - 1 : -1]
