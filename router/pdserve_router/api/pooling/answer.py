"""What becomes of the vectors of one request: OpenAI's, vLLM's and Cohere's answers as JSON."""

import array
import asyncio
import base64
import math
import operator
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from pdserve_router.requests.output.outputs import Usage

Vector = Sequence[float]
# Fields of an answer besides what it is about.
Frame = Mapping[str, object]

# An answer up to this size is joined on the event loop. In a thread Python lets others run from
# here on.
_INLINE_BYTES = 1 << 20


class PoolingAnswer(ABC):
    """Takes vectors as they come, and says what they are in the order of their inputs. What takes
    long is done input by input, so that others are served meanwhile.
    """

    prefix = "pool"

    @abstractmethod
    def take(self, index: int, vector: Vector) -> None:
        """Take the vector of an input."""

    @abstractmethod
    async def body(self, frame: Frame, usage: Usage) -> bytes:
        """Return the answer, once all vectors are there."""


class ListAnswer(PoolingAnswer):
    """A list with an object for each input."""

    def __init__(self, num_inputs: int) -> None:
        self._items = [b""] * num_inputs

    def take(self, index: int, vector: Vector) -> None:
        self._items[index] = to_json(self._item(index, vector))

    async def body(self, frame: Frame, usage: Usage) -> bytes:
        return await _body({**frame, "usage": usage_object(usage)}, "data", self._items)

    @abstractmethod
    def _item(self, index: int, vector: Vector) -> dict[str, Any]:
        """Return what is said of an input."""


class EmbeddingsAnswer(ListAnswer):
    """/v1/embeddings."""

    prefix = "embd"

    def __init__(self, num_inputs: int, *, is_base64: bool) -> None:
        super().__init__(num_inputs)
        self._is_base64 = is_base64

    def _item(self, index: int, vector: Vector) -> dict[str, Any]:
        return {"object": "embedding", "index": index, "embedding": self._encoded(vector)}

    def _encoded(self, vector: Vector) -> Vector | str:
        return _base64(vector) if self._is_base64 else vector


class VectorsAnswer(EmbeddingsAnswer):
    """/pooling."""

    prefix = "pool"

    def _item(self, index: int, vector: Vector) -> dict[str, Any]:
        return {"object": "pooling", "index": index, "data": self._encoded(vector)}


class ClassesAnswer(ListAnswer):
    """/classify."""

    prefix = "classify"

    def __init__(self, num_inputs: int, labels: Mapping[int, str]) -> None:
        super().__init__(num_inputs)
        self._labels = labels

    def _item(self, index: int, vector: Vector) -> dict[str, Any]:
        best = max(range(len(vector)), key=vector.__getitem__)
        return {
            "index": index,
            "label": self._labels.get(best),
            "probs": vector,
            "num_classes": len(vector),
        }


class ScoresAnswer(PoolingAnswer):
    """/score: what a model says of each pair, or how alike the embeddings of two texts are."""

    prefix = "score"

    def __init__(self, num_inputs: int, compared: Sequence[tuple[int, int]] | None) -> None:
        self._compared = compared
        self._vectors: list[array.array[float]] = [array.array("f")] * num_inputs

    def take(self, index: int, vector: Vector) -> None:
        # A tuple takes eight times as much.
        self._vectors[index] = array.array("f", vector)

    async def body(self, frame: Frame, usage: Usage) -> bytes:
        scores = await self._scores()
        items = await _encoded(
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        )
        return await _body({**frame, "usage": usage_object(usage)}, "data", items)

    async def _scores(self) -> list[float]:
        if self._compared is None:
            return [vector[0] for vector in self._vectors]
        norms, scores = [], []
        for vector in self._vectors:
            await asyncio.sleep(0)
            norms.append(math.sqrt(_dot(vector, vector)))
        for first, second in self._compared:
            await asyncio.sleep(0)
            product = _dot(self._vectors[first], self._vectors[second])
            # No direction is like none.
            scores.append(product / ((norms[first] * norms[second]) or 1.0))
        return scores


class RerankAnswer(ScoresAnswer):
    """/rerank: documents, the best first."""

    prefix = "rerank"

    def __init__(
        self,
        num_inputs: int,
        compared: Sequence[tuple[int, int]] | None,
        *,
        documents: Sequence[str],
        top_n: int | None,
        returns_documents: bool,
    ) -> None:
        super().__init__(num_inputs, compared)
        self._documents = documents
        self._top_n = top_n
        self._returns_documents = returns_documents

    async def body(self, frame: Frame, usage: Usage) -> bytes:
        scores = await self._scores()
        ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        results = await _encoded(
            self._result(index, scores[index]) for index in ranked[: self._top_n]
        )
        shown = {"id": frame["id"], "model": frame["model"], "usage": usage_object(usage)}
        return await _body(shown, "results", results)

    def _result(self, index: int, score: float) -> dict[str, Any]:
        document = {"text": self._documents[index]}
        shown = {"document": document} if self._returns_documents else {}
        return {"index": index, **shown, "relevance_score": score}


def frame_of(answer: PoolingAnswer, request_id: str, model: str) -> Frame:
    """Return the fields that say which answer it is."""
    return {
        "id": f"{answer.prefix}-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return what OpenAI tells of requests without output tokens, and what was cached."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "total_tokens": usage.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


async def _encoded(items: Iterable[Mapping[str, object]]) -> list[bytes]:
    encoded = []
    for item in items:
        await asyncio.sleep(0)
        encoded.append(to_json(item))
    return encoded


async def _body(beside: Mapping[str, object], name: str, items: Sequence[bytes]) -> bytes:
    """Return an object with the fields `beside` and, the last one, a list of encoded items."""
    head = to_json(beside).removesuffix(b"}") + f',"{name}":['.encode()
    separated = [part for item in items for part in (b",", item)]
    parts = [head, *separated[1:], b"]}"]
    if sum(map(len, parts)) < _INLINE_BYTES:
        return b"".join(parts)
    return await asyncio.to_thread(b"".join, parts)


def _dot(one: Vector, other: Vector) -> float:
    return float(sum(map(operator.mul, one, other)))


def _base64(vector: Vector) -> str:
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
