"""What is written in GBNF, against the library that reads what becomes of it."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.errors import ApiError
from gateway.inference.gbnf import gbnf_to_lark, is_gbnf

BYTES = LLTokenizer("byte")
ARITHMETIC = r"""
# what llama.cpp has in its grammars/
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]{1,3} ws
ws    ::= [ \t]*
"""


def accepts(source: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(gbnf_to_lark(source)))
    assert not matcher.is_error(), matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["yesno", ""]),
        (ARITHMETIC, ["(a+1)*b_2=7\n", "1 = 2\n3=3\n"], ["1+=2\n", "1=2", "1234=1\n"]),
        (r'root ::= "a\"\\\n\x41\u00e9\U0001F600"', ['a"\\\nAé😀'], ["a"]),
        (r"root ::= [^a-c\]\\/]+", ["xyz&&~~--"], ["xbz", "]", "\\", "/"]),
        (r"root ::= [-x]{2} [a\-z]", ["-xa", "xx-", "--z"], ["-xb"]),
        ("root ::= . . \n\n", ["a\n", "éé"], ["a"]),
        ('root ::= one-Two "!"? # a comment\none-Two ::=\n  "1" |\n  "2"', ["1", "2!"], ["3"]),
        ('root ::= "" | "x" root', ["", "xxx"], ["y"]),
        ('root ::= [a-z]+ | "end" | "{" | "{\\"name"', ["enx", "{"], ["end{", '{"']),
    ],
)
def test_the_same_texts_match(source: str, good: list[str], bad: list[str]) -> None:
    assert is_gbnf(source)
    assert [text for text in good if not accepts(source, text)] == []
    assert [text for text in bad if accepts(source, text)] == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('root ::= "a" other', "line 1: there is no rule 'other'"),
        ('other ::= "a"', "there is no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is there twice"),
        ('root ::= "a', "line 1"),
        ("root ::= []", "line 1"),
        ('root ::= "\\q"', "\\q escapes nothing"),
        ('root ::= "\\ud800"', "D800 is no character"),
        ('root ::= "a"\n  ; "b"', "line 2"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_line(source: str, words: str) -> None:
    with pytest.raises(ApiError) as raised:
        gbnf_to_lark(source)
    assert raised.value.param == "guided_grammar"
    assert words in raised.value.message


def test_lark_is_left_alone() -> None:
    for source in ('start: "a"', 'start: x\nx: "a ::= b"', "%llguidance {}\nstart: /a/"):
        assert not is_gbnf(source)
