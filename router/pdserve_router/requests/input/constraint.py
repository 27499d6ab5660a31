"""What an answer has to be: checked before anything is tokenized, enforced behind reasoning."""

import dataclasses
import json
import re

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured.accepted import AcceptedConstraints, digest_of
from pdserve_common.structured.json_text import field_name
from pdserve_common.types.capabilities import Capabilities
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_router.chat_formats.base import ChatFormat, ReasoningStart
from pdserve_router.chat_formats.tags import by_id, constraint_tag, either
from pdserve_router.requests.input.request_limits import (
    INLINE_PATTERN_CHARS,
    INLINE_SCHEMA_CHARS,
    NotSmallError,
)
from pdserve_router.requests.input.tool_use import (
    ToolMode,
    ToolUse,
    as_constraint,
    as_constraints,
    call_rules,
    calling_params,
)
from pdserve_router.text.tokenizer import Tokenizer

_FIELD = "structured_outputs"
# Keywords that make patterns or compare schemas; an escape may be any of them.
_SLOW = re.compile(
    r'\\|"(pattern|patternProperties|propertyNames|format|oneOf|multipleOf)"'
    r'|"additionalProperties"\s*:(?!\s*false)'
)


def check_constraint(
    params: StructuredOutputsParams | None,
    use: ToolUse | None,
    capabilities: Capabilities,
    accepted: AcceptedConstraints,
    *,
    field: str | None,
    is_inline: bool,
) -> None:
    """Raise InvalidRequestError, naming `field`, for what is not served, or beside calls that are
    asked for, or not enforced; NotSmallError if that takes too long to be done inline.
    """
    is_calling = use is not None and use.mode is ToolMode.REQUIRED
    if params is not None:
        path = field or _FIELD
        if _FIELD not in capabilities.fields:
            problem = "not served by all workers, leave it unset"
            raise InvalidRequestError(f"{path} is set: {problem}", field=field_name(path))
        if is_calling:
            problem = "is set and tool_choice asks for a call, at most one of them can be"
            raise InvalidRequestError(f"{path} {problem}", field=field_name(path))
    in_grammar = use if is_calling or params is not None else None
    if is_inline and not _is_small(params, in_grammar, accepted):
        raise NotSmallError
    if params is not None:
        accepted.check(params, field=field)


def _is_small(
    params: StructuredOutputsParams | None, use: ToolUse | None, accepted: AcceptedConstraints
) -> bool:
    """Return whether the check takes no longer than the event loop can wait. Choices cost next to
    nothing here, and neither does what is known.
    """
    schemas = () if use is None else map(as_constraint, use.parameters.values())
    texts = [each.json_schema or "" for each in schemas if each not in accepted]
    if params is not None and params not in accepted:
        texts += [params.json_schema or "", params.structural_tag or "", params.grammar or ""]
        if len(params.regex or "") > INLINE_PATTERN_CHARS:
            return False
    num_chars = sum(map(len, texts))
    if num_chars <= INLINE_PATTERN_CHARS:
        return True
    return num_chars <= INLINE_SCHEMA_CHARS and not any(map(_SLOW.search, texts))


def constrained_params(
    params: SamplingParams,
    use: ToolUse | None,
    chat_format: ChatFormat,
    reasoning: ReasoningStart,
    tokenizer: Tokenizer,
    accepted: AcceptedConstraints,
    *,
    field: str | None,
) -> SamplingParams:
    """Return the parameters of an answer in a chat format, of which one grammar holds all: its
    reasoning, then what it has to be. Raises InvalidRequestError if that becomes too large.
    """
    ids = chat_format.marker_ids(tokenizer.added_token_ids)
    if use is not None and use.mode is ToolMode.REQUIRED:
        return calling_params(params, use, chat_format, reasoning, ids, accepted)
    if params.structured_outputs is None:
        return params
    if use is None and not chat_format.may_reason(reasoning):
        return params
    content = constraint_tag(params.structured_outputs)
    if use is not None:
        content = either(
            content, by_id(chat_format.call_tag(call_rules(use, chat_format, accepted)), ids)
        )
    tag = json.dumps(chat_format.answer_tag(content, reasoning, ids))
    constraint = StructuredOutputsParams(structural_tag=tag)
    accepted.check(constraint, field=field)
    return dataclasses.replace(params, structured_outputs=constraint)


def accepted_digests(
    asked: StructuredOutputsParams | None,
    use: ToolUse | None,
    made: StructuredOutputsParams | None,
    chat_format: ChatFormat | None,
    accepted: AcceptedConstraints,
) -> tuple[bytes, ...]:
    """Return the digests of what was found to be enforced: what a request asks for, its tools'
    schemas, and the constraint that was made of them.
    """
    if made is None:
        return ()
    parameters = () if use is None else use.parameters.values()
    schemas = [params for schema in parameters for params in as_constraints(schema, chat_format)]
    each = (*schemas, made) if asked is None else (asked, *schemas, made)
    return tuple(digest_of(params) for params in each if params in accepted)
