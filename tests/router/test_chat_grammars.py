"""Grammars of chat formats in a vocabulary: markers that are tokens, special or not, or text."""

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from fake_model import copy_with_template, make_model_dir
from test_chat_formats import TEMPLATES, WRITTEN, as_arguments
from tokenizers import AddedToken
from transformers import AutoTokenizer

from pdserve_common.errors import OverloadedError
from pdserve_common.structured import StructuralTag, to_structural_tag
from pdserve_common.structured.reasoning import Reasoning
from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_engine.grammar.compile_queue import GrammarCompiler
from pdserve_engine.grammar.compiler_process import MAX_SMALL_BYTES
from pdserve_engine.grammar.native import (
    CompiledGrammar,
    Matcher,
    TokenizerInfo,
    compile_structural_tag,
)
from pdserve_engine.grammar.vocabulary import make_tokenizer_info
from pdserve_router.chat_formats.base import ParserOptions, ReasoningStart
from pdserve_router.chat_formats.registry import FORMATS
from pdserve_router.chat_formats.tags import CallRules, constraint_tag
from pdserve_router.requests.input.tool_use import MAX_ENFORCED_TOOLS, parser_options
from pdserve_router.requests.output.answer_parser import answer_parser, silent_token_ids
from pdserve_router.text.detokenizer import Detokenizer
from pdserve_router.text.parts import Content, OutputPart, ToolCallDelta, join_parts, reasoning_of
from pdserve_router.text.tokenizer import Tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 22]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {"get_weather": PARAMETERS, "now": {"type": "object", "additionalProperties": False}}
VALUE = {"city": "Paris", "days": 22}
# As users have them, each with properties of its own.
TYPES = ("string", "integer", "number", "boolean", "null", "array")
MANY_TOOLS = {
    f"tool_{i}": {
        "type": "object",
        "properties": {f"{name}_{i}": {"type": name} for name in TYPES},
        "required": [f"string_{i}", f"integer_{i}"],
        "additionalProperties": False,
    }
    for i in range(31)
} | {"get_weather": PARAMETERS}
NUM_WALKS = 8
# Most walks end within some hundred tokens: what ends something is taken when it may be.
MAX_TOKENS = 2000


@dataclass
class Model:
    path: Path
    tokenizer: Tokenizer
    info: TokenizerInfo
    eos: int
    # What ends something: markers and the end of the answer.
    ends: set[int]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    def spell(self, text: str) -> list[int]:
        """Encode as if no marker were a token."""
        return [token_id for character in text for token_id in self.encode(character)]


@pytest.fixture(scope="module", params=["special", "added", "text"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory):
    path: Path = tmp_path_factory.mktemp(kind)
    make_model_dir(path)
    pretrained = AutoTokenizer.from_pretrained(path)
    markers = sorted({marker for each in FORMATS.values() for marker in each.markers})
    if kind != "text":
        is_special = kind == "special"
        added = [AddedToken(each, special=is_special, normalized=False) for each in markers]
        pretrained.add_tokens(added, special_tokens=is_special)
        pretrained.save_pretrained(path)
    tokenizer = Tokenizer(str(path))
    assert markers[0] not in tokenizer.added_token_ids or kind != "text"
    eos = tokenizer.added_token_ids["<|eos|>"]
    info = make_tokenizer_info(path, vocab_size=tokenizer.vocab_size, eos_token_ids=(eos,))
    ends = {eos, *(tokenizer.added_token_ids.get(each, eos) for each in markers)}
    yield Model(path, tokenizer, info, eos, ends)
    tokenizer.close()


@pytest.fixture(scope="module")
def compiler(model: Model) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(model.info)
    yield compiler
    compiler.close()


def compiled_in_time(compiler: GrammarCompiler, tag: StructuralTag) -> CompiledGrammar:
    """Ask again, as a client does: on a busy machine 2 s of CPU time may take more than 10 s."""
    for _ in range(6):
        with contextlib.suppress(OverloadedError):
            return compiler.submit(tag).result(60)
    return compiler.submit(tag).result(60)


def compiled(model: Model, name: str, start: ReasoningStart, rules: CallRules) -> CompiledGrammar:
    return compile_structural_tag(checked_tag(model, name, start, rules).text, model.info)


def checked_tag(model: Model, name: str, start: ReasoningStart, rules: CallRules) -> StructuralTag:
    chat_format = FORMATS[name]
    ids = chat_format.marker_ids(model.tokenizer.added_token_ids)
    tag = json.dumps(chat_format.structural_tag(rules, start, ids))
    return to_structural_tag(StructuredOutputsParams(structural_tag=tag))


def fits(model: Model, grammar: CompiledGrammar, token_ids: list[int]) -> bool:
    matcher = Matcher(grammar)
    return all(matcher.accept(each) for each in (*token_ids, model.eos)) and matcher.is_terminated


def walk(model: Model, grammar: CompiledGrammar, begun: list[int], seed: int) -> list[int]:
    """Return an answer of random tokens, of which the masks let each pass, behind its beginning."""
    random_ = random.Random(seed)
    matcher = Matcher(grammar)
    bitmask = np.zeros(-(-model.info.vocab_size // 32), np.int32)
    token_ids = [*begun]
    assert all(map(matcher.accept, begun))
    while not matcher.is_terminated:
        assert len(token_ids) < MAX_TOKENS
        matcher.fill(bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: model.info.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        ends = [each for each in allowed if each in model.ends]
        token_id = random_.choice(ends if ends and random_.random() < 0.3 else allowed)
        assert matcher.accept(token_id)
        token_ids.append(token_id)
    return token_ids


def read(model: Model, parsing: ParserOptions, token_ids: list[int]) -> tuple[OutputPart, ...]:
    request = EngineCoreRequest(
        request_id="r", external_req_id="r", prompt_token_ids=(5,), task=Generate(SamplingParams())
    )
    silent = silent_token_ids(model.tokenizer, SamplingParams(), parsing)
    detokenizer = Detokenizer(model.tokenizer.backend, skipped=silent)
    parser = answer_parser(parsing, request, 0)
    texts = [*map(detokenizer.push, token_ids), detokenizer.finish()]
    parts = [part for text in texts for part in parser.push(text)]
    return join_parts([*parts, *parser.finish()])


def calls_of(parts: tuple[OutputPart, ...]) -> list[ToolCallDelta]:
    assert not any(isinstance(part, Content) for part in parts), parts
    return [part for part in parts if isinstance(part, ToolCallDelta)]


STARTS = [
    (name, start)
    for name, each in FORMATS.items()
    for start in ([ReasoningStart.CLOSED] if each.reasoning is None else ReasoningStart)
]


def reasoning_of_format(name: str, start: ReasoningStart) -> str:
    begin, end = FORMATS[name].reasoning or ("", "")
    free, opened = f"{begin}hm < [ {end}\n", f"hm{end}\n\n"
    return {"free": free, "open": opened, "closed": ""}[start.value]


SWITCHED = [{"enable_thinking": False}, {"thinking": False}, {"reasoning_effort": "none"}]


def start_of(
    name: str, tokenizer: Tokenizer, prompt: str = "hello", **variables: object
) -> ReasoningStart:
    prompt_ids = tokenizer.backend.encode(prompt).ids
    return parser_options(FORMATS[name], None, prompt_ids, tokenizer, variables).reasoning


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_is_possible_where_the_model_knows_it_and_nobody_turned_it_off(
    model: Model, kind: str, name: str, tmp_path: Path
) -> None:
    markers = FORMATS[name].reasoning or ()
    templates = (TEMPLATES[name], *(TEMPLATES[name] + each for each in markers))
    for number, template in enumerate(templates):
        folder = copy_with_template(model.path, tmp_path / str(number), template)
        with contextlib.closing(Tokenizer(folder)) as tokenizer:
            is_known = any(m in template for m in markers) or (kind != "text" and bool(markers))
            expected = ReasoningStart.FREE if is_known else ReasoningStart.CLOSED
            assert start_of(name, tokenizer) == expected
            assert start_of(name, tokenizer, enable_thinking=True, thinking="yes") == expected
            for variables in SWITCHED:
                assert start_of(name, tokenizer, **variables) is ReasoningStart.CLOSED
            # What the prompt says holds.
            for marker, said in zip(markers, ("OPEN", "CLOSED"), strict=False):
                prompt = f"hello{marker}\n"
                assert start_of(name, tokenizer, prompt, enable_thinking=False).name == said


@pytest.mark.parametrize(("name", "start"), STARTS)
def test_a_call_fits_as_models_write_it(model: Model, kind: str, name: str, start) -> None:
    before = reasoning_of_format(name, start)
    end = (FORMATS[name].reasoning or ("", ""))[1]
    call = WRITTEN[name] % as_arguments(name, VALUE)
    parsing = ParserOptions(format=name, reasoning=start, tools=TOOLS)
    grammar = compiled(model, name, start, CallRules(tools=TOOLS, stop_after_first=False))
    written = model.encode(before + call)
    assert fits(model, grammar, written)
    parts = read(model, parsing, written)
    (made,) = calls_of(parts)
    assert (made.name, json.loads(made.arguments)) == ("get_weather", VALUE)
    assert bool(reasoning_of(parts)) == bool(before)
    # A marker that is a token has no other spelling, before its call and in reasoning.
    is_text = kind == "text"
    if call.startswith(FORMATS[name].markers):
        assert fits(model, grammar, model.encode(before) + model.spell(call)) == is_text
    if before:
        assert fits(model, grammar, model.spell(before) + model.encode(call)) == is_text
        twice = model.encode(before[: before.index(end)]) + model.spell(end)
        assert is_text or not fits(model, grammar, twice + model.encode(f"hm{end}{call}"))
    assert not fits(model, grammar, model.encode(before))
    assert not fits(model, grammar, model.encode(before + "It rains. " + call))


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.reasoning])
def test_workers_make_the_same_grammar_of_a_marker(model: Model, name: str) -> None:
    chat_format = FORMATS[name]
    asked = StructuredOutputsParams(json_schema=json.dumps(PARAMETERS))
    ids = chat_format.marker_ids(model.tokenizer.added_token_ids)
    tag = chat_format.answer_tag(constraint_tag(asked), ReasoningStart.OPEN, ids)
    routed = to_structural_tag(StructuredOutputsParams(structural_tag=json.dumps(tag)))
    assert chat_format.reasoning is not None
    before = Reasoning(end=chat_format.reasoning[1]).formats(model.info.added_token_ids)
    assert to_structural_tag(asked, before=before) == routed


@pytest.mark.parametrize("name", FORMATS)
def test_as_many_tools_as_are_enforced_fit_a_grammar(model: Model, name: str) -> None:
    tools = {f"tool_{i}": PARAMETERS for i in range(MAX_ENFORCED_TOOLS - 1)}
    rules = CallRules(tools={**tools, "get_weather": PARAMETERS}, stop_after_first=False)
    grammar = compiled(model, name, ReasoningStart.CLOSED, rules)
    assert fits(model, grammar, model.encode(WRITTEN[name] % as_arguments(name, VALUE)))


@pytest.mark.parametrize("kind", ["special"], indirect=True)
@pytest.mark.parametrize("name", FORMATS)
def test_many_tools_with_schemas_of_their_own_are_compiled(
    model: Model, compiler: GrammarCompiler, name: str
) -> None:
    rules = CallRules(tools=MANY_TOOLS, stop_after_first=False)
    tag = checked_tag(model, name, ReasoningStart.CLOSED, rules)
    grammar = compiled_in_time(compiler, tag)
    assert grammar.num_bytes > MAX_SMALL_BYTES
    for value, is_valid in ((VALUE, True), (VALUE | {"days": 3}, False), ({"city": "Oslo"}, False)):
        written = WRITTEN[name] % as_arguments(name, value)
        assert fits(model, grammar, model.encode(written)) == is_valid


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize(("name", "start"), STARTS)
def test_random_answers_are_valid_calls(
    model: Model, kind: str, name: str, start, is_parallel
) -> None:
    parsing = ParserOptions(format=name, reasoning=start, tools=TOOLS)
    rules = CallRules(tools=TOOLS, stop_after_first=not is_parallel)
    grammar = compiled(model, name, start, rules)
    # Random text does not spell out a marker.
    begun = model.encode(reasoning_of_format(name, start)) if kind == "text" else []
    for seed in range(NUM_WALKS):
        calls = calls_of(read(model, parsing, walk(model, grammar, begun, seed)))
        assert len(calls) >= 1 if is_parallel else len(calls) == 1
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
