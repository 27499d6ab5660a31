"""Grammars in GBNF: what is none is refused by name, what is one allows what it says."""

import itertools
import random
import re

import pytest

from pdserve_common.errors import InvalidRequestError
from pdserve_common.structured import to_structural_tag
from pdserve_common.types.sampling_params import StructuredOutputsParams
from support.samples import seeds
from support.schemas import Judge


def judge_of(grammar: str) -> Judge:
    return Judge(StructuredOutputsParams(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= x "c"\nx ::= "a" (= "b")', "has (= in line 2, which is not enforced"),
        (
            'root ::= TagDispatch(("a", b))\nb ::= "x"',
            "has TagDispatch(...) in line 1, which is not enforced",
        ),
        ("root ::= Token(5)", "has Token(...) in line 1, which is not enforced"),
        ("root ::= ExcludeToken(5)", "has ExcludeToken(...) in line 1, which is not enforced"),
        ("root ::= TokenTagDispatch((5, b))", "has TokenTagDispatch(...) in line 1"),
        ('root ::= Regex("a")', "has Regex(...) in line 1, which is not enforced"),
        ('root ::= Substring("a")', "has Substring(...) in line 1, which is not enforced"),
        ('root[max_tokens=1] ::= "a"', "has [max_tokens=1] in line 1, where ::= is expected"),
        ('root ::= "a"\nb [lazy] ::= "a"', "uses b in line 2, a rule that is not defined"),
        ("root ::= <think>", "has < in line 1, which is not enforced"),
        ('root ::= "a"\x00 "b"', r"has \x00 in line 1, which is not enforced"),
        (r'root ::= "\ud800"', r"has \ud800 in line 1, which is no character"),
        (r'root ::= "\ud83d\ude00"', r"has \ud83d in line 1, which is no character"),
        (r'root ::= "\U00110000"', r"has \U00110000 in line 1, which is no character"),
        (r"root ::= [\ud800-\udfff]", r"has [\ud800-\udfff] in line 1, which is no character"),
        ("root ::= []", "has [] in line 1, which is no character"),
        (r"root ::= [\d]", r"has \d in line 1, which is not enforced"),
        ("root ::= [b-a]", "has a range that goes backwards in line 1"),
        ('root ::= "a" |\n\nb ::= "c"', "has b in line 3, where something is expected"),
        ("root ::=", "has its end in line 1, where something is expected"),
        ('root ::= ("a"', "has a ( without a ) in line 1"),
        ('root ::= "a")', "has ) in line 1, which is not enforced"),
        ('root ::= "a', 'has " in line 1, which is not enforced'),
        ('root ::= "a"*+', "has + in line 1, which is not enforced"),
        ('root ::= "a"{3,2}', "repeats 3 to 2 times in line 1, which is never"),
        ('root ::= "a" b ::= "c"', "defines b within line 1"),
        ('root ::= "a"\nroot ::= "b"', "defines root again in line 2"),
        ("root ::= \n# c\r\nnowhere", "uses nowhere in line 3, a rule that is not defined"),
        ('a ::= "a"', "has no rule root"),
        (f"root ::= {'(' * 65}[a]{')' * 65}", "has groups 65 deep, at most 64"),
    ],
)
def test_what_is_no_gbnf_is_refused_by_name(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        to_structural_tag(StructuredOutputsParams(grammar=grammar))
    assert refusal.value.message.startswith(f"structured_outputs.grammar {message}")
    assert refusal.value.field == "structured_outputs"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (
            'root ::= a | b\na ::= "x"\nb ::= [b]',
            'b ::= "x" # 1\n root::=b|\n c\nc::=[b-b]\nd ::= b',
        ),
        (r'root ::= "\x41\u0042\U00000043\n"', r'root ::= "ABC\u000a"'),
        ("root ::= [-]", r'root ::= "\x2d"'),
        (r"root ::= [^\n]", r"root ::= [\0-\x09\v-\ud7ff\ue000-\U0010ffff]"),
        ('root ::= "a"{0,} "b"{1,1} "c"{0} "d"{0,1}', 'root ::= "a"* "b" "" "d"?'),
        ('true ::= "a"\nroot ::= true', 'root ::= Token\nToken ::= "a"'),
    ],
)
def test_grammars_that_say_the_same_are_compiled_once(left: str, right: str) -> None:
    tags = [to_structural_tag(StructuredOutputsParams(grammar=text)) for text in (left, right)]
    assert tags[0] == tags[1]


BORDERS = [
    chr(code)
    for border in (0x1, 0x20, 0x41, 0x5E, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF)
    for code in (border, border + 1)
    if code != 0xD800
] + ["\U00010000", "\U0010ffff", "é", "你", "😀"]


@pytest.mark.parametrize("inner", ["^a", "^", r"^\n", "^\ud7ff", "a-\uffff", "^^", "-^", r"\]\\"])
def test_a_class_allows_characters_and_no_half_of_a_pair(inner: str) -> None:
    for grammar in (f"root ::= [{inner}]", f'root ::= [{inner}]* "x"'):
        judge = judge_of(grammar)
        pattern = re.compile(f"[{inner}]" if inner != "^" else "(?s:.)")
        end = "x" if "x" in grammar else ""
        for char in BORDERS:
            assert judge.allows(char + end) == bool(pattern.fullmatch(char)), char
        for high in range(0xA0, 0xC0):
            assert not judge.allows_prefix(bytes((0xED, high)))
        assert not judge.allows_prefix(b"\xf4\x90")


def test_a_dot_is_any_character() -> None:
    assert judge_of(r'root ::= "\0" .').allows_prefix(b"\0\0")
    judge = judge_of('root ::= . "." .{0,2}')
    assert all(map(judge.allows, ("a.", "\n.é", "😀..你")))
    assert not any(map(judge.allows, ("a", "ab", "....a")))


ALPHABET = 'ab-]"\\é\n^'


def random_grammar(rng: random.Random, depth: int) -> tuple[str, str]:
    """Return what a rule says, in GBNF and as a pattern of Python's."""
    kind = rng.choice(("text", "set", "options", "repeat", "group") if depth else ("text", "set"))
    if kind == "text":
        chars = "".join(rng.choices(ALPHABET, k=rng.randint(0, 3)))
        spelled = "".join(rng.choice((f"\\u{ord(c):04x}", f"\\U{ord(c):08x}")) for c in chars)
        return f'"{spelled}"', re.escape(chars)
    if kind == "set":
        chars = sorted(rng.sample(ALPHABET, k=rng.randint(1, 3)))
        negation = rng.choice(("", "^"))
        gbnf = "".join(f"\\u{ord(char):04x}" for char in chars)
        return f"[{negation}{gbnf}]", f"[{negation}{''.join(map(re.escape, chars))}]"
    parts = [random_grammar(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind == "options":
        gbnf, pattern = (" | ".join(each) for each in zip(*parts, strict=True))
        return f"({gbnf})", f"(?:{pattern.replace(' | ', '|')})"
    gbnf, pattern = (" ".join(each) for each in zip(*parts, strict=True))
    bounds = rng.choice(("*", "+", "?", "{2}", "{1,2}", "{0,3}")) if kind == "repeat" else ""
    return f"({gbnf}){bounds}", f"(?:{pattern.replace(' ', '')}){bounds}"


@pytest.mark.parametrize("seed", seeds(40))
def test_a_grammar_allows_what_a_pattern_of_the_same_says(seed: int) -> None:
    rng = random.Random(seed)
    gbnf, pattern = random_grammar(rng, 3)
    judge = judge_of(f"root ::= rest # {pattern!r}\nrest ::= {gbnf}")
    compiled = re.compile(pattern)
    texts = ["".join(chars) for n in range(3) for chars in itertools.product(ALPHABET, repeat=n)]
    texts += ["".join(rng.choices(ALPHABET, k=rng.randint(3, 6))) for _ in range(100)]
    for text in texts:
        assert judge.allows(text) == bool(compiled.fullmatch(text)), text
