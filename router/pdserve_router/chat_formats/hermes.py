"""Hermes 2 Pro, Qwen 2.5 and Qwen 3: <tool_call> around a JSON object."""

from pdserve_router.chat_formats.base import Answer, ChatFormat
from pdserve_router.chat_formats.json_calls import read_json_calls
from pdserve_router.chat_formats.reader import Reader, Steps
from pdserve_router.chat_formats.tags import CallRules, Tag, json_calls


class Hermes(ChatFormat):
    """<tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>
    """

    name = "hermes"
    triggers = ("<tool_call>",)
    inner_markers = ("</tool_call>",)

    def matches(self, template: str) -> bool:
        return "<tool_call>" in template and "<function=" not in template

    def call_tag(self, rules: CallRules) -> Tag:
        return json_calls(
            rules,
            begin="<tool_call>\n",
            arguments="arguments",
            end="\n</tool_call>",
            separator="\n",
        )

    def read_call(self, reader: Reader, answer: Answer, trigger: str) -> Steps[bool]:
        if not (yield from read_json_calls(reader, answer)):
            return False
        yield from reader.accept("</tool_call>")
        return True
