"""Grammars for tests: structural tags, the bundled model's vocabulary, and masks as ids."""

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import StructuralTag
from pdserve_common.structured.reasoning import Reasoning
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_engine.grammar.manager import StructuredOutputManager, TokenMasks
from pdserve_engine.grammar.native import Bitmask, CompiledGrammar

MODEL = Path(__file__).parents[2] / "models" / "pdserve-tiny"
VOCAB_SIZE = 1392
EOS = 2

Compile: TypeAlias = Callable[[dict[str, Any]], CompiledGrammar]


def structural_tag(format: dict[str, Any]) -> StructuralTag:
    """Return the tag that is a format, as it is."""
    return with_digest(json.dumps({"type": "structural_tag", "format": format}))


def with_digest(text: str) -> StructuralTag:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return StructuralTag(text=text, digest=digest)


def allowed_ids(bitmask: Bitmask) -> set[int]:
    """Return the ids whose bits are set."""
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    return set(np.flatnonzero(bits).tolist())


class Manager(StructuredOutputManager):
    """A manager whose masks tests wait for."""

    def masks(self, *rows: int) -> TokenMasks:
        for row in rows:
            if row in self._rows:
                self._rows[row].ready.exception(60)
        masks = self.take(rows)
        assert masks is not None
        assert not masks.late
        return masks

    def row(self, row: int) -> Any:
        return self._rows[row]

    def allowed(self, row: int) -> set[int]:
        masks = self.masks(row)
        assert not masks.errors, masks.errors
        return allowed_ids(masks.bitmask[0])

    def forced_of(self, row: int) -> Sequence[int]:
        """Return the tokens that are forced of a row, which are known with its mask."""
        self.masks(row)
        return self.forced([row]).get(row, ())

    def error(self, row: int) -> str:
        return self.masks(row).errors[0].message


def hold_masks(
    manager: StructuredOutputManager, is_over: threading.Event, *, slow_only: bool = False
) -> None:
    """Until the event is set no mask is made, or none of a slow row."""
    for thread in (manager._slow, manager._quick)[: 1 if slow_only else 2]:
        thread.submit(is_over.wait)


class ScriptedCompiler:
    """Compiles what a test says, when it says so; a grammar's name is its regex."""

    GRAMMAR = CompiledGrammar(None, 0)

    def __init__(self) -> None:
        self.futures: dict[str, Future[CompiledGrammar]] = {}
        # Runs before the engine learns whether a grammar is there: it may come just then.
        self.on_look: Callable[[], object] = lambda: None

    def __call__(
        self,
        params: StructuredOutputsParams,
        reasoning: Reasoning | None = None,
        client: str = "",
    ) -> "Future[CompiledGrammar]":
        assert params.regex is not None
        return self._future(params.regex)

    @property
    def compiling(self) -> list[str]:
        """Those that are asked for and not there."""
        return [name for name, future in self.futures.items() if not Future.done(future)]

    def finish(self, name: str) -> None:
        self._future(name).set_result(self.GRAMMAR)

    def refuse(self, name: str) -> None:
        self._future(name).set_exception(InvalidRequestError("no such pattern"))

    def _future(self, name: str) -> "Future[CompiledGrammar]":
        return self.futures.setdefault(name, _WatchedFuture(lambda: self.on_look()))


class _WatchedFuture(Future[CompiledGrammar]):
    def __init__(self, on_look: Callable[[], object]) -> None:
        super().__init__()
        self._on_look = on_look

    def done(self) -> bool:
        self._on_look()
        return super().done()
