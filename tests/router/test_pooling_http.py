"""Vectors, classes and scores over HTTP: OpenAI's embeddings, vLLM's and Cohere's scores."""

import asyncio
import base64
import json
import struct

import numpy as np
import openai
import pytest
from tokenizers.processors import TemplateProcessing

from pdserve_common.types.engine import ErrorCode
from pdserve_router.api.openai.fields import REFUSED_IN_POOLING, REFUSED_IN_RERANK, WITHOUT_EFFECT
from pdserve_router.api.pooling.answer import (
    EmbeddingsAnswer,
    PoolingAnswer,
    RerankAnswer,
    frame_of,
)
from pdserve_router.api.pooling.batch import MAX_AT_ONCE
from pdserve_router.api.pooling.endpoint import POOLING_PATHS
from pdserve_router.requests.input.request_limits import (
    MAX_POOLED_INPUTS,
    MAX_POOLED_NUMBERS,
    MAX_POOLED_TOKENS,
)
from pdserve_router.requests.output.outputs import Usage
from pdserve_router.text.served_model import labels_of
from pdserve_router.text.tokenizer import Cut, Tokenizer, shares_of
from support.fake_worker import EMBEDDER, all_behave, hang, pool, vector_of
from support.fake_worker import EMBEDDER_SIZE as SIZE
from support.waiting import until

CLASSIFIER = {**EMBEDDER, "tasks": ("classify",), "embedding_size": 3, "is_matryoshka": False}
SCORER = {**CLASSIFIER, "tasks": ("classify", "score"), "embedding_size": 1}
BODIES = {
    "/v1/embeddings": {"input": "hello"},
    "/pooling": {"input": "hello"},
    "/classify": {"input": "hello"},
    "/score": {"text_1": "hello", "text_2": "world"},
    "/rerank": {"query": "hello", "documents": ["world", "a fox"]},
}
SERVED = {"/classify": CLASSIFIER}


STACK = {"prefill": 2, "decode": 0, "info": EMBEDDER, "http": True}


def sent(stack) -> list:
    return [each for worker in stack.workers for each in worker.requests]


def of_text(stack, tokenizer, *texts: str):
    """The request of a text, or of a pair."""
    ids = tuple(tokenizer.backend.encode(*texts).ids)
    return next(each for each in sent(stack) if each.prompt_token_ids == ids)


def vector(stack, tokenizer, text: str) -> list[float]:
    return vector_of(of_text(stack, tokenizer, text), SIZE)


async def refusal_of(http, path: str, body: object, *, status: int = 400) -> dict:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await http.post(path, content=raw)
    assert response.status_code == status, response.text
    return response.json()["error"]


# ---- embeddings


async def test_embeddings_through_openais_client(client, stack, tokenizer) -> None:
    """It asks for base64 by itself."""
    for encoding_format in (openai.NOT_GIVEN, "float", "base64"):
        texts = ["hello", "a fox", "hello world"]
        answer = await client.embeddings.create(
            model="tiny", input=texts, encoding_format=encoding_format, user="ann"
        )
        assert [item.index for item in answer.data] == [0, 1, 2]
        for item, text in zip(answer.data, texts, strict=True):
            found = item.embedding
            if isinstance(found, str):
                data = base64.b64decode(found)
                found = list(struct.unpack(f"<{len(data) // 4}f", data))
            assert found == vector(stack, tokenizer, text)
        tokens = sum(len(tokenizer.backend.encode(text).ids) for text in texts)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
        assert (answer.model, answer.object) == ("tiny", "list")


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("hello", None),
        (["hello"], None),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6, 7], [8]], [(5, 6, 7), (8,)]),
        ([[5, 6], "hello"], None),
    ],
)
async def test_inputs_have_four_forms(http, stack, tokenizer, value, prompts) -> None:
    response = await http.post("/v1/embeddings", json={"input": value})
    answer = response.json()
    assert response.status_code == 200, answer
    hello = tuple(tokenizer.backend.encode("hello").ids)
    prompts = prompts or [(5, 6), hello] if len(value) == 2 else prompts or [hello]
    by_prompt = {each.prompt_token_ids: each for each in sent(stack)}
    assert by_prompt.keys() == set(prompts)
    assert answer["data"] == [
        {
            "object": "embedding",
            "index": i,
            "embedding": vector_of(by_prompt[prompt], SIZE),
        }
        for i, prompt in enumerate(prompts)
    ]


async def test_fields_of_an_embedding_arrive(http, stack) -> None:
    body = {
        "input": [[5, 6, 7, 8]],
        "dimensions": 2,
        "use_activation": False,
        "truncate_prompt_tokens": 3,
        "truncation_side": "left",
        "priority": 4,
        "cache_salt": "mine",
        "request_id": "named",
    }
    response = await http.post("/v1/embeddings", json=body)
    (core,) = sent(stack)
    assert core.prompt_token_ids == (6, 7, 8)
    params = core.task.pooling_params
    assert (params.task, params.dimensions, params.use_activation) == ("embed", 2, False)
    assert (core.priority, core.cache_salt, core.external_req_id) == (4, "mine", "named")
    assert response.headers["x-request-id"] == "named"
    assert response.headers["pdserve-path"] == "pooling"
    assert response.json()["id"] == "embd-named"
    assert len(response.json()["data"][0]["embedding"]) == 2


async def test_many_inputs_run_some_at_a_time_and_come_in_order(http, stack, tokenizer) -> None:
    most = 0

    async def counted(running, num_tokens: int) -> None:
        nonlocal most
        most = max(most, sum(worker.num_running for worker in stack.workers))
        # Those that began first end last.
        await asyncio.sleep(0.02 if len(sent(stack)) < 10 else 0)

    for worker in stack.workers:
        worker.before_token = counted
    inputs = [[5 + number % 100, 5 + number // 100] for number in range(300)]
    response = await http.post("/v1/embeddings", json={"input": inputs})
    assert response.status_code == 200, response.text
    assert 2 < most <= MAX_AT_ONCE
    by_prompt = {each.prompt_token_ids: each for each in sent(stack)}
    for index, item in enumerate(response.json()["data"]):
        assert item["index"] == index
        assert item["embedding"] == vector_of(by_prompt[tuple(inputs[index])], SIZE)
    assert stack.metric("pdserve_pooling_requests_total", task="embed", outcome="stop") == 300
    # Those that wait for others of their own request are not in the router's queue.
    assert len(inputs) > MAX_AT_ONCE


async def test_others_have_a_turn_between_two_inputs(http, stack, monkeypatch) -> None:
    turn = 0
    taken, followed = [], []
    take, follow = EmbeddingsAnswer.take, stack.server.router.follow

    async def count() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    def noted_take(answer, index, vector) -> None:
        taken.append(turn)
        take(answer, index, vector)

    def noted_follow(processed, begun, slots):
        followed.append(turn)
        return follow(processed, begun, slots)

    monkeypatch.setattr(EmbeddingsAnswer, "take", noted_take)
    monkeypatch.setattr(stack.server.router, "follow", noted_follow)
    counting = asyncio.create_task(count())
    response = await http.post("/v1/embeddings", json={"input": [[5]] * 3 * MAX_AT_ONCE})
    counting.cancel()
    assert response.status_code == 200, response.text
    assert (len(taken), len(followed)) == (3 * MAX_AT_ONCE, 2 * MAX_AT_ONCE)
    assert len(set(taken)) == len(taken)
    assert len(set(followed)) == len(followed)


NUM_LARGE = 1000


def large_embeddings() -> PoolingAnswer:
    return EmbeddingsAnswer(NUM_LARGE, is_base64=False)


def large_ranking() -> PoolingAnswer:
    documents = ["x" * 2000] * NUM_LARGE
    return RerankAnswer(NUM_LARGE, None, documents=documents, top_n=None, returns_documents=True)


@pytest.mark.parametrize(
    ("make_answer", "min_turns"), [(large_embeddings, 2), (large_ranking, NUM_LARGE)]
)
async def test_others_have_a_turn_while_a_large_answer_is_written(make_answer, min_turns) -> None:
    answer = make_answer()
    for index in range(NUM_LARGE):
        answer.take(index, [0.5] * 1000)
    usage = Usage(num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=0)
    writing = asyncio.create_task(answer.body(frame_of(answer, "a", "tiny"), usage))
    num_turns = 0
    while not writing.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns >= min_turns
    content = json.loads(writing.result())
    assert len(content.get("data") or content["results"]) == NUM_LARGE
    assert content["usage"]["prompt_tokens"] == 3


async def test_one_failure_is_the_requests(http, stack) -> None:
    async def picky(running) -> None:
        if running.request.prompt_token_ids == (9,):
            running.fail(ErrorCode.INVALID_ARGUMENT, "not nine")
        else:
            await (hang if running.request.prompt_token_ids == (8,) else pool)(running)

    all_behave(stack.workers, picky)
    inputs = [[8], *([number] for number in range(10, 120)), [9]]
    error = await refusal_of(http, "/v1/embeddings", {"input": inputs})
    assert error["message"] == "not nine"


async def test_a_client_that_leaves_ends_all_inputs(stack) -> None:
    all_behave(stack.workers, hang)
    body = {"input": [[number] for number in range(5, 205)]}
    pending = asyncio.ensure_future(stack.api.post("/v1/embeddings", json=body))
    await until(lambda: len(sent(stack)) == MAX_AT_ONCE)
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    await stack.assert_idle()
    assert len(sent(stack)) == MAX_AT_ONCE
    aborted = {request_id for worker in stack.workers for request_id in worker.aborted}
    assert aborted == {each.request_id for each in sent(stack)}


async def test_the_queue_has_its_limit(start_stack) -> None:
    async with start_stack(
        prefill=1, decode=0, info=EMBEDDER, http=True, max_num_queued_requests=2
    ) as stack:
        stack.prefill.behave = hang
        pending = asyncio.ensure_future(
            stack.api.post("/v1/embeddings", json={"input": [[5], [6]]})
        )
        await until(lambda: len(sent(stack)) == 2)
        await refusal_of(stack.api, "/v1/embeddings", {"input": "x"}, status=429)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)


async def test_more_inputs_than_may_wait_follow_one_another(start_stack) -> None:
    async with start_stack(
        prefill=1, decode=0, info=EMBEDDER, http=True, max_num_queued_requests=3
    ) as stack:
        most = 0

        async def counted(running, num_tokens: int) -> None:
            nonlocal most
            most = max(most, stack.server.router.num_queued)

        stack.prefill.before_token = counted
        response = await stack.api.post("/v1/embeddings", json={"input": [[5]] * 20})
        assert response.status_code == 200, response.text
        assert len(response.json()["data"]) == 20
        assert most <= 3


# ---- limits, and what is wrong


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": None}, "input"),
        ("/v1/embeddings", {"input": 5}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [""]}, "input[0]"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", [5, "b"]]}, "input[1]"),
        ("/v1/embeddings", {"input": ["a", []]}, "input[1]"),
        ("/v1/embeddings", {"input": {"text": "a"}}, "input"),
        ("/v1/embeddings", {"input": [True]}, "input"),
        ("/v1/embeddings", {"input": [10**6]}, "input"),
        ("/v1/embeddings", {"input": [[5], [-1]]}, "input[1]"),
        ("/v1/embeddings", {"input": [[5] * 4097]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": "2"}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "up"}, "truncation_side"),
        ("/v1/embeddings", {"input": "a", "priority": 2**31}, "priority"),
        ("/v1/embeddings", {"input": "a", "cache_salt": ""}, "cache_salt"),
        ("/v1/embeddings", {"input": "a", "request_id": "é"}, "request_id"),
        ("/v1/embeddings", {"input": ["x"] * (MAX_POOLED_INPUTS + 1)}, "input"),
        ("/pooling", {"input": "a", "task": "generate"}, "task"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/classify", {"input": "a"}, "task"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ("/score", {"text_1": 5, "text_2": "a"}, "text_1"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/rerank", {"query": "", "documents": ["b"]}, "query[0]"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(http, stack, path, body, param) -> None:
    error = await refusal_of(http, path, body)
    assert error["param"] == param, error
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_argument")
    assert not sent(stack)


async def test_a_document_says_its_text(http) -> None:
    for document in ({"title": "b"}, 5, None, ["b"]):
        error = await refusal_of(http, "/rerank", {"query": "a", "documents": [document]})
        assert error["param"].startswith("documents[0]")


async def test_what_a_request_holds_is_bounded(http, stack) -> None:
    half = [5] * 4096
    number = MAX_POOLED_TOKENS // 4096
    error = await refusal_of(http, "/v1/embeddings", {"input": [half] * (number + 1)})
    assert error["param"] == f"input[{number}]"
    assert str(MAX_POOLED_TOKENS) in error["message"]
    # A query stands in the body once, and in each pair.
    body = {"query": "x" * 30_000, "documents": ["y"] * 1000}
    error = await refusal_of(http, "/rerank", body)
    assert error["param"] == "documents"
    error = await refusal_of(
        http, "/v1/embeddings", b'{"input":"' + b"x" * (9 << 20) + b'"}', status=413
    )
    assert not sent(stack)


async def test_the_numbers_of_an_answer_are_bounded(start_stack) -> None:
    size = MAX_POOLED_NUMBERS // 2
    info = {**EMBEDDER, "embedding_size": size}
    async with start_stack(prefill=1, decode=0, info=info, http=True) as stack:
        error = await refusal_of(stack.api, "/v1/embeddings", {"input": ["a", "b", "c"]})
        assert str(3 * size) in error["message"]
        body = {"input": ["a", "b", "c"], "dimensions": 2}
        assert (await stack.api.post("/v1/embeddings", json=body)).status_code == 200


async def test_large_bodies_are_tokenized_beside_the_event_loop(http, stack) -> None:
    body = {"input": ["the quick brown fox " * 40] * 200}
    response = await http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    body = {"query": "the quick brown fox " * 20, "documents": [f"fox {i}" for i in range(300)]}
    assert (await http.post("/rerank", json=body)).status_code == 200
    assert stack.metric("pdserve_large_requests_total", outcome="done") == 2


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_unserved_and_unknown_fields(start_stack, path) -> None:
    refused = REFUSED_IN_POOLING | (REFUSED_IN_RERANK if path == "/rerank" else {})
    async with start_stack(
        prefill=1, decode=0, info=SERVED.get(path, EMBEDDER), http=True
    ) as stack:
        for name, nothing in refused.items():
            for value in nothing:
                response = await stack.api.post(path, json={**BODIES[path], name: value})
                assert response.status_code == 200, (name, value, response.text)
            error = await refusal_of(stack.api, path, {**BODIES[path], name: {"x": 1}})
            assert error["param"] == name
        free = {name: [1] for name in WITHOUT_EFFECT}
        assert (await stack.api.post(path, json={**BODIES[path], **free})).status_code == 200
        assert (await stack.api.post(path, json={**BODIES[path], "inputs": 1})).status_code == 200
        assert stack.metric("pdserve_http_unknown_fields_total", field="inputs") == 1


async def test_generation_is_refused_by_what_the_model_does(http, stack) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        error = await refusal_of(http, path, body)
        assert (error["param"], "serves embed" in error["message"]) == ("task", True)
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["tasks"], model["embedding_size"]) == (["embed"], SIZE)


async def test_vectors_of_a_model_that_generates_are_refused(start_stack) -> None:
    async with start_stack(http=True) as stack:
        for path, body in BODIES.items():
            error = await refusal_of(stack.api, path, body)
            assert (error["param"], "serves generate" in error["message"]) == ("task", True)


async def test_health_says_what_is_missing(start_stack) -> None:
    async with start_stack(prefill=1, decode=0, info=EMBEDDER, http=True) as stack:
        assert (await stack.api.get("/health")).status_code == 200
        await stack.prefill.stop()
        await until(lambda: not stack.server.router.is_ready)
        response = await stack.api.get("/health")
        assert response.status_code == 503
        assert "prefill worker" in response.json()["reason"]
        assert (await refusal_of(stack.api, "/v1/embeddings", {"input": "a"}, status=503))["code"]


# ---- classes, scores, rankings


async def test_classes_have_their_labels(start_stack, tmp_path, tokenizer, monkeypatch) -> None:
    (tmp_path / "config.json").write_text('{"id2label": {"0": "bad", "1": "good", "2": "odd"}}')
    labels = labels_of(str(tmp_path))
    monkeypatch.setattr("pdserve_router.server.labels_of", lambda folder: labels)
    async with start_stack(prefill=1, decode=0, info=CLASSIFIER, http=True) as stack:
        for path in ("/classify", "/v1/classify"):
            answer = (await stack.api.post(path, json={"input": ["hello", "a fox"]})).json()
            assert answer["object"] == "list"
            for item, text in zip(answer["data"], ("hello", "a fox"), strict=True):
                probs = vector_of(of_text(stack, tokenizer, text), 3)
                assert (item["probs"], item["num_classes"]) == (probs, 3)
                assert item["label"] == labels[int(np.argmax(probs))]
        await refusal_of(stack.api, "/score", BODIES["/score"])
        answer = (await stack.api.post("/pooling", json={"input": "hello"})).json()
        assert answer["data"][0]["data"] == vector_of(of_text(stack, tokenizer, "hello"), 3)


def cosine(one: list[float], other: list[float]) -> float:
    a, b = np.array(one), np.array(other)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


async def test_scores_of_embeddings_are_their_cosine(http, stack, tokenizer) -> None:
    first, second = ["hello", "hello world"], ["a fox", "hello"]
    for path in ("/score", "/v1/score"):
        answer = (await http.post(path, json={"text_1": first, "text_2": second})).json()
        assert [item["index"] for item in answer["data"]] == [0, 1]
        for item, pair in zip(answer["data"], zip(first, second, strict=True), strict=True):
            vectors = (vector(stack, tokenizer, text) for text in pair)
            assert item["score"] == pytest.approx(cosine(*vectors))
    answer = (await http.post("/score", json={"text_1": "hello", "text_2": "hello"})).json()
    assert answer["data"][0]["score"] == pytest.approx(1)
    # A text that comes twice is pooled once.
    tokens = len(tokenizer.backend.encode("hello").ids)
    assert answer["usage"]["total_tokens"] == tokens


async def test_scores_of_pairs_are_what_the_model_says(start_stack, model_dir, monkeypatch) -> None:
    tokenizer = Tokenizer(str(model_dir))
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|bos|> $A",
        pair="<|bos|> $A <|eos|> $B",
        special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)],
    )
    monkeypatch.setattr("pdserve_router.server.Tokenizer", lambda path, **options: tokenizer)
    async with start_stack(prefill=1, decode=0, info=SCORER, http=True) as stack:
        documents = ["a fox", "hello world", "the lazy dog"]
        answer = (
            await stack.api.post("/score", json={"text_1": "hello", "text_2": documents})
        ).json()
        scores = [item["score"] for item in answer["data"]]
        assert scores == [
            vector_of(of_text(stack, tokenizer, "hello", text), 1)[0] for text in documents
        ]
        assert {each.task.pooling_params.task for each in sent(stack)} == {"score"}
        body = {"query": "hello", "documents": documents, "top_n": 2}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            ranking = (await stack.api.post(path, json=body)).json()
            order = sorted(range(3), key=scores.__getitem__, reverse=True)[:2]
            assert ranking["results"] == [
                {"index": i, "document": {"text": documents[i]}, "relevance_score": scores[i]}
                for i in order
            ]
            assert ranking["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
        objects = [{"text": text, "id": 1} for text in documents]
        short = {"query": "hello", "documents": objects, "return_documents": False, "top_n": 0}
        ranking = (await stack.api.post("/rerank", json=short)).json()
        assert [item.keys() for item in ranking["results"]] == [{"index", "relevance_score"}] * 3


# ---- cutting


@pytest.mark.parametrize("sizes", [(10, 100), (100, 10), (100, 100), (30, 100), (3, 4), (50,)])
@pytest.mark.parametrize("room", [2, 3, 50, 51, 106])
def test_the_longer_text_is_cut_first(sizes, room) -> None:
    shares = shares_of(room, sizes)
    assert all(share <= size for share, size in zip(shares, sizes, strict=True))
    assert sum(shares) == min(room, sum(sizes))
    if len(sizes) == 2:
        # Nobody was cut below a half for the other.
        for share, size in zip(shares, sizes, strict=True):
            assert share >= min(size, room // 2)


@pytest.mark.parametrize("pair", [None, "hello world, this is a test of text"])
@pytest.mark.parametrize("keeps_end", [False, True])
async def test_texts_are_cut_as_transformers_does(model_dir, pair, keeps_end) -> None:
    tokenizer = Tokenizer(str(model_dir))
    special = [("<|bos|>", 0), ("<|eos|>", 1)]
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>", pair="<|bos|> $A <|eos|> $B <|eos|>", special_tokens=special
    )
    theirs = Tokenizer(str(model_dir)).backend
    theirs.post_processor = tokenizer.backend.post_processor
    text = "the quick brown fox jumps over the lazy dog"
    texts = (text,) if pair is None else (text, pair)
    whole = theirs.encode(*texts).ids
    assert await tokenizer.encode_pooled(*texts, max_tokens=100) == whole
    for most in range(5, len(whole) + 3):
        direction = "left" if keeps_end else "right"
        theirs.enable_truncation(most, strategy="longest_first", direction=direction)
        cut = Cut(most, keeps_end)
        ids = await tokenizer.encode_pooled(*texts, max_tokens=100, cut=cut)
        assert ids == theirs.encode(*texts).ids, most
    tokenizer.close()


def test_every_path_has_a_body_here() -> None:
    known = {path.removeprefix("/v1").removeprefix("/v2") for path in POOLING_PATHS}
    assert known == {path.removeprefix("/v1") for path in BODIES}


def test_labels_come_from_the_models_config(tmp_path) -> None:
    assert labels_of(str(tmp_path)) == {}
    (tmp_path / "config.json").write_text("{}")
    assert labels_of(str(tmp_path)) == {}
