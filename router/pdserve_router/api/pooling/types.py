"""The bodies of requests for vectors, classes and scores: the fields that are served."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, WithJsonSchema

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.pooling_params import PoolingTask
from pdserve_router.api.openai.fields import REFUSED_IN_POOLING, REFUSED_IN_RERANK
from pdserve_router.api.openai.model import CONFIG, PROMPTS_SCHEMA, Int, Items, RequestBody

EncodingFormat = Literal["float", "base64"]


class PoolingBody(RequestBody):
    """The fields that all of them share."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED_IN_POOLING

    model: str | None = None
    """The served model's name; may be left out."""
    use_activation: bool | None = None
    """Embeddings of unit length, classes and scores as probabilities, unless this is false."""
    truncate_prompt_tokens: Int | None = None
    """Only so many tokens of an input count, special tokens included; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a long input is cut: at its end, unless this is left."""
    priority: Int | None = None
    """Lower is first."""
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    request_id: str | None = None
    """The request's name; the header x-request-id goes first."""
    user: Any = None
    """The session, a text of at most 256 characters; the header x-session-id goes first."""


class InputBody(PoolingBody):
    """One input or several."""

    input: Annotated[Any, WithJsonSchema(PROMPTS_SCHEMA)]
    """A text, a list of token ids, or a list of these: several inputs, at most 2048."""
    add_special_tokens: bool | None = None
    """The model's special tokens around an input of text, unless this is false."""


class EmbeddingBody(InputBody):
    """POST /v1/embeddings."""

    encoding_format: EncodingFormat | None = None
    """float, or base64: the numbers as 32-bit floats, lowest byte first."""
    dimensions: Int | None = None
    """So many leading dimensions, of models with Matryoshka embeddings."""


class PoolBody(EmbeddingBody):
    """POST /pooling."""

    task: PoolingTask | None = None
    """What is pooled for: embed, classify or score; the first of these that the model serves."""


class ClassifyBody(InputBody):
    """POST /classify."""


class ScoreBody(PoolingBody):
    """POST /score."""

    text_1: str | Items[str]
    """A text, or several."""
    text_2: str | Items[str]
    """As many; or several that are compared with the one text_1. At most 2048 pairs."""

    def pairs(self) -> list[tuple[str, str]]:
        """Return what is compared. Raises InvalidRequestError."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}, must be as many, or one "
                "in text_1",
                field="text_1",
            )
        return list(zip(first, second, strict=True))


class DocumentBody(BaseModel):
    """A document as an object."""

    model_config = CONFIG

    text: str
    """What it says."""


class RerankBody(PoolingBody):
    """POST /v1/rerank."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **REFUSED_IN_POOLING,
        **REFUSED_IN_RERANK,
    }

    query: str
    """What is looked for."""
    documents: Items[str | DocumentBody]
    """Texts, or objects with a text, at most 2048."""
    top_n: Int | None = None
    """So many results, the best; all if unset, or 0."""
    return_documents: bool | None = None
    """Results have their document, unless this is false."""

    @property
    def texts(self) -> list[str]:
        """The documents'."""
        return [each if isinstance(each, str) else each.text for each in self.documents]
