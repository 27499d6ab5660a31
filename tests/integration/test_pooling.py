"""Models that pool, served by real stacks: a router and prefill services alone."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import AutoTokenizer

from pdserve_client.client import Client
from support.pooling_models import hf_labels, hf_states
from support.stack import StartStack

TEXTS = ["the quick brown fox", "hello world", "a lazy dog sleeps over there all day long"]
CLOSE = {"abs": 2e-5}
MakeModel = Callable[..., Path]


def tokens_of(model: Path, *texts: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(model)(*texts)["input_ids"]
    return ids


def embedding(model: Path, text: str) -> list[float]:
    """What transformers' model and Sentence-Transformers' last-token pooling make of a text."""
    state = hf_states(model, tokens_of(model, text))[-1]
    vector: list[float] = torch.nn.functional.normalize(state, dim=0).tolist()
    return vector


def test_embeddings_are_those_of_transformers(
    make_served_model: MakeModel, start_stack: StartStack
) -> None:
    model = make_served_model("Qwen3Model")
    with start_stack(model=model, dtype="float32", num_threads=1) as stack:
        assert [worker.name for worker in stack.workers] == ["prefill-0"]
        with Client(stack.grpc_address) as client:
            for text in TEXTS:
                assert client.embed(text) == pytest.approx(embedding(model, text), **CLOSE)
            (served,) = client.list_models()
            assert (list(served.tasks), served.embedding_size) == (
                ["embed"],
                len(embedding(model, TEXTS[0])),
            )
            with pytest.raises(Exception, match="the model serves embed"):
                list(client.generate("hello"))
        url = f"http://127.0.0.1:{stack.http_port}"
        sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = sdk.embeddings.create(model=served.id, input=TEXTS)
        for item, text in zip(answer.data, TEXTS, strict=True):
            assert item.embedding == pytest.approx(embedding(model, text), **CLOSE)
        body = {"query": TEXTS[0], "documents": TEXTS}
        ranking = httpx.post(f"{url}/v1/rerank", json=body, timeout=60).json()
        first, *_ = ranking["results"]
        assert first["index"] == 0
        assert first["relevance_score"] == pytest.approx(1)
        one, other = (torch.tensor(embedding(model, text)) for text in TEXTS[:2])
        scores = {each["index"]: each["relevance_score"] for each in ranking["results"]}
        assert scores[1] == pytest.approx(float(one @ other), **CLOSE)
        command = [sys.executable, "-m", "pdserve_client", "embed", "--address"]
        done = subprocess.run(
            [*command, stack.grpc_address, *TEXTS[:2]], capture_output=True, check=True, timeout=60
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        for vector, text in zip(lines, TEXTS[:2], strict=True):
            assert vector == pytest.approx(embedding(model, text), **CLOSE)


def test_pairs_are_scored_as_transformers_does(
    make_served_model: MakeModel, start_stack: StartStack
) -> None:
    model = make_served_model("Qwen3ForSequenceClassification", num_labels=1, pad_token_id=0)
    pairs = [(TEXTS[0], text) for text in TEXTS]
    expected = [
        torch.sigmoid(hf_labels(model, tokens_of(model, *pair)))[0].item() for pair in pairs
    ]
    with start_stack(model=model, dtype="float32", num_threads=1) as stack:
        url = f"http://127.0.0.1:{stack.http_port}"
        body = {"text_1": TEXTS[0], "text_2": TEXTS}
        answer = httpx.post(f"{url}/score", json=body, timeout=60).json()
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected, **CLOSE)
        with Client(stack.grpc_address) as client:
            for pair, score in zip(pairs, expected, strict=True):
                (found,) = client.pool(pair, "score").pooling_output
                assert found == pytest.approx(score, **CLOSE)


def test_classes_are_those_of_transformers(
    make_served_model: MakeModel, start_stack: StartStack
) -> None:
    model = make_served_model("LlamaForSequenceClassification", num_labels=3, pad_token_id=0)
    with start_stack(model=model, dtype="float32", num_threads=1) as stack:
        url = f"http://127.0.0.1:{stack.http_port}/classify"
        answer = httpx.post(url, json={"input": TEXTS}, timeout=60).json()
        for item, text in zip(answer["data"], TEXTS, strict=True):
            probs = hf_labels(model, tokens_of(model, text)).softmax(0).tolist()
            assert item["probs"] == pytest.approx(probs, **CLOSE)
            best = max(range(3), key=probs.__getitem__)
            assert item["label"] == f"LABEL_{best}"


def test_a_lost_worker_costs_no_input(
    make_served_model: MakeModel, start_stack: StartStack
) -> None:
    model = make_served_model("Qwen3Model")
    fields = {"model": model, "dtype": "float32", "num_threads": 1, "prefill": 2}
    texts = [f"{TEXTS[number % 3]} {number}" for number in range(200)]
    with start_stack(is_to_survive=False, **fields) as stack:
        killer = threading.Timer(0.2, stack.kill_process, ("prefill-0",))
        killer.start()
        url = f"http://127.0.0.1:{stack.http_port}/v1/embeddings"
        for _ in range(3):
            answer = httpx.post(url, json={"input": texts}, timeout=120)
            assert answer.status_code == 200, answer.text
        killer.join()
        data = answer.json()["data"]
        assert len(data) == len(texts)
        for index in (0, 101, 199):
            expected = embedding(model, texts[index])
            assert data[index]["embedding"] == pytest.approx(expected, **CLOSE)
