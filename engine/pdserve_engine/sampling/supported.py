"""Which sampling parameters the sampler serves; the rest is refused rather than ignored."""

from collections.abc import Mapping
from typing import Any

from pdserve_common.engine_types import SamplingParams
from pdserve_common.errors import InvalidRequestError

# Field and the values under which it asks for nothing.
_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "use_beam_search": (False,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logits_processors": ((),),
    "bad_words": ((),),
    "logit_bias": ({},),
    "allowed_token_ids": ((),),
    "structured_outputs": (None,),
}


def require_supported(params: SamplingParams) -> None:
    """Raise InvalidRequestError that names the first field the sampler would have to ignore."""
    for field, harmless in _NOT_SERVED.items():
        value = getattr(params, field)
        if value not in harmless:
            raise InvalidRequestError(f"{field} is {value!r}, not served yet", field=field)
