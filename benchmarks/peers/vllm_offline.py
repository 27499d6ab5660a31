"""vLLM for `bench_cpu.py`, in its own environment: vllm_offline.py MODEL FLAGS_AS_JSON"""

import json
import sys
from collections.abc import Sequence

from offline import Engine, serve


class VllmEngine:
    def __init__(self, model: str, flags: dict[str, object]) -> None:
        from vllm import LLM

        self._engine = LLM(model, **flags).llm_engine
        self._request_ids: list[str] = []

    def add_request(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
        self._request_ids.append(request_id)

    def step(self) -> set[str]:
        return {output.request_id for output in self._engine.step()}

    def abort_all(self) -> None:
        self._engine.abort_request(self._request_ids)
        self._request_ids = []


def load() -> Engine:
    return VllmEngine(sys.argv[1], json.loads(sys.argv[2]))


if __name__ == "__main__":
    serve(load)
