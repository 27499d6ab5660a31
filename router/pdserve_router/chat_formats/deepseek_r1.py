"""DeepSeek R1: reasoning first, then calls between markers of its own."""

from pdserve_router.chat_formats.base import Answer, ChatFormat
from pdserve_router.chat_formats.reader import Reader, Steps
from pdserve_router.chat_formats.tags import CallRules, Tag, calls, tag

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001


class DeepseekR1(ChatFormat):
    """Between the markers of a call `function`, a separator, the name and a block of JSON; since
    V3.1 the name, a separator and the arguments.
    """

    name = "deepseek_r1"
    is_reasoning_implied = True
    triggers = (_CALLS_BEGIN, _CALL_BEGIN)
    inner_markers = (_CALLS_END, _CALL_END, _SEPARATOR)

    def matches(self, template: str) -> bool:
        return _CALL_BEGIN in template and "</think>" in template

    def call_tag(self, rules: CallRules) -> Tag:
        each = calls(
            rules,
            begin=f"{_CALL_BEGIN}function{_SEPARATOR}",
            behind_name="\n```json\n",
            end=f"\n```{_CALL_END}",
            separator="\n",
        )
        return tag(_CALLS_BEGIN, each, _CALLS_END)

    def read_call(self, reader: Reader, answer: Answer, trigger: str) -> Steps[bool]:
        if trigger == _CALLS_BEGIN and not (yield from reader.accept(_CALL_BEGIN)):
            return False
        name = yield from reader.word()
        if not (yield from reader.accept(_SEPARATOR)):
            return False
        if (yield from reader.peek()) != "{":
            name = yield from reader.word()
            yield from reader.accept("```json")
        if name not in answer.options.tools or (yield from reader.peek()) != "{":
            return False
        answer.begin_call(name)
        yield from reader.json_value(answer.arguments)
        for end in ("```", _CALL_END, _CALLS_END):
            yield from reader.accept(end)
        return True
