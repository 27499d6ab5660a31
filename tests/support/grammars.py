"""Grammars for tests: structural tags, the bundled model's vocabulary, and masks as ids."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from pdserve_common.structured import StructuralTag
from pdserve_engine.grammar.native import Bitmask

MODEL = Path(__file__).parents[2] / "models" / "pdserve-tiny"
VOCAB_SIZE = 1392
EOS = 2


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
