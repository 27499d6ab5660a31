"""Answers that follow a grammar, through router, P, NIXL and D and on D alone."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import httpx
import jsonschema
import pytest
import regex
import tokenizers

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_common.types.engine import EngineCoreOutput, EngineCoreRequest, FinishReason, Generate
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_router.workers.clients.worker_client import WorkerClient
from support import hostile_grammars
from support.grammars import EOS, MODEL
from support.schemas import accepted_schemas
from support.stack import RunningStack, attached_worker

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mia", "Theo", "Oscar"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_happy": {"type": "boolean"},
    },
    "required": ["name", "age", "is_happy"],
    "additionalProperties": False,
}
PATTERN = "(Mia|Theo) [a-z]{3,9}( and [a-z]{2,9}){0,2}[.!]"
CHOICES = ("a kite", "a boat", "two cats")
NUM_SEEDS = 4
MAX_MODEL_LEN = 512
# Of one worker: for the longest answer, and little besides.
FEW_BLOCKS = 32
NUM_LONG = 4
NUM_STRANGERS = 40
WORDS = "One afternoon Mia found a kite in the garden and Theo a boat by the sea ."


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def check(constraint: StructuredOutputsParams, text: str) -> None:
    if constraint.json_schema is not None:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif constraint.regex is not None:
        assert regex.fullmatch(PATTERN, text), text
    else:
        assert text in CHOICES


CONSTRAINTS = (
    StructuredOutputsParams(json_schema=json.dumps(SCHEMA)),
    StructuredOutputsParams(regex=PATTERN),
    StructuredOutputsParams(choice=CHOICES),
)


@pytest.fixture(scope="module")
def stack(start_stack: Any) -> Iterator[RunningStack]:
    """Of two Ds the second has few blocks."""
    length = ("--max-model-len", str(MAX_MODEL_LEN))
    flags = {
        "prefill-0": length,
        "decode-0": length,
        "decode-1": (*length, "--num-blocks", str(FEW_BLOCKS)),
    }
    with start_stack(
        model=MODEL, num_threads=1, decode=2, max_num_batched_tokens=32, flags=flags
    ) as stack:
        yield stack


async def test_answers_follow_their_grammars_the_same_way_with_and_without_p(
    stack: RunningStack, start_router: Any, tokenizer: tokenizers.Tokenizer
) -> None:
    prompt = tokenizer.encode("One afternoon Mia found a kite in the garden. " * 4).ids
    async with (
        start_router(stack, prefill="prefill-0") as both,
        start_router(stack) as without_prefill,
    ):
        await both.until(1, "pdserve_worker_pairs", state="proven")

        async def ask(constraint: StructuredOutputsParams, seed: int) -> None:
            params = SamplingParams(
                temperature=0.0 if seed == 0 else 1.0,
                seed=seed,
                max_tokens=200,
                structured_outputs=constraint,
            )
            handed_over, _ = await both.ask(prompt, params)
            alone, _ = await without_prefill.ask(prompt, params, cache_salt="alone")
            assert handed_over == alone
            check(constraint, tokenizer.decode(handed_over))

        tasks = (ask(each, seed) for each in CONSTRAINTS for seed in range(NUM_SEEDS))
        await asyncio.gather(*tasks)
        await check_refusals(stack, both, prompt)
    stack.assert_idle()


async def check_refusals(stack: RunningStack, routed: Any, prompt: list[int]) -> None:
    asked = {
        "not": StructuredOutputsParams(json_schema='{"type": "object", "not": {}}'),
        "nowhere": StructuredOutputsParams(grammar="root ::= nowhere"),
    }
    for reason, constraint in asked.items():
        with pytest.raises((grpc.aio.AioRpcError, AssertionError), match=reason):
            await routed.ask(prompt, SamplingParams(structured_outputs=constraint))
    for name in ("prefill-0", "decode-0"):
        metrics = stack.metrics(name)
        # One for each constraint: answers of other seeds find it.
        assert metrics['pdserve_grammar_compilations_total{outcome="compiled"}'] == len(CONSTRAINTS)
        assert metrics["pdserve_requests_waiting_for_fsm"] == 0


async def test_over_http(start_stack: Any) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "child", "schema": SCHEMA}}
    question = "Who is it? " * 20
    bodies = {
        "completions": {"prompt": question, "max_tokens": 200},
        "chat/completions": {"messages": [{"role": "user", "content": question}]},
    }
    with start_stack(model=MODEL, num_threads=1, max_num_batched_tokens=32) as stack:
        url = f"http://127.0.0.1:{stack.http_port}/v1"
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:

            async def ask(path: str, seed: int, **constraint: object) -> str:
                body = {**bodies[path], "seed": seed, "temperature": 1.0, **constraint}
                response = await http.post(f"/{path}", json=body)
                assert response.status_code == 200, response.text
                (choice,) = response.json()["choices"]
                assert choice["finish_reason"] == "stop"
                text: str = choice["text"] if "text" in choice else choice["message"]["content"]
                return text

            for path in bodies:
                for text in await asyncio.gather(
                    *(ask(path, seed, response_format=named) for seed in range(NUM_SEEDS))
                ):
                    jsonschema.validate(json.loads(text), SCHEMA)
                assert await ask(path, 0, guided_choice=CHOICES) in CHOICES
        stack.assert_idle()


# ---- reasoning, as a client of engines asks for it


async def run_legs(
    request: EngineCoreRequest, d: WorkerClient, p: WorkerClient | None = None
) -> list[int]:
    """Run a request on D, with P if there is one; return its output."""
    token_ids = [*request.resume_output_token_ids]
    end: asyncio.Future[EngineCoreOutput] = asyncio.get_running_loop().create_future()

    def on_output(output: EngineCoreOutput) -> None:
        # D's first output repeats P's.
        token_ids[output.first_token_index :] = output.new_token_ids
        if output.finished:
            end.set_result(output)

    legs = {d: request}
    if p is not None:
        p_leg = dataclasses.replace(d.kv_transfer_params, do_remote_decode=True)
        d_leg = dataclasses.replace(p.kv_transfer_params, do_remote_prefill=True)
        legs = {
            worker: dataclasses.replace(request, kv_transfer_params=leg)
            for worker, leg in ((p, p_leg), (d, d_leg))
        }
    for worker, leg in legs.items():
        worker.add_request(leg, on_output if worker is d else lambda output: None)
    output = await asyncio.wait_for(end, 60)
    assert output.finish_reason is FinishReason.STOP, output
    return token_ids


async def test_reasoning_ends_in_any_world(
    stack: RunningStack, tokenizer: tokenizers.Tokenizer
) -> None:
    prompt = tokenizer.encode("One afternoon Mia found a kite in the garden. " * 4).ids
    names = map("reasoning-{}".format, itertools.count())

    def ask(seed: int, **fields: Any) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=next(names),
            prompt_token_ids=tuple(prompt),
            task=Generate(
                SamplingParams(seed=seed, max_tokens=400, structured_outputs=CONSTRAINTS[0])
            ),
            eos_token_id=EOS,
            reasoning_ended=False,
            reasoning_parser_kwargs={"reasoning_end_str": "."},
            **fields,
        )

    async with (
        attached_worker(stack, "prefill-0") as p,
        attached_worker(stack, "decode-0") as d,
    ):
        for seed in range(NUM_SEEDS):
            alone = await run_legs(ask(seed, cache_salt="alone"), d)
            text = tokenizer.decode(alone)
            reasoning, _, answer = text.partition(".")
            assert reasoning, text
            jsonschema.validate(json.loads(answer), SCHEMA)
            assert await run_legs(ask(seed), d, p) == alone
            num_reasoned = next(
                n for n in range(len(alone)) if "." in tokenizer.decode(alone[: n + 1])
            )
            for n in (1, num_reasoned, num_reasoned + 1, len(alone) - 2):
                resumed = ask(seed, attempt=1, resume_output_token_ids=tuple(alone[:n]))
                assert await run_legs(resumed, d, p) == alone
    stack.assert_idle()


# ---- random requests


class Completion(NamedTuple):
    """What a client got of one completion of its request."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[str, ...]
    end: str


def random_constraint(rng: random.Random, schemas: Iterator[Any]) -> StructuredOutputsParams | None:
    kind = rng.choice(["none", "schema", "schema", "regex", "choice", "object", "grammar", "tag"])
    match kind:
        case "schema":
            return StructuredOutputsParams(json_schema=json.dumps(next(schemas)))
        case "regex":
            low, high = rng.randint(0, 20), rng.randint(20, 200)
            return StructuredOutputsParams(regex=f"[a-z ]{{{low},{high}}}[.!]")
        case "choice":
            return StructuredOutputsParams(choice=tuple(rng.sample([*CHOICES, "a", "été"], 3)))
        case "object":
            return StructuredOutputsParams(json_object=True)
        case "grammar":
            name = rng.choice(["Mia", "Theo"])
            return StructuredOutputsParams(grammar=f'root ::= "({name} " root ")" | [a-z]+')
        case "tag":
            inner = {"type": "regex", "pattern": "[a-z]{1,9}"}
            tag = {"type": "tag", "begin": "<say>", "content": inner, "end": "</say>"}
            return StructuredOutputsParams(
                structural_tag=json.dumps({"type": "structural_tag", "format": tag})
            )
    return None


def random_params(rng: random.Random, schemas: Iterator[Any]) -> SamplingParams:
    constraint = random_constraint(rng, schemas)
    pick = rng.choice
    # What is refused beside a constraint.
    free = {"ignore_eos": pick([False, True]), "min_tokens": pick([0, 5])} if not constraint else {}
    return SamplingParams(
        n=pick([1, 1, 1, 2, 3]),
        seed=rng.randrange(2**64),
        temperature=pick([0.0, 0.7, 1.0, 1.5]),
        top_p=pick([1.0, 0.9]),
        top_k=pick([0, 40]),
        min_p=pick([0.0, 0.02]),
        presence_penalty=pick([0.0, 0.5]),
        frequency_penalty=pick([0.0, 0.3]),
        repetition_penalty=pick([1.0, 1.2]),
        logit_bias=pick([{}, {rng.randrange(10, 1300): 3.0, rng.randrange(10, 1300): -5.0}]),
        bad_words=pick([(), (), ("kite", "a")]),
        stop=pick([(), (), ("e ", "oo"), ('"',)]),
        stop_token_ids=pick([(), (), tuple(rng.sample(range(10, 1300), 30))]),
        include_stop_str_in_output=pick([False, True]),
        logprobs=pick([None, 0, 3]),
        max_tokens=rng.randint(1, 120),
        structured_outputs=constraint,
        **free,  # type: ignore[arg-type]
    )


def random_requests(count: int, tokenizer: tokenizers.Tokenizer) -> list[Any]:
    """Return prompts with their parameters; the first are long."""
    rng, schemas = random.Random(count), accepted_schemas(seed=count)
    words = WORDS.split()

    def prompt() -> list[int]:
        return list(tokenizer.encode(" ".join(rng.choices(words, k=rng.randint(1, 60)))).ids)

    short = [(prompt(), random_params(rng, schemas)) for _ in range(count - NUM_LONG)]
    endless = StructuredOutputsParams(regex="[a-z ]{300,}")
    params = (
        SamplingParams(seed=i, logprobs=1, max_tokens=200, structured_outputs=endless)
        for i in range(NUM_LONG)
    )
    return [(prompt(), each) for each in params] + short


async def answer(
    client: AsyncClient,
    prompt: list[int],
    params: SamplingParams,
    begun: asyncio.Event,
    **fields: str,
) -> tuple[list[Completion], int]:
    """Return the completions of a request, and how often it was driven again."""
    parts: dict[int, list[pb2.CompletionOutput]] = {}
    output = pb2.RequestOutput()
    async for output in client.generate(prompt, params, timeout_s=300, **fields):
        begun.set()
        for part in output.outputs:
            parts.setdefault(part.index, []).append(part)
    completions = []
    for _, each in sorted(parts.items()):
        end = each[-1]
        completions.append(
            Completion(
                tuple(token_id for part in each for token_id in part.token_ids),
                "".join(part.text for part in each),
                tuple(str(position) for part in each for position in part.logprobs.positions),
                f"{end.finish_reason} {end.stop_token_id} {end.stop_string} {end.error.message}",
            )
        )
    assert len(completions) == params.n
    return completions, output.metrics.num_redrives


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.soak)])
async def test_random_requests_have_the_same_answers_in_each_world(
    stack: RunningStack, start_router: Any, tokenizer: tokenizers.Tokenizer, count: int
) -> None:
    requests = random_requests(count, tokenizer)

    async def answers(client: AsyncClient, salt: str, *, kills: bool = False) -> list[Any]:
        begun = [asyncio.Event() for _ in requests]
        asked = [
            asyncio.create_task(answer(client, *request, event, cache_salt=salt))
            for request, event in zip(requests, begun, strict=True)
        ]
        if kills:
            first = asyncio.as_completed([event.wait() for event in begun])
            for each in itertools.islice(first, count // 4):
                await each
            stack.kill_process("decode-0")
        return list(await asyncio.gather(*asked))

    async with start_router(stack) as routed:
        alone = await answers(routed.client, "alone")
    async with start_router(stack, decode="decode-1") as routed:
        tight = await answers(routed.client, "tight")
    async with start_router(stack, prefill="prefill-0") as routed:
        await routed.until(1, "pdserve_worker_pairs", state="proven")
        handed_over = await answers(routed.client, "handed over")
        assert routed.count("pdserve_handoffs_total", outcome="completed") >= NUM_LONG
    assert stack.metrics("decode-1")["pdserve_preemptions_total"]
    client = AsyncClient(stack.grpc_address)
    killed = await answers(client, "killed", kills=True)
    await client.close()
    stack.restore()
    for number, (_, params) in enumerate(requests):
        for world in (tight, handed_over, killed):
            assert world[number][0] == alone[number][0], params
    assert sum(num_redrives for _, num_redrives in killed)
    ended = [completion.end for each, _ in alone for completion in each]
    assert sum("no token is left" in end for end in ended) < count / 4, ended


# ---- strangers


# Of each kind of constraint, the field of a format that says it.
KINDS = {"json": "json_schema", "regex": "pattern", "grammar": "grammar"}


def hostile_bodies(count: int) -> Iterator[dict[str, Any]]:
    """Yield constraints as clients may send them."""
    for text in hostile_grammars.texts(count, count):
        constraint: dict[str, Any] = {"structural_tag": text}
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            format_ = json.loads(text)["format"]
            found = (kind for kind, name in KINDS.items() if name in format_)
            constraint = {kind: format_[KINDS[kind]] for kind in found} or constraint
        yield {"structured_outputs": constraint}


@pytest.mark.parametrize("count", [NUM_STRANGERS, pytest.param(2000, marks=pytest.mark.soak)])
async def test_whatever_strangers_send_is_answered_while_others_stream(
    stack: RunningStack, count: int
) -> None:
    bodies, statuses = hostile_bodies(count), list[int]()
    url = f"http://127.0.0.1:{stack.http_port}/v1"
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def ask() -> None:
            for body in bodies:
                content = json.dumps({"prompt": "Who is it?", "max_tokens": 8, **body})
                answer = await http.post("/completions", content=content)
                # Too many: a busy machine gives the compiler too little time.
                assert answer.status_code in (200, 400, 429), (content[:200], answer.text)
                statuses.append(answer.status_code)

        async def stream() -> str:
            body = {"prompt": "Who is it?", "seed": 1, "ignore_eos": True, "max_tokens": 400}
            return str((await http.post("/completions", json=body)).json()["choices"])

        expected = await stream()
        asked = asyncio.gather(*(ask() for _ in range(NUM_STRANGERS)))
        while not asked.done():
            assert await stream() == expected
        await asked
    assert len(statuses) == count
    assert statuses.count(400) > count / 4
    assert statuses.count(200) > count / 20
    stack.assert_idle()
