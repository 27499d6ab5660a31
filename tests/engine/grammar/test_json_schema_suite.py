"""JSON-Schema-Test-Suite: no fewer of its schemas are served than before, none of them wrongly.

`JSON_SCHEMA_TEST_SUITE` says where it is.
"""

import json
import os
from pathlib import Path

import pytest

from pdserve_engine.grammar.compile_queue import GrammarCompiler
from support.json_schema_suite import DRAFTS, KEPT, Suite, groups

SUITE = "JSON_SCHEMA_TEST_SUITE"
COUNTS = Path(__file__).with_suffix(".json")
# What says nothing about a value: docs/structured_outputs.md names contentEncoding and
# contentMediaType among it.
ANNOTATIONS = {"draft7": {"optional/content"}}


@pytest.mark.skipif(SUITE not in os.environ, reason=f"{SUITE} names no folder or archive of it")
@pytest.mark.parametrize("draft", DRAFTS)
def test_no_fewer_schemas_are_served_and_none_wrongly(
    draft: str, compiler: GrammarCompiler
) -> None:
    outcome = Suite(compiler).outcome(groups(Path(os.environ[SUITE]), draft))
    fewer = [
        f"{keyword}: {name} is {counts[name]}, was {known}"
        for keyword, row in json.loads(COUNTS.read_text())[draft].items()
        for name, known in zip(KEPT, row, strict=True)
        for counts in [outcome.counts[keyword]]
        if counts[name] < known
    ]
    assert not fewer
    exempt = ANNOTATIONS.get(draft, set())
    assert not [each for each in outcome.wrong if each[0] not in exempt]
    assert {keyword for keyword, _ in outcome.wrong} == exempt
