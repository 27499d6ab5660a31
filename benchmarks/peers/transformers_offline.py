"""transformers for `bench_cpu.py`, with its own attention and cache: ... MODEL NUM_THREADS"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from offline import Engine, serve


class TransformersEngine:
    """One padding-free batch: all prompts have the same length."""

    def __init__(self, model: str, num_threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._prompts: list[Sequence[int]] = []
        self._output: Any = None

    def add_request(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        self._prompts.append(prompt)

    @torch.inference_mode()
    def step(self) -> set[str]:
        if self._output is None:
            self._output = self._model(torch.tensor(self._prompts), logits_to_keep=1)
        else:
            cache = self._output.past_key_values
            self._output = self._model(self._tokens, past_key_values=cache)
        self._tokens = self._output.logits[:, -1].argmax(-1, keepdim=True)
        return {str(index) for index in range(len(self._prompts))}

    def abort_all(self) -> None:
        self._prompts, self._output = [], None


def load() -> Engine:
    return TransformersEngine(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    serve(load)
