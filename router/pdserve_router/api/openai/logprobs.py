"""Log-probabilities as OpenAI's endpoints show them."""

from collections.abc import Sequence
from typing import Any

from pdserve_common.types.engine import LogprobsLists
from pdserve_router.text.detokenizer import Detokenizer
from pdserve_router.text.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI says instead.
MIN_LOGPROB = -9999.0


def chat_logprobs(logprobs: LogprobsLists, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `logprobs` of a choice of /v1/chat/completions."""
    content = []
    for token_ids, values in zip(logprobs.logprob_token_ids, logprobs.logprobs, strict=True):
        chosen, *top = (
            _chat_token(token_id, value, tokenizer)
            for token_id, value in zip(token_ids, values, strict=True)
        )
        content.append({**chosen, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        # A character may be spread over several tokens: their bytes join to it.
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """`logprobs` of one text of /v1/completions; its text offsets go on from part to part."""

    __slots__ = ("_detokenizer", "_num_chars", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, detokenizer: Detokenizer, *, first_offset: int = 0
    ) -> None:
        """`detokenizer` makes the text, which begins at `first_offset`."""
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._num_chars = first_offset

    def write(self, token_ids: Sequence[int], logprobs: LogprobsLists) -> dict[str, list[Any]]:
        """Return the next tokens, each with its position."""
        rows = list(zip(logprobs.logprob_token_ids, logprobs.logprobs, strict=True))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [_finite(values[0]) if values else None for _, values in rows],
            "top_logprobs": [self._top(*row) if row[0] else None for row in rows],
            "text_offset": [self._offset(token_id) for token_id in token_ids],
        }

    def _top(self, token_ids: Sequence[int], values: Sequence[float]) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, value in zip(token_ids, values, strict=True):
            # The chosen token may be among the others again.
            top.setdefault(self._name(token_id), _finite(value))
        return top

    def _name(self, token_id: int) -> str:
        """Return a token's text; of one that holds a part of a character its bytes, in OpenAI's
        way of writing them: as a key, it must not be any other token's too.
        """
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _offset(self, token_id: int) -> int:
        """Return where the token begins in the text, and step over it. Characters count from where
        they are complete.
        """
        offset = self._num_chars
        self._num_chars += len(self._detokenizer.push(token_id))
        return offset


def prompt_logprobs_object(
    logprobs: LogprobsLists, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each prompt token its alternatives by token id."""
    rows = zip(
        logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks, strict=True
    )
    return [_alternatives(*row, tokenizer) if row[0] else None for row in rows]


def _alternatives(
    token_ids: Sequence[int], values: Sequence[float], rank: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    # The actual token is first, the others are in the order of their ranks.
    ranks = (rank, *range(1, len(token_ids)))
    return {
        str(token_id): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, value, rank in zip(token_ids, values, ranks, strict=True)
    }


def _finite(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob)
