"""The bundled model's vocabulary, and a compiler with its process."""

from collections.abc import Iterator

import pytest

from pdserve_engine.grammar.compile_queue import GrammarCompiler
from pdserve_engine.grammar.native import TokenizerInfo
from pdserve_engine.grammar.vocabulary import make_tokenizer_info
from support.grammars import EOS, MODEL, VOCAB_SIZE, Compile, structural_tag


@pytest.fixture(scope="session")
def tokenizer_info() -> TokenizerInfo:
    return make_tokenizer_info(MODEL, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))


@pytest.fixture(scope="session")
def vocabulary(tokenizer_info: TokenizerInfo) -> list[bytes]:
    return tokenizer_info.vocabulary


@pytest.fixture(scope="session")
def compiler(tokenizer_info: TokenizerInfo) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer_info)
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def compile_format(compiler: GrammarCompiler) -> Compile:
    return lambda format: compiler.submit(structural_tag(format)).result()
