"""Requests as engines get them, and as they keep them."""

from collections.abc import Sequence
from typing import Any

from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.request.request import Request

PROMPT = (5, 6, 7)


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """Return the parameters of so many tokens, the likeliest."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def make_request(
    name: str, prompt: Sequence[int] = PROMPT, params: SamplingParams | None = None, **fields: Any
) -> EngineCoreRequest:
    """Return a request, of four tokens if it does not say and has no other task."""
    task = fields.pop("task", None) or Generate(params or greedy(4))
    return EngineCoreRequest(request_id=name, prompt_token_ids=tuple(prompt), task=task, **fields)


def held_request(
    name: str = "r", prompt: Sequence[int] = PROMPT, *, max_model_len: int = 1024, **fields: Any
) -> Request:
    """Return what an engine holds of a request, without limits of its own; `tensors` and `params`
    are among its fields.
    """
    tensors = {"tensors": fields.pop("tensors")} if "tensors" in fields else {}
    core = make_request(name, prompt, fields.pop("params", None) or SamplingParams(), **fields)
    return Request(core, max_model_len=max_model_len, seed=0, **tensors)
