"""What a pooling request asks for, and which tasks there are (vLLM V1's `pooling_params.py`)."""

from dataclasses import dataclass
from typing import Literal

GENERATE = "generate"
# What PoolingParams ask for: a text's embedding, a number for each label, or the one number of a
# model with one label.
PoolingTask = Literal["embed", "classify", "score"]
EMBED: PoolingTask = "embed"
CLASSIFY: PoolingTask = "classify"
SCORE: PoolingTask = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What a pooling (embedding, classification, scoring) request wants back."""

    # One of PoolingTask; a worker refuses others.
    task: str
    # The leading dimensions of an embedding that are kept, before it is scaled to unit length;
    # None: all.
    dimensions: int | None = None
    # Embeddings: scale to unit length. Classes and scores: logits become probabilities. None: the
    # model's default.
    use_activation: bool | None = None
