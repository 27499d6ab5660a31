"""Llama 3.1 to 3.3: the whole answer is a JSON object, or several side by side."""

from pdserve_router.chat_formats.base import Answer, ChatFormat
from pdserve_router.chat_formats.json_calls import read_json_calls
from pdserve_router.chat_formats.reader import Reader, Steps
from pdserve_router.chat_formats.tags import CallRules, Tag, json_calls


class Llama3Json(ChatFormat):
    """{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}

    The semicolon may be missing. An answer that is JSON may be meant as one: a call has arguments.
    """

    name = "llama3_json"
    reasoning = None
    triggers = ("<|python_tag|>",)

    def matches(self, template: str) -> bool:
        return "<|start_header_id|>" in template and '"parameters"' in template

    def call_tag(self, rules: CallRules) -> Tag:
        return json_calls(rules, begin="", arguments="parameters", end="", separator="; ")

    def read_call(self, reader: Reader, answer: Answer, trigger: str) -> Steps[bool]:
        return (yield from read_json_calls(reader, answer, separator=";", needs_arguments=True))

    def read_start(self, reader: Reader, answer: Answer) -> Steps[None]:
        reader.mark()
        if (yield from self.read_call(reader, answer, "")):
            reader.unmark()
        else:
            reader.rewind()
