"""The parameters of one request that ban, allow or favour tokens by their ids."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.sampling.processors import LogitsProcessorFactory, ProcessorChain


class TokenRules:
    """allowed_token_ids, bad_words, min_tokens, logit_bias and logits processors, in this order."""

    def __init__(
        self,
        params: SamplingParams,
        end_token_ids: tuple[int, ...],
        *,
        vocab_size: int,
        device: torch.device,
        factories: Mapping[str, LogitsProcessorFactory],
    ) -> None:
        self._min_tokens = params.min_tokens
        self._end_token_ids = end_token_ids
        self._bad_words = params.bad_words_token_ids
        self._longest_prefix = max(map(len, self._bad_words), default=1) - 1
        self._allowed_ids = torch.tensor(params.allowed_token_ids, dtype=torch.int64, device=device)
        biases = tuple(params.logit_bias.values())
        self._biased_ids = torch.tensor(tuple(params.logit_bias), dtype=torch.int64, device=device)
        self._biases = torch.tensor(biases, dtype=torch.float32, device=device)
        self._processors: ProcessorChain | None = None
        if params.logits_processors:
            self._processors = ProcessorChain(params, vocab_size, factories)

    @staticmethod
    def are_asked_for(params: SamplingParams) -> bool:
        return bool(
            params.allowed_token_ids
            or params.bad_words_token_ids
            or params.min_tokens
            or params.logit_bias
            or params.logits_processors
        )

    def apply(self, logits: torch.Tensor, output_token_ids: npt.NDArray[np.int64]) -> bool:
        """Change fp32 logits [vocab_size] in place; return whether any token may be banned by it.

        `output_token_ids` are all that the request has. Raises LogitsProcessorError.
        """
        if len(self._allowed_ids):
            allowed = logits[self._allowed_ids]
            logits.fill_(-torch.inf)
            logits[self._allowed_ids] = allowed
        banned = self._banned(output_token_ids)
        if banned:
            logits[banned] = -torch.inf
        if len(self._biased_ids):
            logits[self._biased_ids] += self._biases
        if self._processors is not None:
            self._processors.apply(output_token_ids.tolist(), logits)
        return bool(banned or len(self._allowed_ids) or self._processors)

    def _banned(self, output_token_ids: npt.NDArray[np.int64]) -> list[int]:
        banned: list[int] = []
        if len(output_token_ids) < self._min_tokens:
            banned += self._end_token_ids
        if self._bad_words:
            first = max(0, len(output_token_ids) - self._longest_prefix)
            tail = tuple(output_token_ids[first:].tolist())
            banned += (word[-1] for word in self._bad_words if _ends_with(tail, word[:-1]))
        return banned


def _ends_with(token_ids: Sequence[int], suffix: Sequence[int]) -> bool:
    return not suffix or token_ids[-len(suffix) :] == suffix
