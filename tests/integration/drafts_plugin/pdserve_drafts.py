"""A plugin of workers under test: it knows the answers, and proposes them, or anything else.

$DRAFTS_FILE names a JSON file, {"answers": {prompt: [answer, ...]}, "delay_s": ...}, which may
change. A prompt is its token ids, joined by commas. While the file has no answers there are no
drafts.
"""

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve_engine.clients import loading
from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.draft_lengths import DraftLengths
from pdserve_engine.spec_decode.proposer import Draft

KINDS = ("right", "wrong", "mixed", "empty", "hostile")
VOCAB_SIZE = 1392
EOS = 2


def install() -> None:
    """Have engines with speculation propose what the file says."""
    DraftLengths.choose = take_all  # type: ignore[method-assign]
    loading.make_proposer = lambda speculation: None if speculation == "none" else FileProposer()


def take_all(
    self: DraftLengths,
    drafts: Mapping[Request, Draft],
    num_requests: int,
    num_rows: int,
    most: int,
) -> dict[Request, int]:
    """Have all drafts computed, also those that are hardly worth it."""
    lengths = {}
    for request, draft in drafts.items():
        if length := min(len(draft.token_ids), most):
            lengths[request] = length
            most -= length
    return lengths


class FileProposer:
    def __init__(self) -> None:
        self._path = Path(os.environ["DRAFTS_FILE"])
        self._read_at = 0
        self._answers: Mapping[str, list[list[int]]] = {}
        self._delay_s = 0.0
        self._rng = random.Random(0)

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        self._read()
        if not self._answers:
            return {}
        time.sleep(self._delay_s)
        return {r: Draft("suffix", self._draft(r, limit)) for r, limit in candidates.items()}

    def _read(self) -> None:
        changed_at = self._path.stat().st_mtime_ns
        if changed_at != self._read_at:
            content = json.loads(self._path.read_text())
            self._answers, self._delay_s = content["answers"], content["delay_s"]
            self._read_at = changed_at

    def _draft(self, request: Request, limit: int) -> Sequence[int]:
        kind = random.Random(request.request_id).choice(KINDS)
        if kind == "mixed":
            kind = self._rng.choice(KINDS)
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
        for answer in self._answers.get(prompt, ()):
            if answer[: len(known)] == known:
                return answer[len(known) : len(known) + limit]
        return ()
