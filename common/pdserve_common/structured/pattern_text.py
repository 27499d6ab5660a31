"""Patterns' trees as texts that xgrammar takes for what they are."""

from collections.abc import Sequence

from pdserve_common.structured.patterns import Alt, Chars, Node, Ranges, Repeat, intersection, parts

# xgrammar writes repetitions out up to here. Of longer ones its masks let tokens pass that end them
# too early, so they are repetitions of groups.
MAX_WRITTEN_OUT = 128
_GROUP_SIZE = 32

_UTF8_LENGTHS: Ranges = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF))
_ALL_LENGTHS: Ranges = ((0, 0x10FFFF),)


def write(node: Node, *, is_split: bool = True) -> str:
    """The pattern of a tree without anchors, in printable ASCII. xgrammar's automata, which take
    patterns within JSON, take wrong bytes for ranges over characters of different lengths in UTF-8,
    unless they are split; its rules are slow if they are.
    """
    if isinstance(node, Chars):
        return _class_text(node.ranges, _UTF8_LENGTHS if is_split else _ALL_LENGTHS)
    if isinstance(node, Repeat):
        text = write(node.part, is_split=is_split)
        text = text if isinstance(node.part, Chars) else f"(?:{text})"
        return repeated(text, node.low, node.high)
    texts = [write(part, is_split=is_split) for part in parts(node)]
    return f"(?:{'|'.join(texts)})" if isinstance(node, Alt) else "".join(texts)


def repeated(text: str, low: int, high: int | None) -> str:
    """The pattern of a character, or a group, `low` to `high` times; any number if that is None."""
    if max(low, high or 0) <= MAX_WRITTEN_OUT:
        return f"{text}{{{low},{'' if high is None else high}}}"
    rest = f"{text}{{0,}}" if high is None else _at_most(text, high - low)
    return f"(?:{_exactly(text, low)}{rest})"


def _exactly(text: str, count: int) -> str:
    if count <= MAX_WRITTEN_OUT:
        return f"{text}{{{count}}}" if count else ""
    num_groups, rest = divmod(count, _GROUP_SIZE)
    return _exactly(_group(text), num_groups) + _exactly(text, rest)


def _at_most(text: str, count: int) -> str:
    """As groups and less than a group, so that each number is there in one way."""
    if count <= MAX_WRITTEN_OUT:
        return f"{text}{{0,{count}}}"
    group, (num_groups, rest) = _group(text), divmod(count, _GROUP_SIZE)
    fewer = _at_most(group, num_groups - 1) + f"{text}{{0,{_GROUP_SIZE - 1}}}"
    return f"(?:{fewer}|{_exactly(group, num_groups)}{text}{{0,{rest}}})"


def _group(text: str) -> str:
    return f"(?:{text}{{{_GROUP_SIZE}}})"


def _class_text(ranges: Ranges, lengths: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and _is_single(chr(ranges[0][0])):
        return _char_text(ranges[0][0])
    classes = [
        "".join(_range_text(*pair) for pair in ordered(part))
        for length in lengths
        if (part := intersection(ranges, (length,)))
    ]
    return f"[{classes[0]}]" if len(classes) == 1 else f"(?:[{']|['.join(classes)}])"


def _is_single(char: str) -> bool:
    return char.isalnum() or char == "^"


def ordered(ranges: Ranges) -> Sequence[tuple[int, int]]:
    """Return ranges as a class can have them. As xgrammar writes them to itself, a control
    character (\\x1f) takes all hexadecimal digits behind it, and what begins with ^ is the
    class of all others.
    """
    caret = ord("^")
    if len(ranges) == 1 and ranges[0][0] == caret:
        return ((caret + 1, ranges[0][1]), (caret, caret))
    return sorted(ranges, key=lambda pair: (pair[0] == caret, pair[0] < ord(" ")))


def _range_text(low: int, high: int) -> str:
    return _char_text(low) if low == high else f"{_char_text(low)}-{_char_text(high)}"


def _char_text(code: int) -> str:
    is_plain = code < 0x80 and chr(code).isalnum()
    return chr(code) if is_plain else f"\\u{{{code:x}}}"
