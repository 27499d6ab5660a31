"""Makes the benchmarks' model: Qwen3-0.6B's shape with a 32,000-word vocabulary and random weights.

    python benchmarks/make_model.py .bench/qwen3-0.6b-random

946 MB in bf16, 1.2 GB with Qwen3's vocabulary size. The tokenizer is a ByteLevel BPE trained on the
standard library's sources, or on those of all packages if it is large.
"""

import argparse
import sysconfig
from pathlib import Path

DEFAULT_MODEL = Path(".bench/qwen3-0.6b-random")
VOCAB_SIZE = 32_000
LARGE_MODEL = Path(".bench/qwen3-0.6b-large-vocabulary-random")
LARGE_VOCAB_SIZE = 151_936


def make_model(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write the model and its tokenizer to `folder`, unless they are there."""
    if (folder / "tokenizer.json").exists():
        return
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
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
    _train_tokenizer(folder, vocab_size)


def _train_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in _sources(vocab_size)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")
    fast.save_pretrained(folder)


def _sources(vocab_size: int) -> list[Path]:
    name, pattern = ("stdlib", "*.py") if vocab_size <= VOCAB_SIZE else ("purelib", "**/*.py")
    return sorted(Path(sysconfig.get_path(name)).glob(pattern))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="(%(default)s)")
    args = parser.parse_args()
    make_model(args.folder, args.vocab_size)
