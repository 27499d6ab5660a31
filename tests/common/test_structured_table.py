"""The table of JSON schemas: each is enforced, with jsonschema as judge, or refused by name."""

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import to_structural_tag
from pdserve_common.types.sampling_params import StructuredOutputsParams
from support.schema_cases import CASES, REFUSALS, Case, Refusal
from support.schemas import Judge, dump


def test_the_table_is_large() -> None:
    values = [value for case in CASES for value in (*case.valid, *case.invalid, *case.narrower)]
    assert len(values) + len(REFUSALS) >= 700
    assert len({case.keyword for case in (*CASES, *REFUSALS)}) >= 70


def _case_id(case: Case | Refusal) -> str:
    return f"{case.keyword} {json.dumps(case.schema)[:60]}"


@pytest.mark.parametrize("case", CASES, ids=_case_id)
def test_a_schema_is_enforced(case: Case) -> None:
    judge = Judge.of_schema(case.schema)
    for value in case.valid:
        assert _is_valid(case.schema, value), dump(value)
        assert judge.allows(dump(value)), dump(value)
    for value in case.invalid:
        assert not judge.allows(dump(value)), dump(value)
        # No checker of all formats is installed.
        assert "format" in case.schema or not _is_valid(case.schema, value), dump(value)
    for value in case.narrower:
        assert _is_valid(case.schema, value), dump(value)
        assert not judge.allows(dump(value)), dump(value)


def _is_valid(schema: Any, value: Any) -> bool:
    checker = FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
    return Draft202012Validator(schema, format_checker=checker).is_valid(value)


@pytest.mark.parametrize("refusal", REFUSALS, ids=_case_id)
def test_a_schema_is_refused_by_name(refusal: Refusal) -> None:
    place = refusal.pointer or "the root"
    where = f"{refusal.keyword} at {place}" if refusal.keyword else place
    with pytest.raises(InvalidRequestError, match=f"json_schema: {re.escape(where)} ") as error:
        to_structural_tag(StructuredOutputsParams(json_schema=json.dumps(refusal.schema)))
    assert error.value.field == "structured_outputs"


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not re.search(r'"\$(ref|id)"', json.dumps(case.schema))],
    ids=_case_id,
)
def test_a_schema_says_the_same_within_others(case: Case) -> None:
    """As an option, an item and a property."""
    wrapped = {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"anyOf": [case.schema]}},
            "title": case.schema,
        },
    }
    judge = Judge.of_schema(wrapped)
    for value in case.valid:
        assert judge.allows(dump({"list": [value], "title": value})), dump(value)
    for value in (*case.invalid, *case.narrower):
        assert not judge.allows(dump({"list": [value]})), dump(value)
        assert not judge.allows(dump({"title": value})), dump(value)
