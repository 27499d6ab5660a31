"""A defect at any call that the threads of grammars make costs one request, and no thread."""

from collections.abc import Callable
from typing import Any

import pytest

from pdserve_common.errors import PdserveError, RequestFailedError
from pdserve_common.observability.defects import DEFECTS
from pdserve_common.processes.calls import Call
from pdserve_common.structured import to_structural_tag
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_engine.grammar import compile_queue as compiler_module
from pdserve_engine.grammar.compile_queue import GrammarCompiler
from pdserve_engine.grammar.manager import StructuredOutputManager
from pdserve_engine.grammar.messages import (
    Compile,
    Compiled,
    CompiledLarge,
    Read,
    ReadConstraint,
    Refused,
)
from pdserve_engine.grammar.native import CompiledGrammar, TokenizerInfo, compile_structural_tag
from support.call_sites import CallSite, call_sites, each_site, fault_at
from support.grammars import VOCAB_SIZE, structural_tag
from support.metrics import value
from support.waiting import wait_until

TIMEOUT_S = 120.0
PLAIN, LARGE, REFUSED, CRASHES, NEXT = (
    structural_tag({"type": "regex", "pattern": pattern})
    for pattern in ("[0-9]+", "large[0-9]+", "refused", "crashes", "[a-z]+")
)


class CompilerProcess:
    """In place of the real one, in this process; ends once over CRASHES."""

    tokenizer_info: TokenizerInfo
    num_crashes = 0

    def get_ready(self, tokenizer_info: str) -> None:
        assert tokenizer_info

    def ask(self, call: Call[Any]) -> Any:
        if isinstance(call, ReadConstraint):
            tag = to_structural_tag(call.params)
            return Read(tag.text, tag.digest)
        assert isinstance(call, Compile)
        text = call.text.decode()
        if text == CRASHES.text and not CompilerProcess.num_crashes:
            CompilerProcess.num_crashes += 1
            raise ConnectionError("it has ended")
        if text == REFUSED.text:
            return Refused("no grammar")
        if text == LARGE.text:
            return CompiledLarge()
        grammar = compile_structural_tag(text, self.tokenizer_info)
        return Compiled(grammar=grammar.serialize(), first_mask_s=0.0)

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


COMPILER_SITES = call_sites(
    GrammarCompiler,
    "_serve_next",
    "_next",
    "_serve",
    "_forget",
    "_succeed",
    "_fail",
    "_count",
    "_make",
    "_read",
    "_compile",
    "_compile_again",
    "_ask",
    "_get_process",
    "_drop_process",
)


@each_site(COMPILER_SITES)
def test_the_compiler(
    site: CallSite, tokenizer_info: TokenizerInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompilerProcess, "tokenizer_info", tokenizer_info, raising=False)
    monkeypatch.setattr(CompilerProcess, "num_crashes", 0)
    monkeypatch.setattr(compiler_module, "CompilerProcess", CompilerProcess)
    compiler = GrammarCompiler(tokenizer_info)
    num_defects = value(DEFECTS)
    with fault_at(site) as fault:
        futures = [
            compiler.submit(tag, str(number))
            for number, tag in enumerate((CRASHES, PLAIN, LARGE, REFUSED))
        ]
        futures.append(compiler.compile(StructuredOutputsParams(regex="[a-f]+"), client="4"))
        errors = [future.exception(TIMEOUT_S) for future in futures]
        assert compiler.submit(NEXT).result(TIMEOUT_S)
    assert all(isinstance(error, PdserveError | None) for error in errors)
    compiler.close()
    assert value(DEFECTS) - num_defects == fault.has_raised


MASK_SITES = call_sites(
    StructuredOutputManager,
    "_match",
    "_make_mask",
    "_do",
    "_accept",
    "_accept_one",
    "_find_forced",
    "_masks_behind",
    "_fill",
)


@each_site(MASK_SITES)
def test_the_masks(site: CallSite, compile_format: Callable[..., CompiledGrammar]) -> None:
    grammar = compile_format({"type": "regex", "pattern": "[0-9]+"})
    manager = StructuredOutputManager(VOCAB_SIZE)
    manager.encode = lambda text: [1] * len(text)
    digit = grammar.tokenizer_info.vocabulary.index(b"5")

    def take(row: int) -> PdserveError | None:
        def taken() -> Any:
            masks = manager.take([row])
            assert masks is not None
            return None if masks.late else masks

        return wait_until(taken).errors.get(0)

    with fault_at(site):
        manager.add(0, grammar, [])
        error = take(0)
        manager.look_ahead(0, [digit, digit])
        manager.accept({0: [digit]})
        manager.forced([0])
        error = take(0) or error
    assert error is None or error.code is RequestFailedError("").code
    # Another row of the same thread.
    manager.add(1, grammar, [digit])
    assert take(1) is None
    assert manager.close()
