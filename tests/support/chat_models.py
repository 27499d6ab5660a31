"""The bundled model as one that thinks and calls: markers are tokens of it, its template names the
tools.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from support.grammars import MODEL

# They take the places of its last words, and come as often as those would.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# By a chat format's name: what a system prompt says of calls, by which the format is known.
CALLS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<function= <parameter=",
    "llama3_json": '<|start_header_id|> "parameters"',
    "mistral": "[TOOL_CALLS] [ARGS]",
    "mistral_list": "[TOOL_CALLS]",
    "deepseek_r1": "<｜tool▁call▁begin｜> </think>",  # noqa: RUF001
}
# `thinking` is what the prompt ends with.
_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>CALLS "
    "{{ tools | map(attribute='function.name') | join(' ') }}{{ eos_token }}{% endif %}"
    "{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ thinking | default('') }}{% endif %}"
)


def make_chat_model(folder: Path, chat_format: str) -> Path:
    """Write the model, for that format, into a folder that is not there yet, and return it."""
    shutil.copytree(MODEL, folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(_with_markers(json.loads(path.read_text()))))
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("CALLS", CALLS[chat_format]))
    return folder


def _with_markers(tokenizer: dict[str, Any]) -> dict[str, Any]:
    bpe = tokenizer["model"]
    kept = len(bpe["vocab"]) - len(MARKERS)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = [{"id": kept + i, "content": marker, **flags} for i, marker in enumerate(MARKERS)]
    vocab = {text: token_id for text, token_id in bpe["vocab"].items() if token_id < kept}
    # Each merge made one token.
    merges = bpe["merges"][: -len(MARKERS)]
    return {
        **tokenizer,
        "added_tokens": [*tokenizer["added_tokens"], *added],
        "model": {**bpe, "vocab": vocab, "merges": merges},
    }
