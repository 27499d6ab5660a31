"""What reads the text of an answer, and which tokens it has to see for that."""

from collections.abc import Sequence, Set

from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.chat_formats.base import Parser, ParserOptions, TextParser
from pdserve_router.chat_formats.registry import FORMATS
from pdserve_router.text.detokenizer import NO_UNSPACED, Detokenizer
from pdserve_router.text.tokenizer import Tokenizer


def answer_parser(
    parsing: ParserOptions | None, request: EngineCoreRequest, index: int
) -> Parser | TextParser:
    """Return a parser for completion `index`; None: an answer is text."""
    if parsing is None:
        return TextParser()
    # Clients may name all turns of a conversation alike; its prompt grows from turn to turn.
    name = f"{request.external_req_id}/{len(request.prompt_token_ids)}/{index}"
    return Parser(FORMATS[parsing.format], parsing, name)


def answer_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    parsing: ParserOptions | None,
) -> Detokenizer:
    """Return what makes text of an answer's tokens."""
    skipped = silent_token_ids(tokenizer, params, parsing)
    is_spaced = params.skip_special_tokens or params.spaces_between_special_tokens
    return Detokenizer(
        tokenizer.backend,
        texts=tokenizer.texts,
        skipped=skipped,
        stops=params.stop,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        unspaced=NO_UNSPACED if is_spaced else tokenizer.added_tokens,
        # To a grammar a token is the same text wherever it stands: no first one loses its space.
        prompt=tokenizer.prompt_end(
            prompt_token_ids, skipped=skipped, begins_text=params.structured_outputs is None
        ),
        token_bytes=tokenizer.token_bytes,
    )


def silent_token_ids(
    tokenizer: Tokenizer, params: SamplingParams, parsing: ParserOptions | None
) -> Set[int]:
    """Return the tokens that are not in the text that is read: special ones, but markers."""
    if not params.skip_special_tokens:
        return frozenset()
    if parsing is None:
        return tokenizer.special_token_ids
    markers = map(tokenizer.backend.token_to_id, FORMATS[parsing.format].markers)
    return tokenizer.special_token_ids - set(markers)
