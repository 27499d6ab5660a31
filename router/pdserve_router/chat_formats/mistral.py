"""Mistral: [TOOL_CALLS] before a list of JSON objects, or before each name and its arguments."""

from pdserve_router.chat_formats.base import Answer, ChatFormat
from pdserve_router.chat_formats.json_calls import read_json_calls
from pdserve_router.chat_formats.reader import Reader, Steps
from pdserve_router.chat_formats.tags import CallRules, Tag, calls, json_calls, tag

_CALLS, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(ChatFormat):
    """[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]..., where [ARGS] may be missing; what MistralList
    writes is read as well.
    """

    name = "mistral"
    reasoning = ("[THINK]", "[/THINK]")
    triggers = (_CALLS,)
    inner_markers = (_ARGUMENTS, _CALL_ID)
    # Their templates refuse other ids.
    id_prefix = ""
    num_id_chars = 9

    def matches(self, template: str) -> bool:
        return _CALLS in template and _ARGUMENTS in template

    def call_tag(self, rules: CallRules) -> Tag:
        return calls(rules, begin=_CALLS, behind_name=_ARGUMENTS, end="", separator="")

    def read_call(self, reader: Reader, answer: Answer, trigger: str) -> Steps[bool]:
        is_list = yield from reader.accept("[")
        if is_list or (yield from reader.peek()) == "{":
            if not (yield from read_json_calls(reader, answer, separator=",")):
                return False
            if is_list:
                yield from reader.accept("]")
            return True
        return (yield from self._read_named(reader, answer))

    def _read_named(self, reader: Reader, answer: Answer) -> Steps[bool]:
        name = yield from reader.word()
        if (yield from reader.accept(_CALL_ID)):
            # The model's own; ours says the same at each router.
            yield from reader.word()
        yield from reader.accept(_ARGUMENTS)
        if name not in answer.options.tools or (yield from reader.peek()) != "{":
            return False
        answer.begin_call(name)
        yield from reader.json_value(answer.arguments)
        return True


class MistralList(Mistral):
    """[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, ...], of models up to 2024."""

    name = "mistral_list"

    def matches(self, template: str) -> bool:
        return _CALLS in template and _ARGUMENTS not in template

    def call_tag(self, rules: CallRules) -> Tag:
        each = json_calls(rules, begin="", arguments="arguments", end="", separator=", ")
        return tag(f"{_CALLS}[", each, "]")
