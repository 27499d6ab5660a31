"""Protobuf messages of any type, drawn field by field from their descriptors: a new field is tried
without a word here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from byte_mutations import mutated
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MAX_DEPTH = 4
# Where checks have their limits, and where integers of machines end.
NUMBERS = (0, 1, 2, 3, 16, 20, 21, 64, 65, 127, 128, 256, 1000, 1001, 1391, 1392)
TEXTS = ("", " ", "a", "\x00", "é", "😀", "a\nb", "%s", "x" * 300, "127.0.0.1", "127.0.0.1:1")
# Tags and lengths that mean something to a parser.
DICTIONARY = (b"\x0a\x00", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b", b"\x0c", b"\x00", b"\xff" * 10)
BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Known(NamedTuple):
    """Values that mean something to who is called: names that exist, ids in use."""

    texts: Sequence[str] = ()
    numbers: Sequence[int] = ()
    # What messages of a type, by its full name, are often, besides what is drawn.
    parts: Mapping[str, st.SearchStrategy[Message]] = {}


NOTHING = Known()


def messages(
    descriptor: Descriptor, known: Known = NOTHING, depth: int = 0
) -> st.SearchStrategy[Message]:
    """Any message of a type: up to six of its fields."""
    cls = GetMessageClass(descriptor)
    fields = {field.name: _field(field, known, depth) for field in descriptor.fields}
    if depth >= MAX_DEPTH:
        fields = {}
    if not fields:
        return st.builds(cls)
    names = st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True)
    values = names.flatmap(lambda names: st.fixed_dictionaries({n: fields[n] for n in names}))
    return values.map(lambda values: cls(**values))


def merged(
    base: st.SearchStrategy[Message], drawn: st.SearchStrategy[Message]
) -> st.SearchStrategy[Message]:
    """`base` with what is drawn over it: mostly right, so that it gets far."""
    return st.tuples(base, drawn).map(lambda pair: _merge(*pair))


def payloads(source: st.SearchStrategy[Message]) -> st.SearchStrategy[bytes]:
    """Messages as bytes: whole, spoilt, and bytes that are none."""
    whole = source.map(lambda message: message.SerializeToString())
    return st.one_of(whole, whole, mutated(whole, DICTIONARY), st.binary(max_size=60))


def _merge(base: Message, drawn: Message) -> Message:
    merged = type(base)()
    merged.CopyFrom(base)
    merged.MergeFrom(drawn)
    return merged


def _field(field: FieldDescriptor, known: Known, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        by_name = field.message_type.fields_by_name
        keys, values = (_one(by_name[name], known, depth) for name in ("key", "value"))
        return st.dictionaries(keys, values, max_size=4)
    one = _one(field, known, depth)
    if not field.is_repeated:
        return one
    many = st.tuples(one, st.integers(2, 2000)).map(lambda pair: [pair[0]] * pair[1])
    return st.one_of(
        st.lists(one, max_size=4), many if field.message_type is None else st.lists(one)
    )


def _one(field: FieldDescriptor, known: Known, depth: int) -> st.SearchStrategy[Any]:
    """One value of a field."""
    if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        return _scalar(field, known)
    drawn = st.deferred(lambda: messages(field.message_type, known, depth + 1))
    often = known.parts.get(field.message_type.full_name)
    return drawn if often is None else st.one_of(often, drawn)


def _scalar(field: FieldDescriptor, known: Known) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in BITS:
        low, high = BITS[kind]
        edges = (low, low + 1, high - 1, high, 2**31 - 1, 2**31, *NUMBERS, *known.numbers)
        usual = st.sampled_from([value for value in edges if low <= value <= high])
        return st.one_of(usual, st.integers(0, 8), st.integers(low, high))
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        width = 32 if kind == FieldDescriptor.CPPTYPE_FLOAT else 64
        usual = st.sampled_from((0.0, 0.5, 1.0, -1.0, 2.0, -100.0, 100.0))
        return st.one_of(usual, st.floats(width=width))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        numbers = [value.number for value in field.enum_type.values]
        return st.sampled_from([*numbers, max(numbers) + 1, 2**31 - 1, -1])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    wild = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    return st.one_of(st.sampled_from([*TEXTS, *known.texts]), wild)
