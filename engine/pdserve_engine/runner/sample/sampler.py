"""What becomes of a step's hidden states: a protocol, and sampling on the host."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pdserve_common.types.engine import LogprobsLists
from pdserve_engine.grammar.manager import TokenMasks
from pdserve_engine.request.sched_output import ModelRunnerOutput
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.runner.run.step_arrays import StepArrays, by_request
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.logprobs import compute_logprobs
from pdserve_engine.sampling.state import NO_LOGPROBS, SampledTokens, errors_of_masks
from pdserve_kernels.sampling_batch import Argmax

# Prompts that ask for logprobs have the logits of so many rows in memory at a time, and so many
# numbers (64 MiB).
MAX_PROMPT_LOGITS_ROWS = 256
MAX_PROMPT_LOGITS = 1 << 24

Forward = Callable[[StepArrays], torch.Tensor]


class Sampler(Protocol):
    """Makes a step's output. The model is handed in with each call: a sleep gives it back."""

    @property
    def may_be_late(self) -> bool:
        """May a request of a step have got no token in the step before?"""

    def compute(self, model: Any, step: StepArrays, forward: Forward) -> ModelRunnerOutput:
        """Return the output of a step whose hidden states `forward` brings. When it is there, the
        device has finished.
        """


class TokenSampler:
    """Samples on the host, with all that requests can ask for."""

    def __init__(self, batch: InputBatch, device: torch.device) -> None:
        self._batch = batch
        self._device = device

    @property
    def may_be_late(self) -> bool:
        """See Sampler."""
        return self._batch.sampling.grammars.num_rows > 0

    def compute(self, model: Any, step: StepArrays, forward: Forward) -> ModelRunnerOutput:
        """See Sampler."""
        hidden_states = forward(step)
        head = self._head(model)
        prompt_logprobs = self._prompt_logprobs(head, step, hidden_states)
        if len(step.logits_rows):
            return self._sample(head, step, hidden_states, prompt_logprobs)
        return self._output_without_tokens(step, prompt_logprobs)

    def _head(self, model: Any) -> Any:
        """Return what makes logits of hidden rows, and chooses among tokens."""
        return model

    def _sample(
        self,
        head: Any,
        step: StepArrays,
        hidden_states: torch.Tensor,
        prompt_logprobs: dict[str, LogprobsLists],
    ) -> ModelRunnerOutput:
        hidden_rows, rows = self._to_device(step.hidden_rows), step.logits_rows
        masks = self._batch.sampling.take_masks(rows)
        if masks is not None and masks.late:
            on_time = np.setdiff1d(np.arange(len(rows)), masks.late)
            masks, rows = masks.select(on_time.tolist()), rows.select(on_time)
            hidden_rows = hidden_rows[self._to_device(on_time)]
        if not len(rows):
            return self._output_without_tokens(step, prompt_logprobs)
        if len(hidden_rows) < len(hidden_states):
            hidden_states = hidden_states[hidden_rows]
        sampled = self.choose(head, hidden_states, rows, masks).accepted()
        self._batch.append_tokens(sampled.rows, sampled.token_ids)
        return by_request(step, sampled, prompt_logprobs)

    def _output_without_tokens(
        self, step: StepArrays, prompt_logprobs: dict[str, LogprobsLists]
    ) -> ModelRunnerOutput:
        self._synchronize()
        return ModelRunnerOutput(
            request_ids=step.request_ids,
            sampled_token_ids=((),) * len(step.request_ids),
            prompt_logprobs=prompt_logprobs,
        )

    def choose(
        self, head: Any, hidden_states: torch.Tensor, rows: LogitsRows, masks: TokenMasks | None
    ) -> SampledTokens:
        """Return a token for each of `rows`, whose hidden states are [n, hidden_size] in the
        model's dtype.
        """
        batch = self._batch
        if batch.sampling.is_greedy(rows):
            mask = None if masks is None else self._to_device(masks.bitmask)
            return sampled_of(head.choose_greedily(hidden_states, mask=mask), rows, masks)
        logits = head.compute_logits(hidden_states)
        return batch.sampling.sample(logits, rows, batch.output_token_ids, masks)

    def _prompt_logprobs(
        self, head: Any, step: StepArrays, hidden_states: torch.Tensor
    ) -> dict[str, LogprobsLists]:
        """Score the prompt tokens that follow the computed ones, for the requests that ask."""
        logprobs: dict[str, LogprobsLists] = {}
        num_top = self._batch.sampling.num_prompt_logprobs[step.rows]
        for index in np.flatnonzero(num_top != NO_LOGPROBS).tolist():
            targets = self._batch.prompt_targets(int(step.rows[index]), int(step.query_lens[index]))
            if len(targets):
                start = int(step.starts[index])
                logprobs[step.request_ids[index]] = self._score(
                    head, hidden_states[start : start + len(targets)], targets, int(num_top[index])
                )
        return logprobs

    def _score(
        self, head: Any, hidden_states: torch.Tensor, targets: Rows, num_top: int
    ) -> LogprobsLists:
        """Return the logprobs of `targets`; logits are in memory for some rows at a time only."""
        max_rows = MAX_PROMPT_LOGITS // head.config.vocab_size
        step = max(1, min(max_rows, MAX_PROMPT_LOGITS_ROWS))
        chosen = self._to_device(targets)
        pieces = (
            compute_logprobs(
                head.compute_logits(hidden_states[start : start + step]),
                chosen[start : start + step],
                num_top,
            )
            for start in range(0, len(targets), step)
        )
        return LogprobsLists.join(pieces)

    def _to_device(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _synchronize(self) -> None:
        synchronize(self._device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sampled_of(best: Argmax, rows: LogitsRows, masks: TokenMasks | None) -> SampledTokens:
    """Return the tokens of rows of which nothing else is asked. Waits for the device."""
    token_ids, num_nans = best.token_ids.cpu().numpy(), best.num_nans.cpu().numpy()
    return SampledTokens(rows, token_ids, {}, errors_of_masks(masks, token_ids), num_nans)
