"""Llama 3.1 to 3.3: the whole answer is a JSON object, or several with semicolons between."""

from pdserve_router.chat_formats.base import Answer, ChatFormat
from pdserve_router.chat_formats.json_calls import read_json_call
from pdserve_router.chat_formats.reader import Reader, Steps
from pdserve_router.chat_formats.tags import CallRules, Tag, json_calls


class Llama3Json(ChatFormat):
    """{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}

    An answer that is JSON may be meant as one: without a trigger only known tools are called.
    """

    name = "llama3_json"
    reasoning = None
    triggers = ("<|python_tag|>",)

    def matches(self, template: str) -> bool:
        return "<|start_header_id|>" in template and '"parameters"' in template

    def call_tag(self, rules: CallRules) -> Tag:
        return json_calls(rules, begin="", arguments="parameters", end="", separator="; ")

    def read_call(self, reader: Reader, answer: Answer, trigger: str) -> Steps[bool]:
        if not (yield from self._read_one(reader, answer)):
            return False
        yield from self._read_more(reader, answer)
        return True

    def read_start(self, reader: Reader, answer: Answer) -> Steps[None]:
        reader.mark()
        if (yield from self._read_one(reader, answer)):
            reader.unmark()
            yield from self._read_more(reader, answer)
        else:
            answer.content(reader.since_mark())

    def _read_one(self, reader: Reader, answer: Answer) -> Steps[bool]:
        names = answer.options.tools
        return (yield from read_json_call(reader, answer, names=names, needs_arguments=True))

    def _read_more(self, reader: Reader, answer: Answer) -> Steps[None]:
        reader.mark()
        while (yield from reader.accept(";")):
            if not (yield from self._read_one(reader, answer)):
                answer.content(reader.since_mark())
                return
            reader.mark()
        reader.unmark()
