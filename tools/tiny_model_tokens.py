"""The tokenizer of pdserve-tiny and the training batches made with it."""

from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import tiny_model_data as data

VOCAB_SIZE = 1536  # room for each word of the texts as one token
MAX_POSITIONS = 2048
# Losses: the key and the first digit of an answer are where attention must find its way.
KEY_WEIGHT, FIRST_DIGIT_WEIGHT, DIGIT_WEIGHT = 8.0, 8.0, 4.0
CAST_WEIGHT = 4.0  # of a name or thing that a story said before
CONTEXT_WEIGHT = 0.25  # of the text around answers; the rest of answers and stories weighs 1
QUESTION_KEY_OFFSET = 4  # from the key in a question to the first token of its answer

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
    answers: Tensor  # the number of the answer that the token is part of, from 1; 0 outside
    digit_sources: Tensor  # for each digit of an answer, where it was given; 0 elsewhere
    word_sources: Tensor  # the same for the key of an answer and for the cast of a story


class Row(NamedTuple):
    ids: list[int]
    weights: list[float]
    answers: list[int]
    digit_sources: list[int]
    word_sources: list[int]


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
    """Turns samples into batches; codes are found by their digits, as stories hold none."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        vocab = tokenizer.get_vocab()
        self.first_digits = {vocab[f"Ġ{digit}"] for digit in range(10)}
        self.digits = self.first_digits | {vocab[str(digit)] for digit in range(10)}
        self.cast = {vocab[f"Ġ{word}"] for word in data.CAST if f"Ġ{word}" in vocab}
        self.is_token, self.assistant = vocab["Ġis"], vocab[ROLES[2]]
        missing = [key for key in data.KEYS if f"Ġ{key}" not in vocab]
        if missing:
            raise ValueError(f"keys of more than one token: {missing}")

    def encode(self, samples: Sequence[data.Sample]) -> Batch:
        num_answers, rows = 0, []
        for sample in samples:
            rows.append(self._encode_row(sample, num_answers))
            num_answers = max(num_answers, *rows[-1].answers)
        length = max(len(row.ids) for row in rows)

        def stack(lists: Iterable[Sequence[float]], padding: int) -> Tensor:
            return torch.tensor(
                [[*values] + [padding] * (length - len(values)) for values in lists]
            )

        pad = self.tokenizer.pad_token_id
        fields = zip(*rows, strict=True)
        return Batch(*(stack(lists, p) for lists, p in zip(fields, (pad, 0, 0, 0, 0), strict=True)))

    def _encode_row(self, sample: data.Sample, num_answers: int) -> Row:
        ids = self.tokenizer.encode(self._render(sample), add_special_tokens=False)
        digit_sources = self._find_digits(ids, sample.num_given)
        answers = self._number_answers(ids, digit_sources, num_answers)
        if not sample.num_given:
            word_sources = self._find_cast(ids)
            weights = [CAST_WEIGHT if source else 1.0 for source in word_sources]
            return Row(ids, weights, answers, digit_sources, word_sources)
        word_sources = [0] * len(ids)
        for i, token in enumerate(ids):
            if token in self.first_digits and digit_sources[i] and ids[i - 1] == self.is_token:
                word_sources[i - 2] = answers.index(answers[i]) - QUESTION_KEY_OFFSET
        places = zip(ids, digit_sources, word_sources, answers, strict=True)
        weights = [self._weigh(*place) for place in places]
        return Row(ids, weights, answers, digit_sources, word_sources)

    def _render(self, sample: data.Sample) -> str:
        if sample.messages:
            return str(self.tokenizer.apply_chat_template(sample.messages, tokenize=False))
        # Half of the plain texts, those of odd length, start with BOS, as servers differ in this.
        return f"{BOS if len(sample.text) % 2 else ''}{sample.text}{EOS}"

    def _find_digits(self, row: list[int], num_given: int) -> list[int]:
        """Find where each digit of an answer was given, by the key that its code belongs to."""
        sources = [0] * len(row)
        given: dict[int, int] = {}
        for i, token in enumerate(row):
            if token in self.first_digits:
                key = row[i - 2] if row[i - 1] == self.is_token else row[i - 1]
                if num_given > 0:
                    given[key] = i
                else:
                    sources[i] = given[key]
                num_given -= 1
            elif token in self.digits and sources[i - 1]:
                sources[i] = sources[i - 1] + 1
        return sources

    def _find_cast(self, row: list[int]) -> list[int]:
        """Find, for each later mention of a name or thing, the first one."""
        sources = [row.index(token) if token in self.cast else 0 for token in row]
        return [source if source < i else 0 for i, source in enumerate(sources)]

    def _number_answers(self, row: list[int], sources: list[int], count: int) -> list[int]:
        """Number the answers: in chats, turns that hold a code; in plain text, the codes."""
        answers = [0] * len(row)
        start = 0
        for i, token in enumerate(row):
            if token == self.assistant:
                start = i + 1
            elif token == self.tokenizer.eos_token_id:
                if start and any(sources[start:i]):
                    count += 1
                    answers[start : i + 1] = [count] * (i + 1 - start)
                start = 0
            elif sources[i] and not start:
                count += token in self.first_digits
                answers[i] = count
        return answers

    def _weigh(self, token: int, digit_source: int, word_source: int, answer: int) -> float:
        if digit_source:
            return FIRST_DIGIT_WEIGHT if token in self.first_digits else DIGIT_WEIGHT
        if token in self.digits:
            return 0.0  # a given digit is noise
        if word_source:
            return KEY_WEIGHT
        return 1.0 if answer else CONTEXT_WEIGHT
