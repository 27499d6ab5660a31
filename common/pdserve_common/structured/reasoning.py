"""Reasoning before what an answer has to be: free text up to a marker, as part of a structural tag.

A marker that is one of the model's added tokens is named by its id: no text of a grammar matches
special tokens, and of others a model knows no other spelling.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured.json_text import check_size
from pdserve_common.structured.node import short
from pdserve_common.structured.tags import Format, read_format
from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.sampling_params import SamplingParams

MAX_MARKER_BYTES = 64
_FIELD = "reasoning_parser_kwargs"
# As vLLM's reasoning parsers call them.
_START, _END = _MARKERS = ("reasoning_start_str", "reasoning_end_str")
# What an answer may have between reasoning and what follows.
_LINE_BREAKS: Format = {"type": "regex", "pattern": r"\n{0,2}"}
_NO_IDS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """What an answer has before it has to be anything: text up to the marker `end`."""

    end: str
    # Reasoning may begin with it.
    start: str = ""

    def formats(
        self, added_token_ids: Mapping[str, int], stop_token_ids: Collection[int] = ()
    ) -> list[Format]:
        """Return the formats before the constraint's. `added_token_ids` has the tokens that a
        tokenizer takes for a text as a whole, `stop_token_ids` those that end an answer. Raises
        InvalidRequestError for a marker that ends it, and for one that is no token, but has one
        within.
        """
        ids = {each: added_token_ids[each] for each in self._markers if each in added_token_ids}
        for name, marker in zip(_MARKERS, self._markers, strict=True):
            within = [text for text in added_token_ids if text in marker]
            if ids.get(marker) in stop_token_ids:
                raise InvalidRequestError(f"{_FIELD}.{name} ends the answer", field=_FIELD)
            if within and marker not in ids:
                raise InvalidRequestError(
                    f"{_FIELD}.{name} has the token {short(within[0])} within, must be one token "
                    "or text without such",
                    field=_FIELD,
                )
        elements = reasoning_formats("", self.end, ids)
        # As text it is free text.
        if self.start in ids:
            elements = [{"type": "optional", "content": _token(self.start, ids)}, *elements]
        read = read_format({"type": "sequence", "elements": elements}, field=_FIELD)
        formats: list[Format] = read["elements"]
        return formats

    @property
    def _markers(self) -> tuple[str, str]:
        return self.start, self.end


def reasoning_of(request: EngineCoreRequest, params: SamplingParams) -> Reasoning | None:
    """Return what a request says of the reasoning before its constraint; None: there is none.
    Raises InvalidRequestError for what makes no sense.
    """
    ended, kwargs = request.reasoning_ended, request.reasoning_parser_kwargs
    if ended is None and not kwargs:
        return None
    if params.structured_outputs is None:
        name = _FIELD if ended is None else "reasoning_ended"
        raise InvalidRequestError(
            f"{name} is set, structured_outputs is not: it says where they begin", field=name
        )
    if ended is None:
        raise InvalidRequestError(
            f"{_FIELD} is set, reasoning_ended is not: does the prompt end the reasoning?",
            field=_FIELD,
        )
    for name, marker in kwargs.items():
        _check_marker(name, marker)
    if ended:
        return None
    if _END not in kwargs:
        raise InvalidRequestError(
            f"reasoning_ended is False, {_FIELD} has no {_END}", field="reasoning_ended"
        )
    return Reasoning(end=kwargs[_END], start=kwargs.get(_START, ""))


def _check_marker(name: str, marker: str) -> None:
    if name not in _MARKERS:
        raise InvalidRequestError(
            f"{_FIELD} has {short(name)}, known are {', '.join(_MARKERS)}", field=_FIELD
        )
    check_size(marker, field=f"{_FIELD}.{name}", limit=MAX_MARKER_BYTES)
    if "\0" in marker:
        raise InvalidRequestError(f"{_FIELD}.{name} has a NUL character", field=_FIELD)


def reasoning_formats(begin: str, end: str, ids: Mapping[str, int]) -> list[Format]:
    """Return `begin`, free text up to `end`, and what may follow it. `ids` has the markers that
    are tokens.
    """
    # Either way the text has no special tokens: any_text would let them pass, also `end` itself.
    free = [_text(end, is_through=end not in ids)]
    if end in ids:
        free.append(_token(end, ids))
    return [*texts(begin, ids), *free, _LINE_BREAKS]


def texts(text: str, ids: Mapping[str, int] = _NO_IDS) -> list[Format]:
    """Return text and tokens, one behind the other."""
    markers = "|".join(map(re.escape, ids)) or "(?!)"
    return [
        _token(piece, ids) if piece in ids else {"type": "const_string", "value": piece}
        for piece in re.split(f"({markers})", text)
        if piece
    ]


def _token(marker: str, ids: Mapping[str, int]) -> Format:
    return {"type": "token", "token": ids[marker]}


def _text(marker: str, *, is_through: bool) -> Format:
    """Return text up to the first marker in it and with that, or text without a marker, which reads
    like the token. A rule for each number of the marker's characters that came last.
    """
    rules = ["root ::= s0"]
    for number, following in enumerate(_transitions(marker)):
        known = "".join(map(_escaped, following))
        options = [f"[^{known}] s0"] if is_through else ['""', f"[^{known}] s0"]
        for character, behind in following.items():
            if behind < len(marker):
                options.append(f'"{_escaped(character)}" s{behind}')
            elif is_through:
                options.append(f'"{_escaped(character)}"')
        rules.append(f"s{number} ::= {' | '.join(options)}")
    return {"type": "grammar", "grammar": "\n".join(rules)}


def _transitions(marker: str) -> list[dict[str, int]]:
    """Return, for each number of the marker's characters that came last, how many have come behind
    a character; others than these begin anew (Knuth, Morris and Pratt).
    """
    table: list[dict[str, int]] = []
    shorter: dict[str, int] = {}  # of the longest other beginning of the marker that came last
    for number, character in enumerate(marker):
        table.append({**shorter, character: number + 1})
        shorter = table[shorter.get(character, 0)]
    return table


def _escaped(character: str) -> str:
    return f"\\U{ord(character):08x}" if ord(character) > 0xFFFF else f"\\u{ord(character):04x}"
