"""What a mask lets pass is accepted, with a vocabulary in which much is one token."""

import json
import random
from typing import Any

import numpy as np
import pytest

from pdserve_common.structured import to_structural_tag
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_engine.grammar.native import (
    CompiledGrammar,
    Matcher,
    TokenizerInfo,
    compile_structural_tag,
)

CHARS = 'a1",]}[ .'
PAIRS = [first + second for first in CHARS for second in CHARS]
TRIPLES = [pair + third for pair in PAIRS for third in 'a",]']
VOCABULARY = [b"", *(bytes([byte]) for byte in range(256))] + [
    text.encode() for text in (*PAIRS, *TRIPLES)
]
EOS = 0
MAX_TOKENS = 250


@pytest.fixture(scope="module")
def info() -> TokenizerInfo:
    return TokenizerInfo.make(VOCABULARY, [EOS])


def schema(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json_schema=json.dumps(fields))


def repeat(low: int, high: int) -> StructuredOutputsParams:
    text = {"type": "const_string", "value": "a"}
    elements = [
        {"type": "repeat", "min": low, "max": high, "content": text},
        {"type": "const_string", "value": '"'},
    ]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return StructuredOutputsParams(structural_tag=json.dumps(tag))


# On both sides of what xgrammar writes out.
COUNTS = [
    (0, 200),
    (1, 128),
    (100, 300),
    (128, None),
    (129, None),
    (150, 150),
    (400, 500),
    (2, 900),
]
ONE = {"const": 1}
CONSTRAINTS = {
    **{
        f"length {low} {high}": schema(type="string", minLength=low, maxLength=high or 1000)
        for low, high in COUNTS
    },
    **{
        f"items {low} {high}": schema(type="array", items=ONE, minItems=low, maxItems=high or 1000)
        for low, high in COUNTS
    },
    **{
        f"regex {low} {high}": StructuredOutputsParams(regex=f'(a|,1){{{low},{high or ""}}}"')
        for low, high in COUNTS
        if (high or low) < 200
    },
    **{f"repeat {low} {high}": repeat(low, high or -1) for low, high in COUNTS},
    "grammar": StructuredOutputsParams(grammar='root ::= "[" ("a" | "1,"){100,128} "]"'),
    "short of class": StructuredOutputsParams(grammar='root ::= "[" [^"]{2,128} "\\"" "]"'),
    "class": StructuredOutputsParams(regex='[^"]{2,300}"'),
    "number": schema(type="number", minimum=-1.5, maximum=1e9),
    "object": StructuredOutputsParams(json_object=True),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_what_a_mask_lets_pass_is_accepted(info: TokenizerInfo, name: str) -> None:
    tag = to_structural_tag(CONSTRAINTS[name])
    text = compile_structural_tag(tag.text, info).serialize()
    grammar = CompiledGrammar.deserialize(text, info)
    rng = random.Random(name)
    bitmask = np.zeros(-(-len(VOCABULARY) // 32), np.int32)
    matcher, text = Matcher(grammar), b""
    for _ in range(MAX_TOKENS):
        matcher.fill(bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: len(VOCABULARY)]
        token_id = int(rng.choice(np.flatnonzero(bits)))
        assert matcher.accept(token_id), (text[-20:], VOCABULARY[token_id])
        text += VOCABULARY[token_id]
        if matcher.is_terminated:
            break
