"""A plugin of workers under test: all drafts are computed, also those that are hardly worth it.
Those that `suffix` proposes are what it knows of the answers, or anything else.

$DRAFTS_FILE names a JSON file, {"answers": {prompt: [answer, ...]}, "delay_s": ...}, which may
change. A prompt is its token ids, joined by commas. Steps with drafts take `delay_s` longer.
"""

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve_engine import assemble as loading
from pdserve_engine.config import Speculation
from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.draft_lengths import DraftLengths
from pdserve_engine.spec_decode.proposer import Draft, Proposer

KINDS = ("right", "wrong", "mixed", "empty", "hostile", "forced")
VOCAB_SIZE = 1392
EOS = 2


def install() -> None:
    """Have engines with speculation `suffix` propose what the file says."""
    make_proposer = loading.make_proposer

    def make(speculation: Speculation, max_cached_requests: int) -> Proposer | None:
        if speculation == "suffix":
            return FileProposer()
        return make_proposer(speculation, max_cached_requests)

    loading.make_proposer = make
    DraftLengths.choose = take_all  # type: ignore[method-assign]
    DraftLengths.choose_guesses = guess_all  # type: ignore[method-assign]


def take_all(
    self: DraftLengths,
    drafts: Mapping[Request, Draft],
    num_requests: int,
    num_rows: int,
    most: int,
) -> dict[Request, int]:
    """Have all drafts computed."""
    time.sleep(FILE.delay_s)
    lengths = {}
    for request, draft in drafts.items():
        if length := min(len(draft.token_ids), most):
            lengths[request] = length
            most -= length
    return lengths


def guess_all(
    self: DraftLengths, limits: Mapping[Request, int], num_requests: int, most: int
) -> dict[Request, int]:
    """Have a draft model guess as many as there may be."""
    return dict(limits)


class DraftsFile:
    def __init__(self) -> None:
        self._path = Path(os.environ["DRAFTS_FILE"])
        self._read_at = 0
        self._answers: Mapping[str, list[list[int]]] = {}
        self._delay_s = 0.0

    @property
    def answers(self) -> Mapping[str, list[list[int]]]:
        self._read()
        return self._answers

    @property
    def delay_s(self) -> float:
        self._read()
        return self._delay_s

    def _read(self) -> None:
        changed_at = self._path.stat().st_mtime_ns
        if changed_at != self._read_at:
            content = json.loads(self._path.read_text())
            self._answers, self._delay_s = content["answers"], content["delay_s"]
            self._read_at = changed_at


FILE = DraftsFile()


class FileProposer:
    def __init__(self) -> None:
        self._rng = random.Random(0)

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        return {r: Draft("suffix", self._draft(r, limit)) for r, limit in candidates.items()}

    def _draft(self, request: Request, limit: int) -> Sequence[int]:
        kind = random.Random(request.request_id).choice(KINDS)
        if kind == "mixed":
            kind = self._rng.choice(KINDS)
        if kind == "forced":
            return request.drafts.forced_token_ids
        right, rng = self._right(request, limit), self._rng
        if kind == "wrong" and right:
            index = rng.randrange(len(right))
            return [*right[:index], (right[index] + 1) % VOCAB_SIZE, *right[index + 1 :]]
        if kind == "hostile":
            ids = [EOS, 0, VOCAB_SIZE - 1, rng.randrange(VOCAB_SIZE)]
            return [*right[: rng.randrange(2)], *rng.choices(ids, k=100)]
        return right if kind == "right" else ()

    def _right(self, request: Request, limit: int) -> Sequence[int]:
        num_prompt = request.num_prompt_tokens
        known = [*request.all_token_ids[num_prompt:]]
        prompt = ",".join(map(str, request.all_token_ids[:num_prompt]))
        for answer in FILE.answers.get(prompt, ()):
            if answer[: len(known)] == known:
                return answer[len(known) : len(known) + limit]
        return ()
