import asyncio
import dataclasses
import time

import pytest
from tokenizers import processors
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as is_accepted

from pdserve_common.errors import DeadlineExceededError, InvalidRequestError, ModelNotFoundError
from pdserve_common.limits.validation import MAX_STOP_TOKEN_IDS, PROBE_PRIORITY
from pdserve_common.structured import to_structural_tag
from pdserve_common.types.capabilities import Capabilities
from pdserve_common.types.sampling_params import RequestOutputKind, SamplingParams
from pdserve_router.requests.input import input_processor
from pdserve_router.requests.input.generation_request import GenerationRequest
from pdserve_router.requests.input.input_processor import InputProcessor
from pdserve_router.requests.input.tool_use import ToolMode, ToolUse, as_tool
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.parts import Content
from pdserve_router.workers.model_limits import ModelLimits
from pdserve_router.workers.routing.prefix_index import prefix_hashes

DELTA = RequestOutputKind.DELTA
LIMITS = ModelLimits(max_model_len=100, vocab_size=320, eos_token_ids=(1, 3))


@pytest.fixture
def processor(tokenizer) -> InputProcessor:
    return InputProcessor(tokenizer, model_name="tiny", default_deadline_s=60, max_deadline_s=90)


def request(**fields) -> GenerationRequest:
    prompt = {} if fields.keys() & {"text", "messages", "token_ids"} else {"text": "hello"}
    params = SamplingParams(**fields.pop("params", {}))
    return GenerationRequest(request_id="r1", sampling_params=params, **prompt, **fields)


async def process(processor, **fields):
    return (await processor.process(request(**fields), LIMITS)).core_request


async def test_text_becomes_tokens(processor, tokenizer) -> None:
    result = await process(processor, text="hello world")
    assert tokenizer.decode(result.prompt_token_ids) == "hello world"
    assert result.eos_token_id == 1
    assert result.external_req_id == "r1"
    assert result.request_id.startswith("r1-")


async def test_chat_goes_through_the_template(processor, tokenizer) -> None:
    result = await process(
        processor, messages=[ChatMessage(role="user", parts=(Content("hello"),))]
    )
    text = tokenizer.decode(result.prompt_token_ids)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_ids_differ_for_the_same_client_id(processor) -> None:
    first, second = await process(processor), await process(processor)
    assert first.request_id != second.request_id


async def test_a_missing_seed_is_drawn_and_a_given_one_kept(processor) -> None:
    drawn = {(await process(processor)).task.sampling_params.seed for _ in range(3)}
    assert len(drawn) == 3
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert (
        await process(processor, params={"seed": 2**64 - 1})
    ).task.sampling_params.seed == 2**64 - 1


@pytest.mark.parametrize(("wanted", "expected"), [(None, 90), (5, 5), (5000, 90)])
async def test_max_tokens_ends_at_max_model_len(processor, wanted, expected) -> None:
    params = {"max_tokens": wanted}
    result = await process(processor, token_ids=[5] * 10, params=params)
    assert result.task.sampling_params.max_tokens == expected


async def test_further_eos_tokens_stop_too_unless_ignored(processor) -> None:
    result = await process(processor, params={"stop_token_ids": (9,)})
    assert result.task.sampling_params.stop_token_ids == (9, 3)
    result = await process(processor, params={"ignore_eos": True})
    assert result.task.sampling_params.stop_token_ids == ()


async def test_what_a_client_and_the_model_stop_at_fits_together(processor) -> None:
    """A worker takes as many as a client may send."""
    most = range(4, 3 + MAX_STOP_TOKEN_IDS)
    for asked in (most, [3, *most]):
        result = await process(processor, params={"stop_token_ids": tuple(asked)})
        assert len(result.task.sampling_params.stop_token_ids) == MAX_STOP_TOKEN_IDS
    with pytest.raises(InvalidRequestError, match=r"has 256 ids, at most 255 beside .* 2 EOS"):
        await process(processor, params={"stop_token_ids": (2, *most)})


async def test_deadlines_are_defaulted_and_bounded(processor) -> None:
    now = time.monotonic()
    assert (await process(processor)).deadline == pytest.approx(now + 60, abs=1)
    assert (await process(processor, deadline=now + 5)).deadline == now + 5
    assert (await process(processor, deadline=now + 1e6)).deadline == pytest.approx(now + 90, abs=1)
    with pytest.raises(DeadlineExceededError):
        await process(processor, deadline=now - 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "prompt"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [5] * 100}, "prompt"),
        ({"token_ids": [320]}, "prompt_token_ids"),
        ({"token_ids": [-1]}, "prompt_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [ChatMessage(role="robot", parts=(Content("hi"),))]}, "messages"),
        ({"messages": [ChatMessage(role="user", parts=(Content("forbidden"),))]}, "messages"),
        ({"text": "a", "token_ids": [5]}, "prompt"),
        ({"priority": PROBE_PRIORITY}, "priority"),
        ({"priority": -(2**31)}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"params": {"bad_words_token_ids": ((5,),)}}, "bad_words_token_ids"),
        ({"params": {"bad_words": ("𐍈" * 256,)}}, "bad_words"),
        ({"params": {"n": 0}}, "n"),
    ],
)
async def test_a_bad_field_is_named(processor, fields, field) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await process(processor, **fields)
    assert caught.value.field == field


@pytest.mark.parametrize("block_size", [0, 16])
async def test_a_long_prompt_is_hashed_with_it(processor, block_size, monkeypatch) -> None:
    monkeypatch.setattr(input_processor, "MAX_UNHASHED_TOKENS", 40)
    limits = dataclasses.replace(LIMITS, block_size=block_size)
    short = await processor.process(request(token_ids=range(5, 45)), limits)
    assert short.prefix_hashes == ()
    wanted = request(token_ids=range(5, 46), cache_salt="s")
    processed = await processor.process(wanted, limits)
    assert processed.prefix_hashes == prefix_hashes(processed.core_request, block_size)
    assert len(set(processed.prefix_hashes)) == (2 if block_size else 0)


async def test_too_many_prompt_logprobs_are_refused(processor) -> None:
    limits = dataclasses.replace(LIMITS, max_model_len=100_000)
    wanted = request(token_ids=[5] * 20_000, params={"prompt_logprobs": 20})
    with pytest.raises(InvalidRequestError, match="20 for a prompt of 20000 tokens: 420000 log-"):
        await processor.process(wanted, limits)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"logprobs": 20}, 47),
        ({"logprobs": 20, "n": 2}, 23),
        ({"logprobs": 20, "n": 2, "best_of": 3, "output_kind": DELTA}, 23),
        ({"logprobs": 20, "prompt_logprobs": 2}, 46),
        ({"logprobs": 20, "min_tokens": 40}, 47),
        ({"logprobs": 0}, 90),
        ({"logprobs": 20, "output_kind": DELTA}, 90),
        ({"prompt_logprobs": 20}, 90),
        ({"logprobs": 20, "max_tokens": 47}, 47),
    ],
)
async def test_max_tokens_left_unset_is_what_fits_with_its_logprobs(
    processor, params, expected
) -> None:
    params = {"output_kind": RequestOutputKind.FINAL_ONLY, **params}
    result = await process(
        processor, token_ids=[5] * 10, params=params, max_logprob_entries=21 * 47 + 20
    )
    assert result.task.sampling_params.max_tokens == expected


@pytest.mark.parametrize(
    ("params", "num_tokens"),
    [({"max_tokens": 48}, 48), ({"min_tokens": 48}, 48), ({"prompt_logprobs": 20}, 1)],
)
async def test_what_does_not_fit_with_its_logprobs_is_refused(
    processor, params, num_tokens
) -> None:
    """Also if the client did not say how much: no answer is shorter than one token."""
    params = {"output_kind": RequestOutputKind.FINAL_ONLY, "logprobs": 20, **params}
    limit = 21 * (10 if "prompt_logprobs" in params else 47)
    with pytest.raises(InvalidRequestError, match=f"20 with max_tokens {num_tokens} and n 1: "):
        await process(processor, token_ids=[5] * 10, params=params, max_logprob_entries=limit)


async def test_bad_words_become_every_form_of_their_tokens(processor, tokenizer) -> None:
    result = await process(processor, params={"bad_words": ("the", " world", "é")})
    forms = result.task.sampling_params.bad_words_token_ids
    assert [tokenizer.decode(form) for form in forms] == [
        "the",
        "world",
        "é",
        " the",
        " world",
        " é",
    ]
    # In the middle of a text "the" is other tokens than at its beginning, and more of them.
    assert (len(forms[0]), len(forms[3])) == (1, 2)


async def test_a_bad_word_of_spaces_only_is_banned_as_it_is(processor, tokenizer) -> None:
    result = await process(processor, params={"bad_words": (" ",)})
    texts = [tokenizer.decode(form) for form in result.task.sampling_params.bad_words_token_ids]
    assert texts[0] == " "


async def test_bad_words_have_no_special_tokens_around_them(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(
        tokenizer.backend,
        "post_processor",
        processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]),
    )
    processor = InputProcessor(
        tokenizer, model_name="tiny", default_deadline_s=60, max_deadline_s=90
    )
    result = await process(processor, text="hello", params={"bad_words": ("hello",)})
    assert result.prompt_token_ids[0] == 0
    assert all(0 not in form for form in result.task.sampling_params.bad_words_token_ids)


async def test_an_unknown_model_is_not_found(processor) -> None:
    await process(processor, model="tiny")
    with pytest.raises(ModelNotFoundError, match="'other' is not served here, 'tiny' is"):
        await process(processor, model="other")


async def test_a_long_text_does_not_block_the_event_loop(processor) -> None:
    tokenizing = asyncio.create_task(
        processor.tokenize(text="hello world " * 50_000, max_model_len=1 << 20)
    )
    num_turns = 0
    while not tokenizing.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert len(tokenizing.result()) > 50_000
    # Of about 100. Two if it ran on the loop, few if its thread kept the interpreter to itself.
    assert num_turns > 10


ENFORCING = dataclasses.replace(
    LIMITS,
    max_model_len=1000,
    capabilities=Capabilities(fields=frozenset(("structured_outputs",))),
)
QUESTION = [ChatMessage(role="user", parts=(Content("hello"),))]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
UNENFORCED = {"type": "object", "allOf": [SCHEMA]}
CALL = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'


def required(parameters, **fields) -> ToolUse:
    tool = as_tool(name="f", description=None, parameters=parameters)
    return ToolUse(tools=[tool], mode=ToolMode.REQUIRED, **fields)


async def grammar_of(processor, use: ToolUse) -> Grammar:
    wanted = request(messages=QUESTION, tools=use)
    params = (await processor.process(wanted, ENFORCING)).core_request.task.sampling_params
    tag = to_structural_tag(params.structured_outputs)
    return Grammar.from_structural_tag(tag.text)


async def test_a_call_is_enforced_where_workers_can(processor) -> None:
    grammar = await grammar_of(processor, required(SCHEMA, strict=frozenset("f")))
    assert is_accepted(grammar, CALL % '{"x": 1}')
    assert is_accepted(grammar, "<think>\nhm</think>\n\n" + CALL % '{"x": 1}')
    for wrong in (CALL % '{"x": "1"}', "hello", CALL.replace('"f"', '"g"') % '{"x": 1}'):
        assert not is_accepted(grammar, wrong)
    twice = CALL % '{"x": 1}' + "\n" + CALL % '{"x": 2}'
    assert is_accepted(grammar, twice)
    assert not is_accepted(await grammar_of(processor, required(SCHEMA, is_parallel=False)), twice)
    with pytest.raises(InvalidRequestError, match="no worker enforces") as error:
        await processor.process(request(messages=QUESTION, tools=required(SCHEMA)), LIMITS)
    assert error.value.field == "tool_choice"


async def test_a_schema_that_is_not_enforced_is_refused_if_it_is_strict(processor) -> None:
    assert is_accepted(await grammar_of(processor, required(UNENFORCED)), CALL % '{"y": []}')
    with pytest.raises(InvalidRequestError, match=r"tools\.f\.parameters.*allOf"):
        await grammar_of(processor, required(UNENFORCED, strict=frozenset("f")))
    wanted = request(messages=QUESTION, tools=required(SCHEMA), params={"ignore_eos": True})
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        await processor.process(wanted, ENFORCING)
