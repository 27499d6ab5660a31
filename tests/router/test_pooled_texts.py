"""Texts to be pooled, as the model's template puts them together."""

import math

import pytest
from tokenizers.processors import ByteLevel, RobertaProcessing, TemplateProcessing

from pdserve_router.text.tokenizer import Cut, Tokenizer

END = ("<|eos|>", 1)
TEMPLATE = TemplateProcessing(
    single="<|bos|> $A <|eos|>",
    pair="<|bos|> $A <|eos|> $B <|eos|>",
    special_tokens=[("<|bos|>", 0), END],
)
SECOND_FIRST = TemplateProcessing(single="$A", pair="$B:1 <|eos|> $A", special_tokens=[END])


class CountingBackend:
    """A tokenizer that counts the encodings which it is to put together."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self.num_encodings = 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def post_process(self, first, second=None, add_special_tokens=True):
        pieces = [1 + len(each.overflowing) for each in (first, second) if each is not None]
        self.num_encodings += math.prod(pieces)
        assert self.num_encodings < 100, "with all that was cut off"
        return self._backend.post_process(first, second, add_special_tokens)


@pytest.fixture
def tokenizer(model_dir):
    """One of this test alone, as its template is set."""
    tokenizer = Tokenizer(str(model_dir))
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize("adds_special", [True, False])
@pytest.mark.parametrize(
    "processor", [ByteLevel(), RobertaProcessing(END, ("<|bos|>", 0)), TEMPLATE, SECOND_FIRST]
)
async def test_texts_are_put_together_as_the_model_has_it(
    tokenizer, processor, adds_special
) -> None:
    tokenizer.backend.post_processor = processor
    for texts in (("hello",), ("hello world", "the quick fox"), ("", "a"), ("",)):
        ids = await tokenizer.encode_pooled(*texts, max_tokens=100, add_special_tokens=adds_special)
        assert ids == tokenizer.backend.encode(*texts, add_special_tokens=adds_special).ids


@pytest.mark.parametrize("num_texts", [1, 2])
@pytest.mark.parametrize("keeps_end", [False, True])
async def test_what_is_cut_off_is_not_put_together(tokenizer, num_texts, keeps_end) -> None:
    tokenizer.backend.post_processor = TEMPLATE
    tokenizer.backend = CountingBackend(tokenizer.backend)
    texts = ["the quick fox " * 700, "hello world dog " * 700][:num_texts]
    whole = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert min(map(len, whole)) > 2000
    cut = Cut(4 + 1 + num_texts, keeps_end)
    size = 4 // num_texts
    kept = [part[-size:] if keeps_end else part[:size] for part in whole]
    found = await tokenizer.encode_pooled(*texts, max_tokens=100_000, cut=cut)
    assert found == [0, *(token_id for part in kept for token_id in (*part, 1))]
