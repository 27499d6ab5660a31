"""Bytes that are nearly what they should be."""

from collections.abc import Sequence

from hypothesis import strategies as st

MAX_SLICE = 64


@st.composite
def mutated(
    draw: st.DrawFn, source: st.SearchStrategy[bytes], dictionary: Sequence[bytes] = ()
) -> bytes:
    """Draw bytes of `source` and change them in one to four places; `dictionary` holds what means
    something to those who read them.
    """
    data = draw(source)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, MAX_SLICE)))
        piece = data[at:end]
        data = data[:at] + draw(_replacements(piece, dictionary)) + data[end:]
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


def _replacements(piece: bytes, dictionary: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    known = st.sampled_from(list(dictionary)) if dictionary else st.just(b"")
    return st.one_of(
        st.binary(max_size=8),
        known,
        known.map(lambda word: word + piece),
        st.integers(2, 64).map(lambda times: piece * times),
        st.just(b""),
        st.integers(0, 7).map(lambda bit: bytes(byte ^ (1 << bit) for byte in piece)),
    )
