"""Beam search over log-probabilities that come from elsewhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdserve_common.types.engine import LogprobsLists
from pdserve_common.types.sampling_params import EarlyStopping, SamplingParams

_NO_LOGPROBS = LogprobsLists.unknown(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A beginning of an answer."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    # One position per token, with as many top tokens as the client asked for.
    logprobs: LogprobsLists = _NO_LOGPROBS


class _Candidate(NamedTuple):
    """A beam and one token more, the `rank`th (from 0) most likely one behind it."""

    cumulative_logprob: float
    token_id: int
    rank: int
    beam: Beam
    top: LogprobsLists


class BeamSearch:
    """Keeps the `width` likeliest beginnings and ends of an answer, as Hugging Face's beam search
    does. The caller supplies the likeliest next tokens of the running beams, step by step.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        max_tokens: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.width = params.best_of or params.n
        self.num_tokens = 0
        self.running: Sequence[Beam] = (Beam(),)
        # The best first.
        self.finished: Sequence[Beam] = ()
        self._params = params
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids

    @property
    def num_top_tokens(self) -> int:
        """How many next tokens of each beam a step needs, so that `width` of them end nothing."""
        num_needed = self.width + max(self.width, len(self._stop_token_ids))
        return max(num_needed, self._params.logprobs or 0)

    @property
    def is_done(self) -> bool:
        """True if no running beam could become one of the best, as far as `early_stopping` looks
        ahead.
        """
        if not self.running:
            return True
        if len(self.finished) < self.width:
            return False
        if self._params.early_stopping is EarlyStopping.TRUE:
            return True
        best = self.running[0].cumulative_logprob / self._length(self._num_attainable_tokens)
        return best <= self.score(self.finished[-1])

    def score(self, beam: Beam) -> float:
        return beam.cumulative_logprob / self._length(len(beam.token_ids))

    def is_stopped(self, beam: Beam) -> bool:
        """True if its last token is one that ends an answer."""
        return beam.token_ids[-1] in self._stop_token_ids

    def advance(self, tops: Sequence[LogprobsLists]) -> None:
        """Go one token on. `tops` has one position for each running beam, in order: any token, then
        the `num_top_tokens` likeliest ones.
        """
        self.num_tokens += 1
        is_last = self.num_tokens == self._max_tokens
        candidates = sorted(
            self._candidates(tops), key=lambda item: item.cumulative_logprob, reverse=True
        )
        stops = self._stop_token_ids
        ended = [item for item in candidates[: self.width] if is_last or item.token_id in stops]
        finished = [*self.finished, *map(self._extended, ended)]
        self.finished = sorted(finished, key=self.score, reverse=True)[: self.width]
        going = [] if is_last else [item for item in candidates if item.token_id not in stops]
        self.running = [self._extended(item) for item in going[: self.width]]

    @property
    def _num_attainable_tokens(self) -> int:
        params = self._params
        is_patient = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0
        return self._max_tokens if is_patient else self.num_tokens

    def _length(self, num_tokens: int) -> float:
        return float(num_tokens**self._params.length_penalty)

    def _candidates(self, tops: Sequence[LogprobsLists]) -> Iterator[_Candidate]:
        may_stop = self.num_tokens > self._params.min_tokens
        for beam, top in zip(self.running, tops, strict=True):
            likeliest = zip(top.logprob_token_ids[0][1:], top.logprobs[0][1:], strict=True)
            for rank, (token_id, logprob) in enumerate(likeliest):
                if may_stop or token_id not in self._stop_token_ids:
                    total = beam.cumulative_logprob + logprob
                    yield _Candidate(total, token_id, rank, beam, top)

    def _extended(self, item: _Candidate) -> Beam:
        num_shown = self._params.logprobs or 0
        top_ids, top_logprobs = item.top.logprob_token_ids[0][1:], item.top.logprobs[0][1:]
        position = LogprobsLists(
            logprob_token_ids=((item.token_id, *top_ids[:num_shown]),),
            logprobs=((top_logprobs[item.rank], *top_logprobs[:num_shown]),),
            sampled_token_ranks=(item.rank + 1,),
        )
        return Beam(
            token_ids=(*item.beam.token_ids, item.token_id),
            cumulative_logprob=item.cumulative_logprob,
            logprobs=item.beam.logprobs + position,
        )
