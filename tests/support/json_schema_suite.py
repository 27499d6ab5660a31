"""JSON-Schema-Test-Suite (github.com/json-schema-org): how many of its schemas are served, and how
many of its valid instances their grammars allow, by keyword.

`PYTHONPATH=tests .venv/bin/python -m support.json_schema_suite SUITE` prints the counts; SUITE is
its folder, or an archive of it.
"""

import json
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.sampling_params import StructuredOutputsParams
from pdserve_engine.grammar.compile_queue import GrammarCompiler
from pdserve_engine.grammar.native import CompiledGrammar, Matcher
from pdserve_engine.grammar.vocabulary import make_encoder, make_tokenizer_info
from support.grammars import EOS, MODEL, VOCAB_SIZE
from support.schemas import dump

DRAFTS = ("draft2020-12", "draft7")
_WAIT_S = 600.0
_COUNTS = ("schemas", "served", "valid", "allowed")

Keyword = str
Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Group:
    """A schema with instances."""

    keyword: Keyword
    description: str
    schema: Any
    # Instances with whether they are valid.
    tests: Sequence[tuple[Any, bool]]


@dataclass(slots=True)
class Outcome:
    """Of one draft. `served` counts schemas that are accepted, `allowed` the valid instances of
    these that their grammars allow; `schemas` and `valid` are what there is.
    """

    counts: dict[Keyword, Counts] = field(default_factory=dict)
    # Instances that are not valid and allowed, with the keyword.
    wrong: list[tuple[Keyword, str]] = field(default_factory=list)


def groups(suite: Path, draft: str) -> Iterator[Group]:
    """Read a draft's groups from the suite, a folder or an archive; keywords are names of files,
    such as `optional/format/date`.
    """
    for name, text in _files(suite, draft):
        for group in json.loads(text):
            tests = [(test["data"], test["valid"]) for test in group["tests"]]
            yield Group(name, group["description"], group["schema"], tests)


def _files(suite: Path, draft: str) -> Iterator[tuple[Keyword, bytes]]:
    if suite.is_dir():
        folder = suite / "tests" / draft
        for path in sorted(folder.rglob("*.json")):
            yield path.relative_to(folder).with_suffix("").as_posix(), path.read_bytes()
        return
    with tarfile.open(suite) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            _, _, inside = f"/{member.name}".partition(f"/tests/{draft}/")
            if inside.endswith(".json"):
                file = archive.extractfile(member)
                assert file is not None
                yield PurePosixPath(inside).with_suffix("").as_posix(), file.read()


class Suite:
    """Asks as a router and a worker do: constraints are read, compiled in the compiler's process,
    and texts are matched token by token with masks.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        """`compiler` is of the bundled model."""
        self._compiler = compiler
        self._encode = make_encoder(MODEL)
        self._bitmask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)

    def outcome(self, groups: Iterator[Group]) -> Outcome:
        outcome = Outcome()
        for group in groups:
            counts = outcome.counts.setdefault(group.keyword, dict.fromkeys(_COUNTS, 0))
            counts["schemas"] += 1
            counts["valid"] += sum(is_valid for _, is_valid in group.tests)
            try:
                params = StructuredOutputsParams(json_schema=json.dumps(group.schema))
                grammar = self._compiler.compile(params).result(_WAIT_S)
            except InvalidRequestError:
                continue
            counts["served"] += 1
            for value, is_valid in group.tests:
                is_allowed = any(self._allows(grammar, text) for text in _spellings(value))
                counts["allowed"] += is_allowed and is_valid
                if is_allowed and not is_valid:
                    about = f"{group.description}: {json.dumps(group.schema)}"
                    outcome.wrong.append((group.keyword, f"{about} allows {json.dumps(value)}"))
        return outcome

    def _allows(self, grammar: CompiledGrammar, text: str) -> bool:
        """Whether each token is among those of the mask, and an end is at last."""
        matcher = Matcher(grammar)
        return all(
            self._is_in_mask(matcher, token_id) and matcher.accept(token_id)
            for token_id in (*self._encode(text), EOS)
        )

    def _is_in_mask(self, matcher: Matcher, token_id: int) -> bool:
        matcher.fill(self._bitmask)
        return bool(self._bitmask[token_id // 32] >> token_id % 32 & 1)


def _spellings(value: Any) -> set[str]:
    """JSON texts of a value, with escapes and without, with exponents and without."""
    texts = {
        json.dumps(value, separators=(",", ":")),
        json.dumps(value, separators=(",", ":"), ensure_ascii=False),
    }
    return texts | ({plain} if json.loads(plain := dump(value)) == value else set())


KEPT = ("served", "allowed")


def print_counts(outcomes: Mapping[str, Outcome]) -> None:
    """Print the counts that are kept, by draft and keyword."""
    drafts = []
    for draft, outcome in outcomes.items():
        rows = [
            f"    {json.dumps(keyword)}: {json.dumps([counts[name] for name in KEPT])}"
            for keyword, counts in outcome.counts.items()
            if counts["served"]
        ]
        drafts.append(f"  {json.dumps(draft)}: {{\n" + ",\n".join(rows) + "\n  }")
    print("{\n" + ",\n".join(drafts) + "\n}")


def main() -> None:
    suite = Path(sys.argv[1])
    info = make_tokenizer_info(MODEL, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    compiler = GrammarCompiler(info)
    try:
        asked = Suite(compiler)
        print_counts({draft: asked.outcome(groups(suite, draft)) for draft in DRAFTS})
    finally:
        compiler.close()


if __name__ == "__main__":
    main()
