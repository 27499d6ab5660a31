"""Drafts that a test decides on, and draft models."""

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import safetensors.torch
import torch

from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.draft_lengths import DraftLengths
from pdserve_engine.spec_decode.proposer import Draft

# What comes next, as far as the test knows: so many tokens at most.
Oracle = Callable[[Request, int], Sequence[int]]


class AllOfThem(DraftLengths):
    """Has as many drafts computed as there is room for, whatever has come of others."""

    def choose(
        self, drafts: Mapping[Request, Draft], num_requests: int, num_rows: int, most: int
    ) -> dict[Request, int]:
        lengths = {}
        for request, draft in drafts.items():
            lengths[request] = min(len(draft.token_ids), most)
            most -= lengths[request]
        return {request: length for request, length in lengths.items() if length}

    def choose_guesses(
        self, limits: Mapping[Request, int], num_requests: int, most: int
    ) -> dict[Request, int]:
        return dict(limits)


def lengths_chosen_by(lengths: type[DraftLengths] = AllOfThem) -> AbstractContextManager[object]:
    """Schedulers that are made within have their drafts' lengths chosen so."""
    return mock.patch("pdserve_engine.core.features.drafts.DraftLengths", lengths)


def make_noisy_model(model: Path, folder: Path, *, noise: float) -> Path:
    """Write a model with other weights, for drafts that are often right, and often not."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        weights = safetensors.torch.load_file(path)
        for weight in weights.values():
            change = torch.randn(weight.shape, generator=generator) * weight.float().std() * noise
            weight.add_(change.nan_to_num().to(weight.dtype))
        safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    return folder


class MixedProposer:
    """Drafts that are right, wrong, right at first, none, or more than there may be."""

    def __init__(self, rng: random.Random, oracle: Oracle, *, vocab_size: int = 500) -> None:
        self._rng = rng
        self._oracle = oracle
        self._vocab_size = vocab_size
        self.num_drafts = 0

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        drafts = {}
        for request, limit in candidates.items():
            assert limit > 0
            drafts[request] = Draft("suffix", self._drafts(request, limit))
            self.num_drafts += len(drafts[request].token_ids[:limit])
        return drafts

    def _drafts(self, request: Request, limit: int) -> list[int]:
        num = self._rng.choice([0, limit, limit, limit + 3, self._rng.randrange(limit + 1)])
        num_right = self._rng.choice([0, num, num, self._rng.randrange(num + 1)])
        right = list(self._oracle(request, num_right))
        wrong = [self._rng.randrange(self._vocab_size) for _ in range(num - len(right))]
        return right + wrong
