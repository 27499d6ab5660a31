"""The text of an answer is what transformers makes of it behind its prompt, for every tokenizer."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pdserve_common.structured import to_structural_tag
from pdserve_common.types.engine import LogprobsLists
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_engine.grammar.native import Matcher, TokenizerInfo, compile_structural_tag
from pdserve_engine.grammar.vocabulary import make_tokenizer_info
from pdserve_router.api.openai.logprobs import CompletionLogprobs
from pdserve_router.requests.output.answer_parser import answer_detokenizer
from pdserve_router.text.detokenizer import Detokenizer
from pdserve_router.text.tokenizer import Tokenizer
from support.router_stack import StartStack, events_of
from support.tokenizer_kinds import KINDS, TEXTS, save_tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
Pair = tuple[Tokenizer, PreTrainedTokenizerFast]
PROMPT = "the capital of france is"


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tiny"
    save_tokenizer(request.param, path)
    return path


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    tokenizer = Tokenizer(str(folder))
    yield tokenizer, PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.close()


def detokenizer_of(tokenizer: Tokenizer, prompt: list[int], **params: object) -> Detokenizer:
    return answer_detokenizer(tokenizer, prompt, SamplingParams(**params), parsing=None)


def text_of(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stop_string is not None:
            return "".join(pieces)
    return "".join([*pieces, detokenizer.finish()])


def texts_with(pair: Pair) -> Iterator[list[int]]:
    tokenizer = pair[0]
    for text in TEXTS:
        yield tokenizer.backend.encode(f"{text}</s> then<|call|> more").ids


@pytest.mark.parametrize("skips", [False, True])
async def test_prompt_and_answer_are_what_transformers_decodes_of_both(
    pair: Pair, skips: bool
) -> None:
    tokenizer, reference = pair
    special = tokenizer.special_token_ids if skips else frozenset()
    for token_ids in texts_with(pair):
        expected = reference.decode(token_ids, skip_special_tokens=skips)
        for border in range(len(token_ids) + 1):
            prompt, answer = token_ids[:border], token_ids[border:]
            shown = [each for each in prompt if each not in special]
            before = await tokenizer.decode_prompt(shown)
            text = text_of(detokenizer_of(tokenizer, prompt, skip_special_tokens=skips), answer)
            assert before + text == expected
            as_whole = await tokenizer.decode_answer(
                answer, prompt_token_ids=prompt, skipped=special
            )
            assert as_whole == text


@pytest.mark.parametrize("text", ["\ufffd\ufffd😀 ok", "\ufffd\ufffd한국어 ok", "\ufffd" * 9 + "é"])
def test_replacement_characters_that_an_answer_says_are_its_own(pair: Pair, text: str) -> None:
    tokenizer, reference = pair
    answer = tokenizer.backend.encode(text, add_special_tokens=False).ids
    detokenizer = detokenizer_of(tokenizer, [], skip_special_tokens=False)
    assert text_of(detokenizer, answer) == reference.decode(answer)


async def test_offsets_are_where_tokens_begin_in_the_text(pair: Pair) -> None:
    tokenizer, reference = pair
    for token_ids in texts_with(pair):
        for border in range(len(token_ids)):
            prompt, answer = token_ids[:border], token_ids[border:]
            detokenizer = detokenizer_of(tokenizer, prompt, skip_special_tokens=False)
            first = len(await tokenizer.decode_prompt(prompt))
            writer = CompletionLogprobs(tokenizer, detokenizer, first_offset=first)
            written = writer.write(answer, LogprobsLists.unknown(len(answer)))
            for at, offset in enumerate(written["text_offset"], border):
                before = reference.decode(token_ids[:at])
                # Within a character there is no place.
                if not before.endswith(REPLACEMENT):
                    assert offset == len(before)


def test_stop_strings_match_where_the_answer_begins(pair: Pair) -> None:
    tokenizer, _ = pair
    token_ids = tokenizer.backend.encode(f"{PROMPT} paris and london").ids
    prompt = tokenizer.backend.encode(PROMPT).ids
    assert token_ids[: len(prompt)] == prompt
    detokenizer = detokenizer_of(tokenizer, prompt, stop=(" paris and",))
    assert text_of(detokenizer, token_ids[len(prompt) :]) == ""
    assert detokenizer.stop_string == " paris and"


@pytest.fixture(scope="module")
def info(folder: Path, pair: Pair) -> TokenizerInfo:
    tokenizer, reference = pair
    return make_tokenizer_info(
        folder, vocab_size=tokenizer.vocab_size, eos_token_ids=(reference.eos_token_id,)
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "choices", [(" paris and", " paris, is", " big"), ("paris", "london", "the paris", "big, is")]
)
@pytest.mark.parametrize("prompt_text", [PROMPT, "", None], ids=["text", "no text", "empty"])
def test_what_a_choice_allows_is_one_of_the_choices(
    pair: Pair,
    info: TokenizerInfo,
    seed: int,
    choices: tuple[str, ...],
    prompt_text: str | None,
) -> None:
    tokenizer, reference = pair
    constraint = StructuredOutputsParams(choice=choices)
    tag = to_structural_tag(constraint)
    matcher = Matcher(compile_structural_tag(tag.text, info))
    prompt = [] if prompt_text is None else tokenizer.backend.encode(prompt_text).ids
    bitmask = np.zeros(-(-info.vocab_size // 32), np.int32)
    random_ = random.Random(seed)
    answer: list[int] = []
    while not matcher.is_terminated:
        matcher.fill(bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: info.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed
        answer.append(random_.choice(allowed))
        assert matcher.accept(answer[-1])
    assert answer[-1] == reference.eos_token_id
    detokenizer = detokenizer_of(tokenizer, prompt, structured_outputs=constraint)
    assert text_of(detokenizer, answer) in choices


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_goes_on_where_the_prompt_ends(
    start_stack: StartStack, pair: Pair, folder: Path, stream: bool
) -> None:
    tokenizer, reference = pair
    token_ids = tokenizer.backend.encode(f"{PROMPT} paris and london").ids
    num_prompt = len(tokenizer.backend.encode(PROMPT).ids)
    info = {"vocab_size": tokenizer.vocab_size, "eos_token_ids": (reference.eos_token_id,)}
    body = {"model": folder.name, "max_tokens": len(token_ids) - num_prompt, "echo": True}
    async with start_stack(
        model=str(folder), answer=token_ids[num_prompt:], http=True, info=info
    ) as stack:
        for prompt, logprobs in ((PROMPT, 0), (token_ids[:num_prompt], None)):
            response = await stack.api.post(
                "/v1/completions",
                json={**body, "prompt": prompt, "logprobs": logprobs, "stream": stream},
            )
            answers = events_of(response.text) if stream else [response.json()]
            choices = [answer["choices"][0] for answer in answers]
            text = "".join(choice["text"] for choice in choices)
            is_text = isinstance(prompt, str)
            assert text == reference.decode(token_ids, skip_special_tokens=is_text)
            parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
            offsets = [offset for part in parts for offset in part["text_offset"]]
            assert offsets == [
                len(reference.decode(token_ids[:i], skip_special_tokens=True))
                for i in range(len(token_ids) if is_text else 0)
            ]
