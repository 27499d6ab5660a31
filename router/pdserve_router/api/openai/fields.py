"""Fields of OpenAI's and vLLM's requests that are not served: which are taken all the same, which
are refused by name, and how unknown ones are counted.
"""

import logging
from collections.abc import Iterable, Mapping

from prometheus_client import Counter

from pdserve_common.errors import InvalidRequestError

logger = logging.getLogger(__name__)

# Names that have a series, and a line in the log; others count as "other".
MAX_NAMES = 64
# One request may have so many.
_MAX_UNKNOWN = 16
_MAX_NAME_CHARS = 64
OTHER = "other"

# Taken with any value: no token of an answer depends on them, here.
WITHOUT_EFFECT: Mapping[str, str] = {
    "metadata": "answers are not stored",
    "prompt_cache_key": "prefixes are found by what they hold; see cache_salt",
    "prompt_cache_options": "prefixes are found by what they hold",
    "prompt_cache_retention": "the least recently used blocks go first",
    "safety_identifier": "for reports of abuse, which are not made",
    "service_tier": "there is one; see priority",
    "store": "answers are not stored",
    "verbosity": "models here have no such setting",
}

# Would change the answer: the values that ask for nothing are taken, all others refused.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "documents": (None, []),
    "ebnf": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_whitespace_pattern": (None,),
    "json_schema": (None,),
    "kv_transfer_params": (None, {}),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prompt_embeds": (None,),
    "regex": (None,),
    "return_tokens_as_token_ids": (None, False),
    "structural_tag": (None,),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
}
# By endpoint besides: what the other one has.
REFUSED_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (None, False),
    "echo": (None, False),
    "prompt": (None,),
}
REFUSED_IN_COMPLETIONS: Mapping[str, tuple[object, ...]] = {
    "messages": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}
# What responses alone have, and what of the other endpoints they have not, or call otherwise.
REFUSED_IN_RESPONSES: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (None, False),
    "background": (None, False),
    "best_of": (None, 1),
    "conversation": (None,),
    "early_stopping": (None, False),
    "echo": (None, False),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_reasoning": (None, True),
    "length_penalty": (None, 1, 1.0),
    "logprobs": (None, False),
    "max_completion_tokens": (None,),
    "max_tokens": (None,),
    "max_tool_calls": (None,),
    "messages": (None,),
    "n": (None, 1),
    "previous_response_id": (None, ""),
    "prompt": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None,),
    "return_token_ids": (None, False),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
    "use_beam_search": (None, False),
}
# Fields that requests for vectors do not have.
REFUSED_IN_POOLING: Mapping[str, tuple[object, ...]] = {
    "chat_template": (None,),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "instruction": (None, ""),
    "messages": (None,),
    "mm_processor_kwargs": (None, {}),
    "normalize": (None,),
    "padding": (None, "do_not_pad"),
    "stream": (None, False),
}
REFUSED_IN_RERANK: Mapping[str, tuple[object, ...]] = {
    "max_chunks_per_doc": (None,),
    "max_tokens_per_doc": (None,),
    "rank_fields": (None, []),
}
# What messages of answers have may come back, as null or empty.
REFUSED_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None,),
}
# What an answer that comes back says beside its text.
MESSAGE_WITHOUT_EFFECT = frozenset(
    (
        "annotations",
        "images",
        "provider_specific_fields",
        "refusal",
        "thinking_blocks",
    )
)


def check_refused(
    values: Mapping[str, object], refused: Mapping[str, tuple[object, ...]], *, path: str = ""
) -> None:
    """Raise InvalidRequestError for the first field that asks for what is not served."""
    for name in values.keys() & refused.keys():
        if not _asks_for_nothing(values[name], refused[name]):
            field = path + name
            raise InvalidRequestError(
                f"{field} is set: not served yet, leave it unset", field=field
            )


def _asks_for_nothing(value: object, unused: tuple[object, ...]) -> bool:
    # The type too: 0 == False and 1 == True.
    return any(type(value) is type(each) and value == each for each in unused)


class UnknownNames:
    """Names of unknown fields of one request, a few of them."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def add(self, names: Iterable[str], *, path: str = "") -> None:
        for name in names:
            if len(self._names) >= _MAX_UNKNOWN:
                return
            self._names.add(f"{path}{name}"[:_MAX_NAME_CHARS])

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._names))


class UnknownFields:
    """Counts fields that requests had and nobody here knows; logs each name once."""

    def __init__(self, counter: Counter) -> None:
        """`counter` has a label `field`."""
        self._counter = counter
        self._seen: set[str] = set()

    def count(self, names: Iterable[str]) -> None:
        for name in names:
            self._counter.labels(field=self._label(name)).inc()

    def _label(self, name: str) -> str:
        if name in self._seen:
            return name
        if len(self._seen) >= MAX_NAMES:
            return OTHER
        self._seen.add(name)
        # The first sample of a series is no increase, so it begins at 0.
        self._counter.labels(field=name)
        logger.warning("HTTP requests have the unknown field %r, which is ignored", name)
        return name
