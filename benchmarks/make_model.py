"""Makes the benchmarks' model: Qwen3-0.6B's shape with a 32,000-word vocabulary and random weights.

    python benchmarks/make_model.py .bench/qwen3-0.6b-random

946 MB in bf16. The tokenizer is a ByteLevel BPE trained on the standard library's sources.
"""

import argparse
import sysconfig
from pathlib import Path

DEFAULT_MODEL = Path(".bench/qwen3-0.6b-random")
VOCAB_SIZE = 32_000


def make_model(folder: Path) -> None:
    """Write the model and its tokenizer to `folder`, unless they are there."""
    if (folder / "tokenizer.json").exists():
        return
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _train_tokenizer(folder)


def _train_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sources], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")
    fast.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write it")
    make_model(parser.parse_args().folder)
