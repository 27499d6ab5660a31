"""What a router needs of a model: a small tokenizer with a chat template."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a test of text",
    "你好、世界。今天天气很好、我们去公园。",
    "emoji 😀🎉👩‍👩‍👧‍👦 and naïve café",
)
# Calls are written as Hermes writes them.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tool_call>...</tool_call> calls one of:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.content == 'forbidden' %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model_dir(path: Path) -> None:
    """Write a byte-level BPE tokenizer: few merges, so that characters are split across tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def copy_with_template(model_dir: Path, folder: Path, template: str) -> str:
    """Copy a model into a folder that is not there yet, with another chat template."""
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)
