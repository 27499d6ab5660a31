"""Markers that are special tokens reach the parser, and no other special token does."""

import pytest
from fake_model import make_model_dir
from transformers import AutoTokenizer

from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.chat_formats.base import ParserOptions
from pdserve_router.requests.output.answer_parser import answer_parser, silent_token_ids
from pdserve_router.text.detokenizer import Detokenizer
from pdserve_router.text.parts import Content, ToolCallDelta, content_of, join_parts
from pdserve_router.text.tokenizer import Tokenizer

ANSWER = 'hello[TOOL_CALLS]now[ARGS]{"a": 1}<|im_end|>'
PARSING = ParserOptions(format="mistral", tools={"now": {}})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("special")
    make_model_dir(path)
    pretrained = AutoTokenizer.from_pretrained(path)
    pretrained.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    pretrained.save_pretrained(path)
    tokenizer = Tokenizer(str(path))
    yield tokenizer
    tokenizer.close()


def parts_of(tokenizer, parsing, **params):
    request = EngineCoreRequest(
        request_id="r", external_req_id="r", prompt_token_ids=(5,), task=Generate(SamplingParams())
    )
    skipped = silent_token_ids(tokenizer, SamplingParams(**params), parsing)
    detokenizer = Detokenizer(tokenizer.backend, skipped=skipped)
    parser = answer_parser(parsing, request, 0)
    token_ids = tokenizer.backend.encode(ANSWER).ids
    texts = [*map(detokenizer.push, token_ids), detokenizer.finish()]
    parts = [part for text in texts for part in parser.push(text)]
    return join_parts([*parts, *parser.finish()])


def test_the_parser_sees_markers_and_the_text_has_no_special_tokens(tokenizer) -> None:
    content, call = parts_of(tokenizer, PARSING)
    assert content == Content("hello")
    assert isinstance(call, ToolCallDelta)
    assert (call.name, call.arguments, len(call.id)) == ("now", '{"a": 1}', 9)
    assert parts_of(tokenizer, None) == (Content('hellonow{"a": 1}'),)


def test_special_tokens_that_are_asked_for_are_text(tokenizer) -> None:
    parts = parts_of(tokenizer, PARSING, skip_special_tokens=False)
    assert content_of(parts) == "hello<|im_end|>"
    assert content_of(parts_of(tokenizer, None, skip_special_tokens=False)) == ANSWER
