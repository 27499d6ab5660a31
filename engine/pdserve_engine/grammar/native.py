"""xgrammar, as much of it as is used here: the only module that imports it.

Its Python package would bring in torch and transformers, 3 s for what takes 0.2 s; its classes are
in a library that is loaded without them.
"""

import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

# One row of a mask: a set bit allows a token, the lowest bit of the first word that of id 0.
Bitmask = npt.NDArray[np.int32]
_NO_IDS: Mapping[str, int] = MappingProxyType({})


def xgrammar_version() -> str | None:
    """Return the version that is installed, None if there is none."""
    try:
        return importlib.metadata.version("xgrammar")
    except importlib.metadata.PackageNotFoundError:
        return None


class TokenizerInfo:
    """A model's vocabulary as grammars see it."""

    def __init__(self, handle: Any, added_token_ids: Mapping[str, int] = _NO_IDS) -> None:
        self.handle = handle
        # By their text. Not serialized: what is compiled has their ids.
        self.added_token_ids = added_token_ids

    @classmethod
    def make(
        cls,
        vocabulary: Sequence[bytes],
        stop_token_ids: Sequence[int],
        added_token_ids: Mapping[str, int] = _NO_IDS,
    ) -> "TokenizerInfo":
        """`vocabulary` has the bytes of each token; empty for those that never fit. At the end of a
        grammar only `stop_token_ids` do.
        """
        raw, add_prefix_space = 0, False  # the bytes are what they are
        handle = _bindings().TokenizerInfo(
            list(vocabulary), raw, len(vocabulary), list(stop_token_ids), add_prefix_space
        )
        return cls(handle, added_token_ids)

    @classmethod
    def deserialize(cls, text: str) -> "TokenizerInfo":
        return cls(_bindings().TokenizerInfo.deserialize_json(text))

    def serialize(self) -> str:
        return str(self.handle.serialize_json())

    @property
    def vocabulary(self) -> list[bytes]:
        """The bytes of each token; makes them anew."""
        return [bytes(token) for token in self.handle.decoded_vocab()]

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset(self.handle.stop_token_ids())

    @property
    def vocab_size(self) -> int:
        return int(self.handle.vocab_size())


class CompiledGrammar:
    """What matchers of one grammar share; it does not change."""

    def __init__(self, handle: Any, num_bytes: int, first_mask_s: float = 0.0) -> None:
        """`num_bytes` is what it takes in memory, `first_mask_s` the CPU time of the mask of an
        empty text.
        """
        self.handle = handle
        self.num_bytes = num_bytes
        self.first_mask_s = first_mask_s

    @classmethod
    def of(cls, handle: Any, first_mask_s: float = 0.0) -> "CompiledGrammar":
        return cls(handle, int(handle.memory_size_bytes()), first_mask_s)

    @classmethod
    def deserialize(
        cls, text: str, tokenizer_info: TokenizerInfo, first_mask_s: float = 0.0
    ) -> "CompiledGrammar":
        """Raises RuntimeError if it is of another tokenizer or another version."""
        handle = _bindings().CompiledGrammar.deserialize_json(text, tokenizer_info.handle)
        return cls.of(handle, first_mask_s)

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """What it was compiled for, without the ids of added tokens."""
        return TokenizerInfo(self.handle.tokenizer_info())

    def serialize(self) -> str:
        """Its time and length grow with the square of the number of rules: each repeats all."""
        return str(self.handle.serialize_json())


class Matcher:
    """Where one text is in a grammar. Not thread-safe; calls release the GIL."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        stop_token_ids = default_temperature = None
        unlimited = -1
        terminate_without_stop_token = False
        self._handle = _bindings().GrammarMatcher(
            grammar.handle,
            stop_token_ids,
            terminate_without_stop_token,
            unlimited,
            default_temperature,
        )

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False, and nothing changes, if it does not fit."""
        return bool(self._handle.accept_token(token_id, False))

    def fill(self, bitmask: Bitmask) -> None:
        """Write which tokens fit next into an int32 [ceil(vocab_size / 32)]."""
        self._handle.fill_next_token_bitmask(bitmask, 0, False)

    def rollback(self, num_tokens: int) -> None:
        """Go back to where the text was before its last tokens."""
        self._handle.rollback(num_tokens)

    @property
    def is_terminated(self) -> bool:
        """Has a stop token ended the text?"""
        return bool(self._handle.is_terminated())


def compile_structural_tag(text: str, tokenizer_info: TokenizerInfo) -> CompiledGrammar:
    """Releases the GIL. Raises RuntimeError with the library's reason for what is no grammar, or
    one of no text. May take any time and memory, and end the process.
    """
    # What it caches are rules that several schemas have: strings, numbers.
    num_threads, caches, cache_bytes = 1, True, -1
    compiler = _bindings().GrammarCompiler(tokenizer_info.handle, num_threads, caches, cache_bytes)
    grammar = CompiledGrammar.of(compiler.compile_structural_tag(text))
    bitmask = np.zeros(-(-tokenizer_info.vocab_size // 32), np.int32)
    matcher = Matcher(grammar)
    start = time.thread_time()
    matcher.fill(bitmask)
    grammar.first_mask_s = time.thread_time() - start
    if not bitmask.any():
        raise RuntimeError("no text of the model's tokens fits it")
    return grammar


def _bindings() -> Any:
    if "xgrammar" not in sys.modules:
        sys.modules["xgrammar"] = _bare_package()
        importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.tvm_ffi_binding._ffi_api")


def _bare_package() -> ModuleType:
    spec = importlib.util.find_spec("xgrammar")
    if spec is None:
        raise ImportError("xgrammar is not installed")
    return importlib.util.module_from_spec(spec)
