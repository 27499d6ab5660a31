"""Which model a router serves, as far as workers have to agree."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pdserve_common.types.engine import EngineInfo


class ServedModel(NamedTuple):
    """What clients ask for, and what turns their text into tokens."""

    name: str
    # As in `EngineInfo`.
    tokenizer_digest: str

    def mismatch(self, info: EngineInfo) -> str | None:
        """Return why a worker cannot serve it; None if it can. A worker of another model would
        answer all the same, with text that means nothing.
        """
        if info.model != self.name:
            return (
                f"it serves the model {info.model!r}, this router {self.name!r}: both need the "
                "same --model, or --served-model-name"
            )
        digests = {info.tokenizer_digest, self.tokenizer_digest} - {""}
        if len(digests) > 1:
            return (
                f"its tokenizer.json of {info.model!r} is another file than this router's: SHA-256 "
                f"{info.tokenizer_digest[:16]}, here {self.tokenizer_digest[:16]}"
            )
        return None


def labels_of(folder: str) -> Mapping[int, str]:
    """Return the names of a classifier's labels, by their place; none if the model's config has
    none, or is not there.
    """
    path = Path(folder) / "config.json"
    names = json.loads(path.read_text()).get("id2label") if path.is_file() else None
    return {int(place): str(name) for place, name in (names or {}).items()}
