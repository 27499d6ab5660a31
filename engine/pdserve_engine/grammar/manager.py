"""The masks of a batch: which tokens each row's grammar allows next."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np

from pdserve_common.errors import PdserveError, RequestFailedError
from pdserve_common.observability import defects
from pdserve_common.processes.call_thread import CallThread
from pdserve_common.types.engine import EngineError
from pdserve_engine.grammar.forced import ForcedText, whole_characters
from pdserve_engine.grammar.native import Bitmask, CompiledGrammar, Matcher
from pdserve_engine.grammar.vocabulary import Encode

# How long a step waits for masks, and how often a row may be left out of it.
MAX_WAIT_S = 0.005
MAX_LATE_S = 5.0
# A row whose turn took more CPU time has its next turn among its likes.
SLOW_S = 0.002
# So many tokens take that long.
SLOW_NUM_TOKENS = 1000
# A tenth of a core that the model's threads want as well.
SLOW_NICENESS = 10
# CPU time for all tokens of an answer. An ambiguous grammar takes more for each, and keeps what it
# made of them: some 10 MB a second. Others take 5 s for a million tokens.
MAX_ACCEPT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
# Larger ones are not asked what they force.
MAX_FORCING_GRAMMAR_BYTES = 2 * 1024 * 1024
ALL_ALLOWED = -1
NOTHING: Mapping[int, Sequence[int]] = MappingProxyType({})

T = TypeVar("T")


class TokenMasks(NamedTuple):
    """What n rows may be given next."""

    # int32 [n, ceil(vocab_size / 32)]: a set bit allows. Without a grammar all are set.
    bitmask: Bitmask
    # Indexes of rows whose mask is not there: they must not get a token in this step.
    late: tuple[int, ...]
    # By index, why a row can't get a token any more.
    errors: dict[int, EngineError]

    def select(self, indexes: Sequence[int]) -> "TokenMasks":
        """Return those of the rows with these indexes, of which none is late."""
        places = {old: new for new, old in enumerate(indexes)}
        errors = {places[i]: error for i, error in self.errors.items()}
        return TokenMasks(self.bitmask[list(indexes)], (), errors)


@dataclass(slots=True)
class _Row:
    matcher: Matcher
    # int32 [ceil(vocab_size / 32)], for one token at a time.
    mask: Bitmask
    # Where its turns are taken, one behind the other.
    thread: CallThread
    # Is it asked what it forces?
    is_forcing: bool
    num_tokens: int = 0
    # CPU time of all tokens, and of the turn so far.
    accept_s: float = 0.0
    turn_s: float = 0.0
    is_slow: bool = False
    is_removed: bool = False
    error: PdserveError | None = None
    asked_at: float = 0.0
    # Over when `mask` is of the tokens so far; its exception says why there is none.
    ready: "Future[None]" = field(default_factory=Future)
    # What has to follow the tokens so far.
    forced: "Future[tuple[int, ...]]" = field(default_factory=Future)
    # What may follow each of the drafts it was last told of, as far as those fit.
    ahead: "Future[list[Bitmask]] | None" = None


class StructuredOutputManager:
    """Matches the rows of a batch with their grammars, beside the thread that runs the model, which
    alone uses this. A row's mask is made as soon as its tokens are known.

    A grammar may be slow: rows that are have a thread to themselves, of a lower priority than the
    model's.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._num_words = -(-vocab_size // 32)
        # The bits of the last word that stand for tokens.
        self._last_word = np.int32((1 << vocab_size % 32) - 1 if vocab_size % 32 else ALL_ALLOWED)
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._vocab_size = vocab_size
        # Cuts into tokens what grammars force; None: nobody asks for that.
        self.encode: Encode | None = None
        self._forced_text: ForcedText | None = None  # made with the first row that is asked
        self._rows: dict[int, _Row] = {}
        self._quick = CallThread("grammar-masks")
        self._slow = CallThread("grammar-slow-masks", niceness=SLOW_NICENESS)

    @property
    def num_rows(self) -> int:
        """Rows that are constrained."""
        return len(self._rows)

    def has_any(self, rows: Sequence[int]) -> bool:
        """Is one of these rows constrained?"""
        return bool(self._rows) and not self._rows.keys().isdisjoint(rows)

    def add(self, row: int, grammar: CompiledGrammar, output_token_ids: Sequence[int]) -> None:
        """Constrain a row of the batch, which has some output already."""
        assert row not in self._rows, row
        mask = np.empty(self._num_words, dtype=np.int32)
        is_slow = len(output_token_ids) > SLOW_NUM_TOKENS or grammar.first_mask_s > SLOW_S
        thread = self._slow if is_slow else self._quick
        is_forcing = self.encode is not None and grammar.num_bytes <= MAX_FORCING_GRAMMAR_BYTES
        if is_forcing and self._forced_text is None:
            info = grammar.tokenizer_info
            self._forced_text = ForcedText(info.vocabulary, info.stop_token_ids)
        self._rows[row] = _Row(Matcher(grammar), mask, thread, is_forcing)
        self._advance({row: output_token_ids})

    def remove(self, row: int) -> None:
        """Forget a row; no-op for one that is not constrained."""
        if (known := self._rows.pop(row, None)) is not None:
            known.is_removed = True

    def accept(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Go on by the next tokens of each of some rows, of which some may not be constrained."""
        token_ids = {row: ids for row, ids in token_ids.items() if row in self._rows}
        for row in map(self._rows.__getitem__, token_ids):
            if row.ready.done() and (row.ahead is None or row.ahead.done()):
                row.thread = self._slow if row.is_slow else self._quick
        self._advance(token_ids)

    def forced(self, rows: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the tokens that have to come next, as texts are cut usually, of those of these
        rows whose grammars leave no choice. May wait MAX_WAIT_S; of slow rows nothing is known.
        """
        forced: dict[int, tuple[int, ...]] = {}
        deadline = self._clock() + MAX_WAIT_S
        for row in rows:
            known = self._rows.get(row)
            if known is None or not known.is_forcing or known.thread is self._slow:
                continue
            try:
                token_ids = known.forced.result(max(0.0, deadline - self._clock()))
            except TimeoutError:
                break  # what comes behind it is not there either
            except PdserveError:
                continue  # so is the mask, and the row ends with that
            if token_ids:
                forced[row] = token_ids
        return forced

    def look_ahead(self, row: int, drafts: Sequence[int]) -> None:
        """Make the masks behind drafts of a row's next tokens as well; no-op for one that is not
        constrained.
        """
        if (known := self._rows.get(row)) is not None:
            drafts = () if known.is_slow else drafts
            known.ahead = self._submit(known, partial(self._masks_behind, known, drafts))

    def take(
        self, rows: Sequence[int], assumed: Mapping[int, Sequence[int]] = NOTHING
    ) -> TokenMasks | None:
        """Return the masks of these rows, which may have waited MAX_WAIT_S for those that are
        late; None if no row is constrained.

        `assumed` has, by index, the first of a row's drafts that its mask is behind: such a mask is
        late also if there is none, as they do not fit, or if the one before it is.
        """
        constrained = [(i, self._rows[row]) for i, row in enumerate(rows) if row in self._rows]
        if not constrained:
            return None
        masks = TokenMasks(self._full(len(rows)), (), {})
        late: list[int] = []
        deadline = self._clock() + MAX_WAIT_S
        for index, row in constrained:
            if late and rows[late[-1]] == rows[index]:  # also if it has come meanwhile: no gaps
                late.append(index)
                continue
            try:
                mask = self._mask(row, len(assumed.get(index, ())), deadline)
            except TimeoutError:
                late.append(index)
            except PdserveError as error:
                masks.errors[index] = error.to_engine_error()
            else:
                masks.bitmask[index] = mask
        return masks._replace(late=tuple(late))

    def close(self) -> bool:
        """False if a matcher hangs."""
        for row in list(self._rows):
            self.remove(row)
        ended = [thread.close(CLOSE_TIMEOUT_S) for thread in (self._quick, self._slow)]
        return all(ended)

    def _full(self, num_rows: int) -> Bitmask:
        return np.full((num_rows, self._num_words), ALL_ALLOWED, dtype=np.int32)

    def _mask(self, row: _Row, num_assumed: int, deadline: float) -> Bitmask:
        if num_assumed:
            assert row.ahead is not None, "look_ahead comes first"
            masks = row.ahead.result(max(0.0, deadline - self._clock()))
            if num_assumed > len(masks):
                raise TimeoutError
            return masks[num_assumed - 1]
        try:
            row.ready.result(max(0.0, deadline - self._clock()))
            return row.mask
        except TimeoutError:
            if (late_s := self._clock() - row.asked_at) > MAX_LATE_S:
                raise _too_slow(late_s) from None
            raise

    def _advance(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """What rows force is known before the first of their masks is made: it is waited for."""
        for index, ids in token_ids.items():
            row = self._rows[index]
            row.asked_at = self._clock()
            row.forced = self._submit(row, partial(self._match, row, ids))
        for row in map(self._rows.__getitem__, token_ids):
            row.ready = self._submit(row, partial(self._make_mask, row))

    def _submit(self, row: _Row, turn: Callable[[], T]) -> "Future[T]":
        """Have a turn of a row taken on its thread: the future's exception is a PdserveError, which
        a defect is, too.
        """

        def contained() -> T:
            try:
                return turn()
            except PdserveError:
                raise
            except BaseException as error:  # of a library, in Rust or C++: it costs who asked
                defects.record("grammar", error, "one request")
                row.error = RequestFailedError(f"structured_outputs have failed: {error!r}")
                raise row.error from error

        return row.thread.submit(contained)

    # ---- on the threads

    def _match(self, row: _Row, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return what has to follow these tokens, nothing if they do not fit."""
        row.turn_s = 0.0
        self._do(row, partial(self._accept, row, token_ids))
        return () if row.error is not None else self._find_forced(row)

    def _make_mask(self, row: _Row) -> None:
        self._do(row, partial(self._fill, row))
        if row.error is not None:
            raise row.error
        row.is_slow = row.turn_s > SLOW_S

    def _do(self, row: _Row, part: Callable[[], None]) -> None:
        """Do a part of a row's turn. What goes wrong is kept: the row has come to its end."""
        if row.error is not None:
            return
        start = self._cpu_clock()
        try:
            part()
        except PdserveError as error:
            row.error = error
        except RuntimeError as error:  # the library's own checks
            row.error = RequestFailedError(f"structured_outputs cannot be matched: {error}")
        finally:
            row.turn_s += self._cpu_clock() - start

    def _accept(self, row: _Row, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if row.is_removed:
                raise RequestFailedError("the request has ended")
            if (late_s := self._clock() - row.asked_at) > MAX_LATE_S:
                raise _too_slow(late_s)
            self._accept_one(row, token_id)

    def _accept_one(self, row: _Row, token_id: int) -> None:
        start = self._cpu_clock()
        if row.matcher.is_terminated or not row.matcher.accept(token_id):
            raise RequestFailedError(
                f"output token {row.num_tokens} ({token_id}) does not fit structured_outputs"
            )
        row.num_tokens += 1
        row.accept_s += self._cpu_clock() - start
        if row.accept_s > MAX_ACCEPT_S:
            raise RequestFailedError(
                f"structured_outputs took more than {MAX_ACCEPT_S:g} s of CPU time for "
                f"{row.num_tokens} tokens: the grammar is ambiguous"
            )

    def _find_forced(self, row: _Row) -> tuple[int, ...]:
        if not row.is_forcing or row.thread is self._slow or row.matcher.is_terminated:
            return ()
        assert self._forced_text is not None
        assert self.encode is not None, "no row is asked"
        try:
            text = whole_characters(self._forced_text.find(row.matcher))
        except RuntimeError:  # the library's own checks: if it matters, the mask fails as well
            return ()
        # What the tokenizer knows, but not the model, ends it.
        is_known = self._vocab_size.__gt__
        return tuple(itertools.takewhile(is_known, self.encode(text))) if text else ()

    def _masks_behind(self, row: _Row, drafts: Sequence[int]) -> list[Bitmask]:
        """Return what may follow each of the drafts, up to the first that does not fit or behind
        which there is none, or that is only reached after SLOW_S.
        """
        masks: list[Bitmask] = []
        matcher, num_accepted, start = row.matcher, 0, self._cpu_clock()
        try:
            for token_id in drafts:
                is_over = row.error is not None or row.is_removed or matcher.is_terminated
                if is_over or self._cpu_clock() - start > SLOW_S or not matcher.accept(token_id):
                    break
                num_accepted += 1
                if matcher.is_terminated:
                    break
                masks.append(np.empty(self._num_words, dtype=np.int32))
                matcher.fill(masks[-1])
                masks[-1][-1] &= self._last_word
        except RuntimeError:  # the library's own checks: it will fail on the token itself
            pass
        matcher.rollback(num_accepted)
        return masks

    def _fill(self, row: _Row) -> None:
        if row.matcher.is_terminated:
            raise RequestFailedError("structured_outputs allow no token behind EOS")
        row.matcher.fill(row.mask)
        row.mask[-1] &= self._last_word
        if not row.mask.any():
            raise RequestFailedError(
                f"no token continues the {row.num_tokens} so far as structured_outputs ask for"
            )


def _too_slow(late_s: float) -> PdserveError:
    return RequestFailedError(
        f"structured_outputs took {late_s:.1f} s for a token, at most {MAX_LATE_S:g} s are waited"
    )
