"""What clients say that an answer may be like, and what came of tokens that were guessed."""

import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import DraftStats
from pdserve_router.requests.input.request_limits import MAX_CONTENT_PARTS
from support.fake_worker import Running, decode

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Who is it, in the garden of the house?"}]}
STATS = (
    DraftStats(source="prediction", num_draft_tokens=5, num_accepted_tokens=3),
    DraftStats(source="suffix", num_draft_tokens=4, num_accepted_tokens=1),
)


STACK = {"http": True}


def content(value: object) -> dict:
    return {"type": "content", "content": value}


async def post(http, prediction: object) -> dict:
    response = await http.post(CHAT, json={**BODY, "prediction": prediction})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (None, ""),
        (content("Mia found a kite."), "Mia found a kite."),
        (content([]), ""),
        (content([{"type": "text", "text": "Mia "}, {"type": "text", "text": "Theo"}]), "Mia Theo"),
    ],
)
async def test_a_prediction_is_tokenized_for_the_worker_that_decodes(
    http, stack, tokenizer, prediction, text
) -> None:
    await post(http, prediction)
    token_ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert stack.decode.requests[-1].prediction_token_ids == tuple(token_ids)
    assert [request.prediction_token_ids for request in stack.prefill.requests] == [()]


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        (5, "prediction"),
        ({}, "prediction.type"),
        ({"type": "tokens", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        (content([{"type": "image_url"}]), "prediction.content"),
        (content([{"type": "text"}]), "prediction.content"),
        (content([{"type": "text", "text": ""}] * (MAX_CONTENT_PARTS + 1)), "prediction.content"),
        (content("kite " * 100_000), "prediction"),
    ],
)
async def test_a_wrong_prediction_is_refused(http, stack, prediction, field) -> None:
    response = await http.post(CHAT, json={**BODY, "prediction": prediction})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert not stack.decode.requests


async def with_drafts(running: Running) -> None:
    emit = running.emit
    running.emit = lambda *tokens, **fields: emit(*tokens, draft_stats=STATS, **fields)
    running.worker.step_s = 0.01
    await decode(running)


async def test_usage_counts_guesses(http, stack) -> None:
    stack.decode.behave = with_drafts
    usage = (await post(http, content("Mia")))["usage"]
    details = usage["completion_tokens_details"]
    num_outputs = details["accepted_prediction_tokens"] // 3
    assert num_outputs > 1
    assert details["rejected_prediction_tokens"] == 2 * num_outputs
    request = pb2.GenerateRequest(text="hello " * 40, prediction="hello")
    outputs = [response.output async for response in stack.stub.Generate(request)]
    usage = outputs[-1].usage
    assert usage.num_draft_tokens == 9 * num_outputs
    assert usage.num_accepted_tokens == 4 * num_outputs
    assert usage.num_prediction_draft_tokens == 5 * num_outputs
    assert usage.num_accepted_prediction_tokens == 3 * num_outputs
