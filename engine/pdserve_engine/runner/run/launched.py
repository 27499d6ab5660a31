"""A step on CUDA that was launched: its results are on their way to the host."""

from typing import Any

import torch

from pdserve_engine.request.sched_output import ModelRunnerOutput
from pdserve_engine.runner.run.step_arrays import StepArrays, by_request
from pdserve_engine.sampling.logits_rows import Rows
from pdserve_engine.sampling.logprobs import LogprobsTerms, RowLogprobs
from pdserve_engine.sampling.state import SampledTokens
from pdserve_kernels.triton.staging import pinned


class LaunchedStep:
    """See AsyncModelRunnerOutput."""

    def __init__(
        self,
        step: StepArrays,
        generations: Rows,
        results: torch.Tensor | None,
        logprobs: RowLogprobs | None = None,
    ) -> None:
        """results are int64 [2, n] or wider: the token of each of n rows of logits, and its NaN."""
        self.step = step
        self.generations = generations
        self._results: torch.Tensor | None = None
        if results is not None:
            self._results = _send(results)[:, : len(step.logits_rows)]
        self._logprobs: RowLogprobs | None = None
        if logprobs is not None:
            terms = tuple(LogprobsTerms(*map(_send, each)) for each in logprobs.terms)
            self._logprobs = logprobs._replace(terms=terms)
        self._is_over: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._is_over.record()

    def is_over(self) -> bool:
        return bool(self._is_over.query())

    def token_ids(self) -> Rows:
        """Wait for the tokens of `step.logits_rows`, int64 [n]."""
        self._is_over.synchronize()
        assert self._results is not None
        return self._results[0].numpy()

    def get_output(self) -> ModelRunnerOutput:
        """See AsyncModelRunnerOutput."""
        step = self.step
        self._is_over.synchronize()
        if self._results is None:
            return ModelRunnerOutput(
                request_ids=step.request_ids, sampled_token_ids=((),) * len(step.request_ids)
            )
        token_ids, num_nans = self._results.numpy()
        logprobs = {} if self._logprobs is None else self._logprobs.by_index()
        sampled = SampledTokens(step.logits_rows, token_ids, logprobs, {}, num_nans)
        return by_request(step, sampled, {})


def _send(results: torch.Tensor) -> torch.Tensor:
    """Begin to copy a tensor to the host, behind what computes it."""
    host = pinned(results.nbytes, results.device).view(results.dtype).view(results.shape)
    return host.copy_(results, non_blocking=True)
