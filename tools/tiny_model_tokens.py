"""The tokenizer of pdserve-tiny and the training batches made with it."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import tiny_model_data as data
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1536  # room for each word of the texts as one token
MAX_POSITIONS = 2048
FIRST_DIGIT_WEIGHT, DIGIT_WEIGHT = 8.0, 2.0  # of the digits of answers; text weighs 1

BOS, EOS, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPLIT_PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('Unknown role: ' + message['role']) -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


class Batch(NamedTuple):
    """Padded token ids and what is known of each; all are [rows, tokens]."""

    ids: Tensor
    weights: Tensor  # of predicting the token
    is_first_digit: Tensor
    sources: Tensor  # for each digit of an answer, where it was given; 0 elsewhere


def train_tokenizer(rng: Random) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which each digit is a token, with or without a leading space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    samples = [data.make_recall_sample(rng, 400) for _ in range(1500)]
    samples += [data.make_story_sample(rng) for _ in range(5000)]
    texts = (s.text or " ".join(m["content"] for m in s.messages) for s in samples)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


class Encoder:
    """Turns samples into batches; digits are found by their ids, as stories hold none."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        vocab = tokenizer.get_vocab()
        self.first_digits = {vocab[f"Ġ{digit}"] for digit in range(10)}
        self.digits = self.first_digits | {vocab[str(digit)] for digit in range(10)}
        self.is_token = vocab["Ġis"]

    def encode(self, samples: Sequence[data.Sample]) -> Batch:
        rows = [self.tokenizer.encode(self._render(s), add_special_tokens=False) for s in samples]
        shape = (len(rows), max(map(len, rows)))
        ids = torch.full(shape, self.tokenizer.pad_token_id)
        weights, sources = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
        for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            ids[i, : len(row)] = torch.tensor(row)
            places = self._find_sources(row, sample.num_given)
            sources[i, : len(row)] = torch.tensor(places)
            weights[i, : len(row)] = torch.tensor(self._weigh(row, places))
        return Batch(ids, weights, weights == FIRST_DIGIT_WEIGHT, sources)

    def _render(self, sample: data.Sample) -> str:
        if sample.messages:
            return str(self.tokenizer.apply_chat_template(sample.messages, tokenize=False))
        # Half of the plain texts, those of odd length, start with BOS, as servers differ in this.
        return f"{BOS if len(sample.text) % 2 else ''}{sample.text}{EOS}"

    def _find_sources(self, row: list[int], num_given: int) -> list[int]:
        """Find where each digit of an answer was given, by the word that its number belongs to."""
        sources = [0] * len(row)
        given: dict[int, int] = {}
        for i, token in enumerate(row):
            if token in self.first_digits:
                key = row[i - 2] if row[i - 1] == self.is_token else row[i - 1]
                if num_given > 0:
                    given.setdefault(key, i)
                else:
                    sources[i] = given[key]
                num_given -= 1
            elif token in self.digits and sources[i - 1]:
                sources[i] = sources[i - 1] + 1
        return sources

    def _weigh(self, row: list[int], sources: list[int]) -> list[float]:
        weights = []
        for token, source in zip(row, sources, strict=True):
            if token not in self.digits:
                weights.append(1.0)
            elif not source:
                weights.append(0.0)  # a given digit is noise
            else:
                weights.append(FIRST_DIGIT_WEIGHT if token in self.first_digits else DIGIT_WEIGHT)
        return weights
