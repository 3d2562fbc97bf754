import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.types import Grammar, GrammarKind
from gateway.inference.prompt import AUTO
from gateway.tool_parsers.reasoning import (
    MARKERS,
    ReasoningParser,
    grammar_after_reasoning,
    opens_reasoning,
    template_has_reasoning,
)
from gateway.tool_parsers.registry import TOOL_FORMATS
from gateway.tool_parsers.tool_schema import ToolSelection
from tests.support.call_reading import TOOLS, WEATHER, Read, cut, parser, read
from tests.support.sampled_calls import built_in, trained

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def told(text: str, opened: bool = False, size: int = 1) -> Read:
    found = read(ReasoningParser(parser("hermes"), opened), [text])
    assert read(ReasoningParser(parser("hermes"), opened), cut(text, size)) == found
    return found


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("<think>\nHm.\nYes.\n</think>\n\nIt rains.", False, "Hm.\nYes.", "It rains."),
        ("\n<think>Hm.</think>It rains.", False, "Hm.", "It rains."),
        ("Hm.\n</think>\n\nIt rains.", True, "Hm.", "It rains."),
        ("<think>Hm.</think>It rains.", True, "Hm.", "It rains."),
        ("<think>\n\n</think>\n\nIt rains.", False, "", "It rains."),
        ("<think>It goes on", False, "It goes on", ""),
        ("It goes on </thi", True, "It goes on </thi", ""),
        ("It rains. <think>no</think>", False, "", "It rains. <think>no</think>"),
        ("It rains.</think>", False, "", "It rains.</think>"),
        ("<thinking>no", False, "", "<thinking>no"),
        ("  \n", False, "", "  \n"),
        ("a\n\n\n</think>b", True, "a\n\n", "b"),
    ],
)
def test_thought_is_told_from_the_answer(text: str, opened: bool, thought: str, answer: str) -> None:
    for size in (1, 2, 5):
        found = told(text, opened, size)
        assert (found.thought, found.text) == (thought, answer)


def test_calls_come_behind_a_thought_and_never_within() -> None:
    found = told(f"<think>\nI could {CALL}\n</think>\n\n{CALL}")
    assert found.thought == f"I could {CALL}"
    assert found.values == [("get_weather", {"city": "Rome"})]
    assert found.text == ""


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "Hm", "<", "</", "think>", CALL]), max_size=12),
    st.booleans(),
    st.integers(1, 9),
)
def test_cuts_change_nothing(pieces: list[str], opened: bool, size: int) -> None:
    told("".join(pieces), opened, size)


def test_a_long_blank_before_a_thought_is_an_answer_whatever_the_cuts() -> None:
    text = "\n" * 5000 + "<think>Hm.</think>"
    assert told(text, size=7).text == text


def test_a_prompt_may_open_the_thought() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert template_has_reasoning("{{ '</think>' }}")
    assert not template_has_reasoning("{{ content }}")


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize("opened", [True, False])
def test_a_grammar_may_come_behind_a_thought(opened: bool, special: bool | None) -> None:
    vocabulary = built_in() if special is None else trained(MARKERS, special)
    calls = TOOL_FORMATS["hermes"].with_tokens(vocabulary.added)
    begun = "Well, <b>\n\n</think>\n\n" if opened else "<think>\nWell, <b>\n\n</think>\n\n"
    required = calls.grammar(TOOLS, ToolSelection("required"), True)
    assert required is not None
    for grammar, answer, wrong in [
        (required, CALL, "It rains."),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}'), "12", "x"),
        (Grammar(GrammarKind.LARK, 'start: "start" | "(" start ")"'), "((start))", "(behind_thought)"),
        (Grammar(GrammarKind.REGEX, r"^[ab/]+\/c[\d_]\w$"), "a/b/c1x", "a/c٣x"),
    ]:
        whole = grammar_after_reasoning(grammar, vocabulary.added, opened)
        assert vocabulary.fits(whole, begun + answer)
        assert not vocabulary.fits(whole, begun + wrong)
        assert vocabulary.fits(whole, answer) == (not opened)
    whole = grammar_after_reasoning(required, vocabulary.added, opened)
    text = next(text for seed in range(20) if (text := vocabulary.draw(whole, random.Random(seed), begun=begun)))
    found = read(ReasoningParser(calls.parser(TOOLS, AUTO), opened), cut(text, 3))
    assert found.thought == "Well, <b>\n"
    for name, value in found.values:
        jsonschema.validate(value, WEATHER if name == "get_weather" else {})
