"""gateway/tool_parsers/harmony.py: what of gpt-oss's messages is a thought, an answer or a call, and what holds it."""

import pytest

from engine.protocol.types import Grammar, GrammarKind
from gateway.tool_parsers.harmony import HARMONY
from gateway.tool_parsers.registry import tool_format_of
from tests.support.call_reading import cut, parser, read

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (f"{ANALYSIS}Hm.\nYes.<|end|>{FINAL}It rains.<|return|>", "Hm.\nYes.", "It rains."),
        (f"{ANALYSIS}Hm.<|end|>{FINAL}It rains.", "Hm.", "It rains."),
        ("<|channel|>final<|message|>a < b, and <|x|>", "", "a < b, and <|x|>"),
        (f"{ANALYSIS}It goes on <|en", "It goes on <|en", ""),
        (f"{ANALYSIS}Hm.<|end|><|start|>assist", "Hm.", ""),
        (f"{ANALYSIS}A.<|end|><|start|>assistant{ANALYSIS}B.<|end|>{FINAL}C", "A.B.", "C"),
        (f"<|channel|>final<|message|>C<|end|><|start|>assistant{ANALYSIS}late<|end|>", "", "C"),
        ("It rains.", "", "It rains."),
        ("<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}<|call|>", "", "{}"),
    ],
)
def test_thoughts_and_answers_are_told_apart_whatever_the_cuts(text: str, thought: str, answer: str) -> None:
    for size in (1, 2, 7, 1000):
        found = read(parser("harmony"), cut(text, size))
        assert (found.thought, found.text, found.calls) == (thought, answer, [])


def test_a_template_with_channels_is_in_the_format() -> None:
    assert tool_format_of("{{ '<|start|>assistant<|channel|>final<|message|>' }}", {}) == HARMONY


def test_a_document_is_held_to_the_final_message_behind_a_free_thought() -> None:
    assert HARMONY.hold is not None
    tokens = {"<|channel|>": 5, "<|message|>": 6, "<|end|>": 7, "<|start|>": 8}
    lines = HARMONY.hold(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), tokens, False).source.splitlines()
    assert lines == [
        'start: (<[5]> "analysis" <[6]> free_thought)? <[5]> "final" <[6]> behind_thought',
        'free_thought: /(.|\\n)*/ <[7]> <[8]> "assistant"',
        'behind_thought: %json {"type": "object"}',
    ]
