"""What a logits processor is: code that others install and that requests name."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from pdserve_common.errors import RequestFailedError
from pdserve_common.types.sampling_params import SamplingParams


class LogitsProcessor(Protocol):
    """Changes the logits of one request before its next token is chosen.

    It runs after allowed_token_ids, bad_words, min_tokens and logit_bias, before the penalties and
    the temperature, for greedy requests too. It should be a function of its arguments: a request
    that was preempted, or that moved to another worker, gets a new processor in mid-text.
    """

    def __call__(self, output_token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits to choose from: fp32 [vocab_size] on the device of `logits`.

        `logits` are fp32 [vocab_size], a copy that may be changed and returned; -inf bans a token.
        `output_token_ids` are the tokens generated so far, without the prompt. Runs in torch's
        inference mode, on the thread that runs the model. What it raises ends this request only.
        """
        ...


# Makes the processor of one request from its parameters and the vocabulary's size.
LogitsProcessorFactory = Callable[[SamplingParams, int], LogitsProcessor]

NO_PROCESSORS: Mapping[str, LogitsProcessorFactory] = MappingProxyType({})


class LogitsProcessorError(RequestFailedError):
    """A processor failed on a request; the message names it and says how. Not retryable."""


class ProcessorChain:
    """The processors of one request, in the order it names them."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        factories: Mapping[str, LogitsProcessorFactory],
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._factories = factories
        self._processors: dict[str, LogitsProcessor] = {}

    def apply(self, output_token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Change fp32 logits [vocab_size] in place. Raises LogitsProcessorError."""
        for name in self._params.logits_processors:
            try:
                result = self._run(name, output_token_ids, logits.clone())
            except Exception as error:  # foreign code, which may raise anything
                raise LogitsProcessorError(f"logits processor {name}: {error!r}") from error
            logits.copy_(result)

    def _run(
        self, name: str, output_token_ids: Sequence[int], logits: torch.Tensor
    ) -> torch.Tensor:
        if name not in self._processors:
            self._processors[name] = self._factories[name](self._params, self._vocab_size)
        result = self._processors[name](output_token_ids, logits)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"returned {type(result).__name__}, not a tensor")
        if result.dtype != logits.dtype or result.shape != logits.shape:
            raise ValueError(
                f"returned {result.dtype} {list(result.shape)}, "
                f"must be {logits.dtype} {list(logits.shape)}"
            )
        return result
