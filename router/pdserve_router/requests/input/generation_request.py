"""What a client asks for, over whichever API."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.validation import MAX_PROMPT_LOGPROB_ENTRIES, MAX_TRACE_HEADER_CHARS
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.input.tool_use import ToolUse
from pdserve_router.requests.output.resume import ResumedCompletion
from pdserve_router.text.messages import ChatMessage

RANK_HEADER = "x-data-parallel-rank"
TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """What requests of all kinds have, before anything of it is checked."""

    request_id: str
    # That of the workers, an adapter of theirs, or "", which is the first.
    model: str = ""
    # An adapter beside `model`, which is no adapter's name then.
    lora_name: str = ""
    text: str | None = None
    token_ids: Sequence[int] | None = None
    # The model's own around a text.
    add_special_tokens: bool = True
    # Only so many tokens of the prompt count; -1: as many as fit.
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    # The name of its API key; "" if keys are not asked for.
    tenant: str = ""
    # Where it comes from.
    address: str = ""
    # What it belongs to, as its client says; "": it says nothing.
    session: str = ""
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    # time.monotonic() after which the answer is worthless.
    deadline: float | None = None
    # W3C trace context, as trace_context() reads it.
    trace_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(ClientRequest):
    """What to generate from. Exactly one of text, messages and token ids is set. Of a prompt that
    is truncated the last tokens count, -1: as many as fit beside max_tokens.
    """

    messages: Sequence[ChatMessage] | None = None
    # What an answer to messages may call.
    tools: ToolUse | None = None
    # Variables for the chat template, besides those that it gets anyway.
    template_variables: Mapping[str, object] = field(default_factory=dict)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    # Where the client has said what the answer has to be; None: in the sampling parameters.
    constraint_field: str | None = None
    # Log-probabilities that one message of the answer may hold: a max_tokens that is left unset
    # stays below it, and requests for more are refused.
    max_logprob_entries: int = MAX_PROMPT_LOGPROB_ENTRIES
    # What a broken stream of the same request had brought.
    resume: Sequence[ResumedCompletion] = ()
    # A text that the answer may be like; "": none.
    prediction: str = ""
    # Tell what workers did with it.
    include_events: bool = False
    # That of the decode worker that is to answer; None: any.
    data_parallel_rank: int | None = None


def named_rank(headers: Mapping[str, str]) -> int | None:
    """Return the data-parallel rank that a call's headers name; None if they name none. Raises
    InvalidRequestError for what is no number.
    """
    value = headers.get(RANK_HEADER, "")
    if not value:
        return None
    if re.fullmatch("[0-9]{1,9}", value) is None:
        raise InvalidRequestError(
            f"{RANK_HEADER} is {value[:64]!r}, must be a number from 0", field=RANK_HEADER
        )
    return int(value)


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the W3C trace context among a call's headers. A malformed one counts as none."""
    parent = headers.get("traceparent", "")
    if TRACEPARENT.fullmatch(parent) is None:
        return {}
    state = headers.get("tracestate", "")
    if not 0 < len(state) <= MAX_TRACE_HEADER_CHARS:
        return {"traceparent": parent}
    return {"traceparent": parent, "tracestate": state}
