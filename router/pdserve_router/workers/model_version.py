"""Where an answer's tokens come from: told to the client, so that another router knows who may go
on with it.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.engine import EngineInfo
from pdserve_common.types.lora import LoRARequest

_FORM = re.compile(r"([0-9a-f]{16})(?:-([0-9a-f]{16}))?(?:\.([0-9a-f]{16}))?")

# How many of a digest's.
ADAPTER_CHARS = 16


class ModelVersion(NamedTuple):
    """What an answer depends on, as digests; an unknown one is empty."""

    # The digest of the weights, and of what else makes another model: how EngineInfo.weights_digest
    # begins.
    weights: str = ""
    # The digest of what has to be alike for the same bits; empty if the worker is not exact.
    numerics: str = ""
    # The digest of the request's LoRA adapter; empty if it has none.
    adapter: str = ""

    @classmethod
    def of(cls, info: EngineInfo) -> "ModelVersion":
        is_exact = info.determinism == "exact"
        return cls(info.weights_digest[:16], _digest(info.numerics_id) if is_exact else "")

    @classmethod
    def parse(cls, text: str) -> "ModelVersion":
        """Return what `str` has told a client. Raises InvalidRequestError."""
        if not text:
            return UNKNOWN
        if (match := _FORM.fullmatch(text)) is None:
            raise InvalidRequestError(
                f"resume.model_version is {text[:64]!r} ({len(text)} characters), must be as the "
                "broken answer told it, 16 to 50 characters",
                field="resume.model_version",
            )
        return cls(match[1], match[2] or "", match[3] or "")

    def with_adapter(self, lora: LoRARequest | None) -> "ModelVersion":
        """Return that of a worker's answer to a request with this adapter."""
        return self if lora is None else self._replace(adapter=lora.digest[:ADAPTER_CHARS])

    @property
    def model(self) -> str:
        """What it says of the worker alone."""
        return f"{self.weights}-{self.numerics}" if self.numerics else self.weights

    def __str__(self) -> str:
        return f"{self.model}.{self.adapter}" if self.adapter else self.model

    @property
    def determinism(self) -> str:
        """ "exact": wherever it is this, tokens are the same bit by bit; else "consistent"."""
        return "exact" if self.numerics else "consistent"


UNKNOWN = ModelVersion()


def joined(versions: Iterable[ModelVersion]) -> ModelVersion:
    """Return the model version of an answer that several workers, all of the same weights as far as
    they are known, have part in, with the request's one adapter.
    """
    parts = set(versions)
    weights = max((part.weights for part in parts), default="")
    numerics = {part.numerics for part in parts}
    adapter = max((part.adapter for part in parts), default="")
    return ModelVersion(weights, numerics.pop() if len(numerics) == 1 else "", adapter)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
