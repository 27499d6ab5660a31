"""What a client asks of its answer, as frozen dataclasses (vLLM V1's `sampling_params.py`)."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class RequestOutputKind(enum.IntEnum):
    """What each message of a stream holds."""

    DELTA = 1
    CUMULATIVE = 2
    FINAL_ONLY = 3


class EarlyStopping(enum.IntEnum):
    """When beam search may stop."""

    FALSE = 1
    TRUE = 2
    NEVER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A grammar the output has to follow: exactly one is set (`pdserve_common.structured`)."""

    json_schema: str | None = None  # JSON
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None  # EBNF
    json_object: bool = False
    structural_tag: str | None = None  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetectionParams:
    """End a request (REPETITION) when its last tokens repeat a pattern."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; defaults are vLLM's. Routers and workers
    validate them.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None  # None: up to max_model_len
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    # Those of the tokenizer's decoder, where special tokens are in the text.
    spaces_between_special_tokens: bool = True
    # Names of processors registered in the server; never code from the wire.
    logits_processors: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    # The tokens of bad_words, each in the forms it may take; filled in by the router.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    # Tokens that are guessed at a time, at most; None: as many as the worker likes.
    max_draft_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.DELTA

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_ranked(self) -> bool:
        """True if the best of more completions are chosen, so that none is known before all
        ended.
        """
        return self.best_of is not None and self.best_of > self.n
