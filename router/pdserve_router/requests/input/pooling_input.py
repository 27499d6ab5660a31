"""What a client wants pooled, over whichever API."""

from dataclasses import dataclass

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_router.requests.input.generation_request import ClientRequest
from pdserve_router.text.tokenizer import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInput(ClientRequest):
    """One input, before anything of it is checked: a text, two of them as a pair, or token ids. Of
    one that is truncated the first tokens count, or the last with `keeps_end`.
    """

    pooling_params: PoolingParams
    # Behind `text`, as the model's template puts the two together.
    text_pair: str | None = None
    keeps_end: bool = False

    def cut(self, max_model_len: int) -> Cut | None:
        """Return how it is truncated; None: not at all. Raises InvalidRequestError."""
        most = self.truncate_prompt_tokens
        if most is None:
            return None
        if most != -1 and not 1 <= most <= max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {most}, must be -1 or 1 to {max_model_len}",
                field="truncate_prompt_tokens",
            )
        return Cut(max_model_len if most == -1 else most, self.keeps_end)
