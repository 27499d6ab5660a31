"""What each request asks of the sampler, one row per request, and sampling a step's rows."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve_common.errors import InvalidRequestError, PdserveError, RequestFailedError
from pdserve_common.types.engine import EngineError, LogprobsLists
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.grammar.manager import StructuredOutputManager, TokenMasks
from pdserve_engine.request.sched_output import NewRequestData
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.logprobs import RowLogprobs, launch_logprobs
from pdserve_engine.sampling.penalties import Penalties
from pdserve_engine.sampling.processors import (
    NO_PROCESSORS,
    LogitsProcessorError,
    LogitsProcessorFactory,
)
from pdserve_engine.sampling.rules import TokenRules
from pdserve_kernels import select
from pdserve_kernels.reference.sampling.masks import mask_logits
from pdserve_kernels.sampling_batch import (
    MASK_BITS,
    PenalizedTokens,
    SamplingBatch,
    num_mask_words,
)

# In num_logprobs and num_prompt_logprobs; 0 asks for the chosen token's alone.
NO_LOGPROBS = -1
# What a request gets that cannot be sampled: a valid id, which nobody will see.
DUMMY_TOKEN_ID = 0


class SampledTokens(NamedTuple):
    """One token for each of n rows of logits; the dicts are by index into those rows."""

    rows: LogitsRows
    # [n] int64
    token_ids: Rows
    # One position each, of the rows that ask for logprobs and have no error.
    logprobs: dict[int, LogprobsLists]
    # Why a row could not be sampled; its token is a dummy.
    errors: dict[int, EngineError]
    # [n] int64: NaN in each row's logits, before any parameter.
    num_nans: Rows

    def accepted(self) -> "SampledTokens":
        """Leave out the rows that assume other tokens than were sampled, and of those that could
        not be sampled all that assume any.
        """
        if not self.rows.assumed:
            return self
        broken = self.errors.keys() | set(np.flatnonzero(self.num_nans).tolist())
        indexes = self.rows.accepted(self.token_ids, broken)
        places = {old: new for new, old in enumerate(indexes.tolist())}
        return SampledTokens(
            self.rows.select(indexes),
            self.token_ids[indexes],
            {places[i]: lists for i, lists in self.logprobs.items() if i in places},
            {places[i]: error for i, error in self.errors.items() if i in places},
            self.num_nans[indexes],
        )


class SamplingState:
    """Sampling parameters and token counts of up to max_num_seqs requests.

    A request's tokens and logprobs depend on its own logits and parameters only, to the bit. Rows
    without a feature cost nothing for it.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        logits_processors: Mapping[str, LogitsProcessorFactory] = NO_PROCESSORS,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._kernels = select(device)
        self._logits_processors = logits_processors
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float64)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self._has_rules = np.zeros(max_num_seqs, dtype=np.bool_)
        self._wants_logits = np.zeros(max_num_seqs, dtype=np.bool_)
        self._looks_back = np.zeros(max_num_seqs, dtype=np.bool_)
        self._rules: dict[int, TokenRules] = {}
        self._penalties = Penalties(max_num_seqs=max_num_seqs, kernels=self._kernels)
        self.grammars = StructuredOutputManager(vocab_size)

    def add(self, row: int, request: NewRequestData) -> None:
        """Take in a request that has all_token_ids so far."""
        self._write_row(row, request)
        params = request.sampling_params
        self._penalties.add(row, params, request.all_token_ids, request.num_prompt_tokens)
        if self._has_rules[row]:
            self._rules[row] = self._make_rules(params, request.eos_token_id)
        if request.grammar is not None:
            output_token_ids = request.all_token_ids[request.num_prompt_tokens :]
            self.grammars.add(row, request.grammar, output_token_ids)

    def _write_row(self, row: int, request: NewRequestData) -> None:
        """Write down what a request asks for, but for what is made of it."""
        params = request.sampling_params
        self._temperature[row] = params.temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        # The key is 64 bits; arrays are signed.
        self._seeds[row] = np.uint64(request.seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        self._num_logprobs[row] = _count_or_none(params.logprobs)
        self.num_prompt_logprobs[row] = _count_or_none(params.prompt_logprobs)
        self._has_rules[row] = TokenRules.are_asked_for(params)
        changes_logits = self._has_rules[row] or Penalties.are_asked_by(params)
        has_logprobs = params.logprobs is not None
        self._wants_logits[row] = params.temperature != 0.0 or has_logprobs or changes_logits
        self._looks_back[row] = changes_logits or request.grammar is not None

    def remove(self, row: int) -> None:
        self._num_logprobs[row] = self.num_prompt_logprobs[row] = NO_LOGPROBS
        self._penalties.remove(row)
        self._has_rules[row] = self._looks_back[row] = False
        self._rules.pop(row, None)
        self.grammars.remove(row)

    def append_tokens(self, batch_rows: Rows, token_ids: Rows) -> None:
        """Take in an output token, int64 [n], for each of `batch_rows`, int64 [n], which may be
        there several times.
        """
        self._penalties.count(batch_rows, token_ids)
        if self.grammars.num_rows:
            by_row: dict[int, list[int]] = {}
            for row, token_id in zip(batch_rows.tolist(), token_ids.tolist(), strict=True):
                by_row.setdefault(row, []).append(token_id)
            self.grammars.accept(by_row)

    def take_masks(self, rows: LogitsRows) -> TokenMasks | None:
        """Return what grammars allow next; None if there are none among the rows."""
        return self.grammars.take(rows.batch_rows.tolist(), rows.assumed)

    def looks_back(self, batch_rows: Rows) -> bool:
        """Must the host see the tokens before these rows, int64 [n], to sample them?"""
        return bool(self._looks_back[batch_rows].any())

    def asks_for_logprobs(self, batch_rows: Rows) -> bool:
        """Does one of the rows, int64 [n], want the log-probabilities of its tokens?"""
        return bool((self._num_logprobs[batch_rows] != NO_LOGPROBS).any())

    def launch_logprobs(
        self, logits: torch.Tensor, rows: LogitsRows, token_ids: torch.Tensor
    ) -> RowLogprobs:
        """Compute the log-probabilities that `rows` ask for, from the model's logits
        [n, vocab_size] and the tokens int64 [n] that were chosen, of n >= len(rows); enqueues only.
        """
        num_logprobs = self._num_logprobs[rows.batch_rows]
        indexes = np.flatnonzero(num_logprobs != NO_LOGPROBS)
        num_top, asked = num_logprobs[indexes], self._enqueue(indexes)
        terms = launch_logprobs(logits[asked], token_ids[asked], int(num_top.max()))
        return RowLogprobs(indexes, num_top, tuple(terms))

    def is_greedy(self, rows: LogitsRows) -> bool:
        """Do all these rows want the best token, and nothing else of their logits?"""
        return not self._wants_logits[rows.batch_rows].any()

    def is_unfiltered(self, rows: LogitsRows) -> bool:
        """Do all these rows want any token that is allowed, and nothing else of their logits?"""
        batch_rows = rows.batch_rows
        return not (
            self.asks_for_logprobs(batch_rows)
            or self._has_rules[batch_rows].any()
            or self._penalties.are_asked_for(batch_rows)
            or (self._top_k[batch_rows] > 0).any()
            or (self._top_p[batch_rows] < 1.0).any()
            or (self._min_p[batch_rows] > 0.0).any()
        )

    def sample(
        self,
        logits: torch.Tensor,
        rows: LogitsRows,
        output_token_ids: Callable[[int], Rows],
        masks: TokenMasks | None = None,
    ) -> SampledTokens:
        """Choose a token for each of `rows` from logits [n, vocab_size], in fp32 or the model's
        dtype, which are changed; only of those that `masks` allow, none of which is late.

        `output_token_ids` returns those of a row of the batch. No token counts as the request's
        until `append_tokens` says so. Logprobs are of the logits given, before any parameter. Waits
        for the device.
        """
        batch_rows = rows.batch_rows
        num_nans = self._kernels.count_nans(logits).cpu().numpy()
        asked = np.flatnonzero(self._num_logprobs[batch_rows] != NO_LOGPROBS)
        raw_logits = logits[self._to_device(asked)] if len(asked) else None
        token_ids, errors = self._choose(logits, rows, output_token_ids, masks)
        logprobs: dict[int, LogprobsLists] = {}
        if raw_logits is not None:
            logprobs = self._logprobs(raw_logits, batch_rows, asked, token_ids)
        for index in errors:
            logprobs.pop(index, None)
        return SampledTokens(rows, token_ids, logprobs, errors, num_nans)

    def sample_drafts(
        self, logits: torch.Tensor, rows: LogitsRows, output_token_ids: Callable[[int], Rows]
    ) -> Rows:
        """Choose as `sample` does of logits [n, vocab_size], in fp32 or the model's dtype, but ask
        no grammar: what the tokens, int64 [n], would be if these were the model's logits. Where
        nothing is left to choose it is a dummy.
        """
        token_ids, _ = self._choose(logits, rows, output_token_ids, None)
        return token_ids

    def _choose(
        self,
        logits: torch.Tensor,
        rows: LogitsRows,
        output_token_ids: Callable[[int], Rows],
        masks: TokenMasks | None,
    ) -> tuple[Rows, dict[int, EngineError]]:
        """Return the tokens [n], a dummy for each row that has an error."""
        batch_rows = rows.batch_rows
        if self._has_rules[batch_rows].any() or self._penalties.are_asked_for(batch_rows):
            logits = logits.float()
        mask = None if masks is None else self._to_device(masks.bitmask)
        errors = self._apply_rules(logits, rows, output_token_ids, mask)
        self._penalties.apply(logits, rows)
        token_ids = self._kernels.sample(logits, self.describe(rows), mask=mask).cpu().numpy()
        errors |= errors_of_masks(masks, token_ids)
        token_ids[list(errors)] = DUMMY_TOKEN_ID
        return token_ids, errors

    def warm_up(self, logits: torch.Tensor) -> None:
        """Launch all that requests may ask of the kernels, in each variant that a device may have
        to compile first, given a row of the model's logits [1, vocab_size], in their dtype.
        Enqueues only.
        """
        zero = np.zeros(1, dtype=np.int64)
        plain = self.describe(LogitsRows(zero, zero))
        one = np.ones(1, dtype=np.float32)
        filtered = dataclasses.replace(plain, temperature=one, top_k=zero + 1)
        num_words = num_mask_words(self._vocab_size)
        mask = torch.zeros(1, num_words, dtype=torch.int32, device=logits.device)
        for each in (None, mask):
            self._kernels.argmax(logits, mask=each)
            for batch in (plain, filtered):
                self._kernels.sample(logits, batch, mask=each)
                # Penalties and rules change them in fp32.
                self._kernels.sample(logits.float(), batch, mask=each)
        tokens = PenalizedTokens(zero, zero, repetition=one, reductions=np.zeros_like(one))
        self._kernels.penalize(logits.float(), tokens)
        list(launch_logprobs(logits, self._to_device(zero), 0))

    def describe(self, rows: LogitsRows) -> SamplingBatch:
        """Return what the rows ask of the kernels."""
        batch_rows = rows.batch_rows
        return SamplingBatch(
            temperature=self._temperature[batch_rows],
            top_k=self._top_k[batch_rows],
            top_p=self._top_p[batch_rows],
            min_p=self._min_p[batch_rows],
            seeds=self._seeds[batch_rows],
            positions=rows.positions,
        )

    def _apply_rules(
        self,
        logits: torch.Tensor,
        rows: LogitsRows,
        output_token_ids: Callable[[int], Rows],
        mask: torch.Tensor | None,
    ) -> dict[int, EngineError]:
        """Change the logits; return the errors of rows of which nothing is left to choose."""
        errors: dict[int, EngineError] = {}
        constrained: list[int] = []
        for index in np.flatnonzero(self._has_rules[rows.batch_rows]).tolist():
            row = int(rows.batch_rows[index])
            before = output_token_ids(row)
            if index in rows.assumed:
                before = np.append(before, rows.assumed[index])
            try:
                if self._rules[row].apply(logits[index], before):
                    constrained.append(index)
            except LogitsProcessorError as error:
                errors[index] = error.to_engine_error()
        if constrained:
            left = [_masked_row(logits, mask, index) for index in constrained]
            highest = torch.stack([row.amax() for row in left]).tolist()
            for index, value in zip(constrained, highest, strict=True):
                if not math.isfinite(value):
                    errors[index] = _why_unusable(value).to_engine_error()
        return errors

    def _logprobs(
        self, raw_logits: torch.Tensor, batch_rows: Rows, asked: Rows, token_ids: Rows
    ) -> dict[int, LogprobsLists]:
        """Return the logprobs of the rows with indexes `asked`, of which raw_logits are."""
        num_top = self._num_logprobs[batch_rows[asked]]
        chosen = self._to_device(token_ids[asked])
        terms = launch_logprobs(raw_logits, chosen, int(num_top.max()))
        return RowLogprobs(asked, num_top, tuple(terms)).by_index()

    def _make_rules(self, params: SamplingParams, eos_token_id: int | None) -> TokenRules:
        end_token_ids = params.stop_token_ids
        if eos_token_id is not None:
            end_token_ids = (*end_token_ids, eos_token_id)
        return TokenRules(
            params,
            end_token_ids,
            vocab_size=self._vocab_size,
            device=self._device,
            factories=self._logits_processors,
        )

    def _to_device(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _enqueue(self, array: Rows) -> torch.Tensor:
        """As `_to_device`, without waiting for the device."""
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


class FollowedSampling(SamplingState):
    """What a rank knows that launches steps with the others, and follows rank 0 in those that look
    back: what requests ask for, but no tokens, processors or grammars.
    """

    def add(self, row: int, request: NewRequestData) -> None:
        """See SamplingState."""
        self._write_row(row, request)

    def append_tokens(self, batch_rows: Rows, token_ids: Rows) -> None:
        """See SamplingState."""


def errors_of_masks(masks: TokenMasks | None, token_ids: Rows) -> dict[int, EngineError]:
    """Return, by row, why it cannot be given its token, token_ids being int64 [n]: the grammar's
    reason, or that the token is none of the grammar's, which happens where the logits of all of
    those are -inf.
    """
    if masks is None:
        return {}
    words = masks.bitmask[np.arange(len(token_ids)), token_ids // MASK_BITS]
    not_allowed = np.flatnonzero(words >> (token_ids % MASK_BITS) & 1 == 0)
    none_left = _why_unusable(-math.inf).to_engine_error()
    return dict.fromkeys(not_allowed.tolist(), none_left) | masks.errors


def _masked_row(logits: torch.Tensor, mask: torch.Tensor | None, index: int) -> torch.Tensor:
    row = slice(index, index + 1)
    return logits[row] if mask is None else mask_logits(logits[row], mask[row])


def _count_or_none(num_logprobs: int | None) -> int:
    return NO_LOGPROBS if num_logprobs is None else num_logprobs


def _why_unusable(highest: float) -> PdserveError:
    if highest == -math.inf:
        return InvalidRequestError(
            "no token is left to choose: allowed_token_ids, bad_words, min_tokens, "
            "logits_processors and structured_outputs ban all of them behind this answer",
        )
    return RequestFailedError(
        f"the highest logit is {highest} after the request's parameters were applied"
    )
