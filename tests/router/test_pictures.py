"""Pictures in requests: over HTTP and gRPC to the workers that need them, in time, and again to
those that come in their place.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pdserve_client.client import build_request
from pdserve_common.errors import OverloadedError
from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.text.parts import Picture
from pdserve_router.text.picture_processor import PictureProcessor
from support.fake_worker import Running
from support.models import IMAGE_TOKEN_ID, LLAVA, NUM_IMAGE_TOKENS
from support.picture_files import data_url, encoded, make_picture, picture_part
from support.router_stack import Stack, StartStack, tokens_of
from support.waiting import until

ANSWER = (70, 71, 72, 73)
RED, BLUE = (encoded(make_picture(50, 40, seed=seed)) for seed in (1, 2))
CHAT = "/v1/chat/completions"


@pytest.fixture
def model(make_served_model: Callable[..., Path]) -> str:
    return str(make_served_model(LLAVA))


@pytest.fixture
async def open_stack(start_stack: StartStack, model: str) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[Stack]:
        info = {"modalities": ("image",), **options.pop("info", {})}
        settings = {"model": model, "served_model_name": "tiny", "answer": ANSWER, **options}
        async with start_stack(info=info, **settings) as stack:
            yield stack
            await stack.assert_idle()
            assert not len(stack.server.pool.tensors)

    return start


@pytest.fixture
async def stack(open_stack: Callable[..., Any]) -> AsyncIterator[Stack]:
    async with open_stack(http=True) as stack:
        yield stack


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def body(*parts: dict[str, Any], role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}], "max_tokens": 4, **fields}


def pixels_of(model: str, *files: bytes) -> list[bytes]:
    processor = PictureProcessor.from_folder(model)
    assert processor is not None
    return [processor.process(Picture(data, ""))[1] for data in files]


def check_placed(request: EngineCoreRequest, num_pictures: int) -> None:
    """Each picture stands where its tokens are, and nowhere else."""
    places = [
        position
        for feature in request.mm_features
        for position in range(feature.position, feature.position + feature.length)
    ]
    assert len(places) == num_pictures * NUM_IMAGE_TOKENS
    tokens = enumerate(request.prompt_token_ids)
    assert places == [position for position, token_id in tokens if token_id == IMAGE_TOKEN_ID]


async def test_both_workers_get_the_pictures_of_a_chat(
    stack: Stack, http: httpx.AsyncClient, model: str
) -> None:
    parts = (picture_part(RED), text_part("and"), picture_part(BLUE, detail="high"))
    answer = await http.post(CHAT, json=body(*parts))
    assert answer.status_code == 200, answer.text
    for worker in stack.workers:
        (request,) = worker.requests
        check_placed(request, 2)
        assert worker.tensors_of(request) == pixels_of(model, RED, BLUE)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(stack.prefill.requests[0].prompt_token_ids)
    assert stack.metric("pdserve_pictures_total") == 2
    assert stack.metric("pdserve_large_requests_total", outcome="done") == 1


async def test_grpc_takes_pictures_as_bytes(stack: Stack, model: str) -> None:
    message = {"role": "user", "parts": [{"text": "Look: "}, {"picture": RED}]}
    request = build_request([message], SamplingParams(max_tokens=4))
    assert tokens_of(await stack.generate(request)) == list(ANSWER)
    (sent,) = stack.decode.requests
    check_placed(sent, 1)
    assert stack.decode.tensors_of(sent) == pixels_of(model, RED)


async def test_one_picture_of_several_completions_is_put_once(stack: Stack) -> None:
    puts = 0

    async def count() -> None:
        nonlocal puts
        puts += 1

    stack.decode.before_put = count
    stack.decode.tensors.lease_s = 3600.0
    message = {"role": "user", "parts": [{"picture": RED}, {"picture": RED}]}
    params = SamplingParams(n=3, max_tokens=4, temperature=1.0)
    await stack.generate(build_request([message], params))
    await stack.generate(build_request([message], params))
    assert puts == 1
    assert all(stack.decode.tensors_of(request) for request in stack.decode.requests)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "fetched": (
        body({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}),
        "messages[0].content[0].image_url.url",
        "nothing is fetched from elsewhere",
    ),
    "gif": (
        body({"type": "image_url", "image_url": {"url": data_url(b"GIF89a", "gif")}}),
        "messages[0].content[0].image_url.url",
        "must be data:image/png",
    ),
    "no base64": (
        body({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}),
        "messages[0].content[0].image_url.url",
        "is not valid base64",
    ),
    "no picture": (
        body(text_part("a"), picture_part(b"text")),
        "messages[0].content[1].image_url.url",
        "is no picture that can be read",
    ),
    "a string": (
        body({"type": "image_url", "image_url": data_url(RED)}),
        "messages[0].content[0].image_url",
        "must be an object with a url",
    ),
    "detail": (
        body(picture_part(RED, detail="huge")),
        "messages[0].content[0].image_url.detail",
        "must be one of auto, low, high",
    ),
    "role": (
        body(picture_part(RED), role="system"),
        "messages[0].content",
        "only a user shows any",
    ),
    "too many": (
        body(*[picture_part(RED)] * 9),
        "messages[0].content[8].image_url.url",
        "has 9 pictures, at most 8 (max_images_per_prompt)",
    ),
    "cut": (
        body(picture_part(RED), truncate_prompt_tokens=5),
        "truncate_prompt_tokens",
        "a part of a picture is none",
    ),
    "token": (
        body(picture_part(RED), text_part("<image>")),
        "messages",
        "has 2 tokens that stand for pictures (258) and 1 pictures",
    ),
}


async def test_a_picture_that_is_not_taken_is_refused_by_its_field(
    http: httpx.AsyncClient, stack: Stack
) -> None:
    """All with one router: its process for pictures takes seconds to start."""
    for request, field, expected in REFUSED.values():
        answer = await http.post(CHAT, json=request)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), error
        assert expected in error["message"]
    assert not stack.decode.requests


async def test_grpc_refuses_what_http_does(stack: Stack) -> None:
    for message, expected in (
        ({"role": "user", "parts": [{"picture": b"text"}]}, "messages[0].parts[0] is no picture"),
        ({"role": "user", "parts": [{}]}, "messages[0].parts[0] is empty"),
        ({"role": "user", "content": "a", "parts": [{"text": "b"}]}, "are both set"),
        ({"role": "system", "parts": [{"picture": RED}]}, "only a user shows any"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stack.generate(build_request([message]))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert expected in error.value.details()


async def test_pictures_that_do_not_fit_are_not_decoded(open_stack: Callable[..., Any]) -> None:
    async with open_stack(http=True, info={"max_model_len": 30}) as stack:
        answer = await stack.api.post(CHAT, json=body(*[picture_part(b"no picture")] * 2))
        assert answer.json()["error"]["param"] == "prompt"
        assert "at most 29 fit" in answer.json()["error"]["message"]


async def test_models_of_text_refuse_pictures(
    start_stack: StartStack, open_stack: Callable[..., Any]
) -> None:
    """The router's model takes none, or its workers."""
    for start in (start_stack, lambda **options: open_stack(info={"modalities": ()}, **options)):
        async with start(http=True) as stack:
            answer = await stack.api.post(CHAT, json=body(picture_part(RED)), timeout=300)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, REFUSED["fetched"][1])
            assert "the model takes only text" in error["message"]


async def test_texts_cannot_stand_for_pictures(http: httpx.AsyncClient, stack: Stack) -> None:
    for prompt in ("a <image>", [5, IMAGE_TOKEN_ID]):
        answer = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        assert answer.json()["error"]["param"] == "prompt"
    answer = await http.post("/v1/completions", json={"prompt": "plain text", "max_tokens": 1})
    assert answer.status_code == 200
    assert stack.prefill.tensors.num_bytes == 0


async def test_tokenize_counts_the_tokens_of_pictures(
    http: httpx.AsyncClient, stack: Stack
) -> None:
    messages = body(picture_part(RED), text_part("b"))["messages"]
    answer = await http.post("/tokenize", json={"messages": messages})
    assert answer.json()["tokens"].count(IMAGE_TOKEN_ID) == NUM_IMAGE_TOKENS
    await stack.generate(
        build_request([{"role": "user", "parts": [{"picture": RED}, {"text": "b"}]}])
    )
    assert answer.json()["tokens"] == list(stack.prefill.requests[0].prompt_token_ids)


async def test_a_request_that_goes_on_elsewhere_has_its_pictures_there(
    open_stack: Callable[..., Any], model: str
) -> None:
    async with open_stack(decode=2) as stack:
        stopping: list[asyncio.Future[None]] = []

        async def die_half_way(running: Running, num_tokens: int) -> None:
            if num_tokens == 3 and not running.num_resumed:
                stopping.append(asyncio.ensure_future(running.worker.stop()))
                await asyncio.Event().wait()

        for worker in stack.decodes:
            worker.before_token = die_half_way
        message = {"role": "user", "parts": [{"picture": RED}]}
        outputs = await stack.generate(build_request([message], SamplingParams(max_tokens=4)))
        assert tokens_of(outputs) == list(ANSWER)
        await stopping[0]
        (last,) = [w for w in stack.decodes if w.requests and w.requests[-1].attempt]
        assert last.tensors_of(last.requests[-1]) == pixels_of(model, RED)


async def test_a_worker_without_room_is_asked_again(
    open_stack: Callable[..., Any],
) -> None:
    async with open_stack() as stack:
        refusals = iter([OverloadedError("no room"), OverloadedError("no room")])

        async def refuse_twice() -> None:
            if (error := next(refusals, None)) is not None:
                raise error

        stack.decode.before_put = refuse_twice
        message = {"role": "user", "parts": [{"picture": RED}]}
        outputs = await stack.generate(build_request([message], SamplingParams(max_tokens=4)))
        assert tokens_of(outputs) == list(ANSWER)
        assert next(refusals, None) is None


async def test_a_put_that_hangs_holds_up_nobody_else(open_stack: Callable[..., Any]) -> None:
    async with open_stack() as stack:
        held = asyncio.Event()
        stack.decode.before_put = held.wait
        message = {"role": "user", "parts": [{"picture": RED}]}
        request = build_request([message], SamplingParams(max_tokens=4))
        call = stack.stub.Generate(request, timeout=300)
        await until(lambda: bool(stack.prefill.requests))
        text = build_request("text", SamplingParams(max_tokens=4))
        assert tokens_of(await stack.generate(text, timeout=300)) == list(ANSWER)
        # What nobody waits for any more is not sent.
        call.cancel()
        await until(lambda: stack.server.router.num_in_flight == 0)
        held.set()
        await until(lambda: stack.decode.tensors.num_bytes > 0)
        assert [r.mm_features for r in stack.decode.requests] == [()]


async def test_pictures_of_running_requests_have_a_bound(
    stack: Stack, http: httpx.AsyncClient, model: str
) -> None:
    """Of all together; one that several show counts once, and the end of one makes room."""
    (pixels,) = pixels_of(model, RED)
    stack.server.pool.tensors._max_bytes = len(pixels)
    may_go_on = asyncio.Event()
    stack.decode.before_token = lambda running, num_tokens: may_go_on.wait()
    running = [asyncio.create_task(http.post(CHAT, json=body(picture_part(RED)))) for _ in "ab"]
    await until(lambda: len(stack.decode.requests) == 2)
    refused = await http.post(CHAT, json=body(picture_part(BLUE)))
    assert refused.status_code == 429
    assert "max_held_tensor_bytes" in refused.json()["error"]["message"]
    may_go_on.set()
    assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
    assert (await http.post(CHAT, json=body(picture_part(BLUE)))).status_code == 200


async def test_a_defect_of_a_put_ends_the_request(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("pdserve_router.workers.clients.tensor_client._messages", fail)
    answer = await http.post(CHAT, json=body(picture_part(RED)))
    assert answer.status_code == 503, answer.text
