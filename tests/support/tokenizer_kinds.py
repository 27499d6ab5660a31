"""Small tokenizers of the kinds that checkpoints have, trained here."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

TEXTS = (
    "the capital of france is paris and it's big, isn't it?",
    "naïve café \n\t  spaces   and\nlines",
    "你好、世界。 emoji 😀🎉👩‍👩‍👧‍👦 mixed 𐍈𝄞 한국어!",
    "a \ufffd that is one",
)
_CORPUS = (*TEXTS[:2], "paris and london", "hello world. the quick brown fox's jumps") * 4
_SPECIAL = ("<unk>", "<s>", "</s>")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_MARK = "\u2581"


def _byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _byte_fallback(decoder: decoders.Decoder, *, prepends: bool) -> Tokenizer:
    """SentencePiece's BPE, with bytes for what is no word."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    steps = [normalizers.Prepend(_MARK)] if prepends else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _MARK)])
    # As SentencePiece does while it trains; no word goes over a space.
    backend.pre_tokenizer = pre.Split(_MARK, "merged_with_next")
    trainer = BpeTrainer(
        vocab_size=500,
        limit_alphabet=60,
        special_tokens=[*_SPECIAL, *_BYTES],
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    trained = json.loads(backend.to_str())["model"]
    merges = [tuple(merge) for merge in trained["merges"]]
    backend = Tokenizer(
        models.BPE(trained["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _MARK)])
    backend.decoder = decoder
    backend.add_special_tokens(list(_SPECIAL))
    return backend


def _llama() -> Tokenizer:
    """Llama 2, Mistral, Phi-3."""
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return _byte_fallback(decoder, prepends=True)


def _gemma() -> Tokenizer:
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(decoders.Sequence(steps), prepends=False)


def _unigram() -> Tokenizer:
    """T5, XGLM."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=400, special_tokens=list(_SPECIAL), unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator((*_CORPUS, *TEXTS), trainer)
    return backend


def _wordpiece() -> Tokenizer:
    """BERT, as a decoder."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    backend.pre_tokenizer = pre.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    trainer = WordPieceTrainer(vocab_size=400, special_tokens=list(_SPECIAL), show_progress=False)
    backend.train_from_iterator((*_CORPUS, *TEXTS), trainer)
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "llama": _llama,
    "gemma": _gemma,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}


def save_tokenizer(kind: str, folder: Path) -> PreTrainedTokenizerFast:
    """Train a tokenizer, which puts <s> before texts, write it, and return transformers' own."""
    backend = KINDS[kind]()
    backend.add_tokens([AddedToken("<|call|>", normalized=False)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return fast
