"""A typical JSON schema, and texts that it allows."""

import json
import random

from pdserve_common.types.sampling_params import StructuredOutputsParams

NUM_RECORDS = 100
WORDS = "Anna Müller river house station engine green quick northern data model server"
KINDS = ["person", "company", "place", "event"]


def schema_of(*, is_bounded: bool) -> dict[str, object]:
    """Return that of an array of `records`."""
    bound = {"maxLength": 24} if is_bounded else {}
    properties: dict[str, object] = {
        "id": {"type": "integer"},
        "name": {"type": "string", **bound},
        "kind": {"enum": KINDS},
        "born": {"type": "string", "format": "date"},
        "is_known": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", **bound}},
        "score": {"type": ["number", "null"]},
    }
    record = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record}


def records(seed: int) -> str:
    """Return a JSON text of more tokens than are timed."""
    rng, words = random.Random(seed), WORDS.split()
    rows = [
        {
            "id": rng.randint(1, 99999),
            "name": " ".join(rng.choices(words, k=2)),
            "kind": rng.choice(KINDS),
            "born": f"{rng.randint(1900, 2020)}-{rng.randint(10, 12)}-{rng.randint(10, 28)}",
            "is_known": rng.random() < 0.5,
            "tags": rng.choices(words, k=rng.randint(0, 3)),
            "score": rng.choice([None, rng.randint(0, 100), round(rng.random(), 3)]),
        }
        for _ in range(NUM_RECORDS)
    ]
    return json.dumps(rows, ensure_ascii=False)


def constraint(*, is_bounded: bool = False) -> StructuredOutputsParams:
    return StructuredOutputsParams(json_schema=json.dumps(schema_of(is_bounded=is_bounded)))
