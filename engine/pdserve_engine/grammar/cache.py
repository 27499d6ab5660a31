"""Compiled grammars that are kept, by the digest of their text."""

from collections import OrderedDict

from pdserve_engine.grammar.native import CompiledGrammar


class GrammarCache:
    """The latest used grammars of at most `max_bytes`. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, digest: str) -> CompiledGrammar | None:
        if digest in self._grammars:
            self._grammars.move_to_end(digest)
        return self._grammars.get(digest)

    def put(self, digest: str, grammar: CompiledGrammar) -> None:
        """Keep a grammar, instead of one that is kept with this digest, and forget those that
        leave no room for it. Those who use one of these still have it.
        """
        if (replaced := self._grammars.pop(digest, None)) is not None:
            self._num_bytes -= replaced.num_bytes
        self._grammars[digest] = grammar
        self._num_bytes += grammar.num_bytes
        while self._num_bytes > self._max_bytes:
            _, forgotten = self._grammars.popitem(last=False)
            self._num_bytes -= forgotten.num_bytes
