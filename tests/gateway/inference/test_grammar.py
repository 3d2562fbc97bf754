"""What an answer is held to where there are tools."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.protocol.types import Grammar, GrammarKind, SamplingParams
from gateway.errors import ApiError
from gateway.inference.grammar import answer_grammar, grammar_error
from gateway.inference.prompt import Prompt
from gateway.tool_parsers.hermes_llama import EMBER, HERMES
from gateway.tool_parsers.tool_format import ToolFormat
from gateway.tool_parsers.tool_schema import ToolSelection

BYTES = LLTokenizer("byte")
RAIN = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": RAIN}} for name in ("rain", "sun")]
PERSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}}))
CALL = '{"name": "rain", "arguments": {"city": "Rome"}}'


def prompt(**fields: Any) -> Prompt:
    return Prompt(sampling=SamplingParams(), stop=[], messages=[], **{"tools": TOOLS, **fields})


def accepts(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar.source))
    assert not matcher.is_error(), matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_without_tools_the_callers_own_grammar_holds() -> None:
    assert answer_grammar(prompt(tools=None, grammar=PERSON), None, "m") is PERSON
    assert answer_grammar(prompt(tools=None), EMBER, "m") is None


def test_a_call_that_must_be_made_is_all_there_is() -> None:
    for own in (None, PERSON):
        required = answer_grammar(prompt(tool_choice=ToolSelection("required"), grammar=own), EMBER, "m")
        assert accepts(required, CALL)
        assert accepts(required, f"{CALL}\n{CALL}")
        assert not accepts(required, '{"age": 5}')
        assert not accepts(required, CALL.replace("Rome", "Paris"))
    named = answer_grammar(prompt(tool_choice=ToolSelection("named", "sun"), parallel_calls=False), EMBER, "m")
    sun = CALL.replace("rain", "sun")
    assert accepts(named, sun)
    assert not accepts(named, CALL)
    assert not accepts(named, f"{sun}\n{sun}")


def test_a_model_that_may_call_calls_or_answers_with_the_document() -> None:
    grammar = answer_grammar(prompt(grammar=PERSON), HERMES, "m")
    assert accepts(grammar, f"<tool_call>\n{CALL}\n</tool_call>")
    assert accepts(grammar, '{"age":5}')
    assert not accepts(grammar, "It is dry.")
    assert not accepts(grammar, '{"age":"five"}')


def test_strict_tools_are_held_to_where_text_is_free() -> None:
    assert answer_grammar(prompt(), HERMES, "m") is None
    grammar = answer_grammar(prompt(strict_calls=True), HERMES, "m")
    assert accepts(grammar, "It is dry.")
    assert accepts(grammar, f"Let me see. <tool_call>\n{CALL}\n</tool_call>")
    assert not accepts(grammar, f"<tool_call>\n{CALL.replace('Rome', 'Paris')}\n</tool_call>")


@pytest.mark.parametrize(
    ("grammar", "format"),
    [
        (Grammar(GrammarKind.REGEX, "x"), HERMES),
        (Grammar(GrammarKind.LARK, "start: x"), HERMES),
        (PERSON, EMBER),
    ],
)
def test_what_cannot_be_told_from_a_call_does_not_go_with_tools(grammar: Grammar, format: ToolFormat) -> None:
    with pytest.raises(ApiError) as raised:
        answer_grammar(prompt(grammar=grammar, grammar_field="guided_regex"), format, "m")
    assert raised.value.param == "guided_regex"


def test_tools_for_a_model_whose_calls_nobody_knows_are_refused() -> None:
    with pytest.raises(ApiError) as raised:
        answer_grammar(prompt(), None, "@cf/test/odd")
    assert raised.value.param == "tools"
    assert "@cf/test/odd" in raised.value.message


def test_a_refusal_names_the_tool_or_the_field() -> None:
    asked = prompt(tool_choice=ToolSelection("required"))
    grammar = answer_grammar(asked, EMBER, "m")
    assert grammar is not None
    line = 1 + next(i for i, text in enumerate(grammar.source.split("\n")) if text.startswith("t1"))
    said = grammar_error(asked, grammar, f"at {line}(5): no such thing")
    assert (said.param, "the parameters of 'sun'" in said.message) == ("tools", True)
    assert grammar_error(asked, grammar, "it is too large").param == "tools"
    either = prompt(grammar=PERSON, grammar_field="guided_json")
    assert grammar_error(either, answer_grammar(either, HERMES, "m"), "at 3(5): no such thing").param == "guided_json"
    assert grammar_error(prompt(tools=None), PERSON, "at 9(5): no such thing").param == "response_format"
