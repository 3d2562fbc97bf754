import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from engine.protocol.types import Grammar, GrammarKind
from engine.structured_output.lark_source import to_lark
from engine.structured_output.llguidance_backend import open_matcher
from gateway.errors import ApiError
from gateway.inference.prompt import AUTO
from gateway.tool_parsers import call_grammar
from gateway.tool_parsers.registry import TOOL_FORMATS
from gateway.tool_parsers.tool_schema import ToolSelection
from tests.support.call_reading import TOOLS, WEATHER, cut, read, tool
from tests.support.recorded_calls import RECORDED, Recorded
from tests.support.sampled_calls import Vocabulary, built_in, trained

FORMAT_NAMES = sorted(TOOL_FORMATS)
REQUIRED = ToolSelection("required")
NAMED = ToolSelection("named", "plan")
PLAN = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "description": "what it is called"},
        "kind": {"enum": ["walk", "a\"b'c\\", "two\nlines", "é"]},
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "maxItems": 3},
        "cost": {"type": "number", "minimum": 0, "maximum": 100},
        "open": {"type": "boolean"},
        "seats": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["kind", "cost", "open"],
    "$defs": {"step": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}},
}
ALL = [*TOOLS, tool("plan", PLAN), tool("no-parameters", {"type": "object", "properties": {}})]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in ALL}
UNMISTAKABLE = [name for name in FORMAT_NAMES if name not in ("ember", "harmony", "llama3_json", "pythonic")]


def vocabularies(format: str) -> list[Vocabulary]:
    markers = TOOL_FORMATS[format].markers
    return [built_in(), *(trained(markers, special) for special in (True, False))]


def check_calls(found: list[tuple[str, Any]]) -> None:
    for name, value in found:
        jsonschema.validate(value, SCHEMAS[name])


@pytest.mark.parametrize("choice", [REQUIRED, NAMED], ids=lambda choice: choice.mode)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_required_calls_are_valid_whatever_tokens_are_drawn(format: str, choice: ToolSelection) -> None:
    draw, drawn = random.Random(7), 0
    for vocabulary in vocabularies(format):
        model = TOOL_FORMATS[format].with_tokens(vocabulary.added)
        grammar = model.grammar(ALL, choice, True)
        assert grammar is not None
        for _ in range(5):
            text = vocabulary.draw(grammar, draw)
            if text is None:
                continue
            found = read(model.parser(ALL, choice), cut(text, 3))
            assert found.text == ""
            assert found.values
            check_calls(found.values)
            assert choice.name is None or {name for name, _ in found.values} == {choice.name}
            drawn += 1
    assert drawn >= 6


@pytest.mark.parametrize("recorded", [r for r in RECORDED if r.calls], ids=lambda recorded: recorded.format)
def test_what_models_write_is_what_the_grammar_allows(recorded: Recorded) -> None:
    vocabulary = trained(TOOL_FORMATS[recorded.format].markers, True)
    model = TOOL_FORMATS[recorded.format].with_tokens(vocabulary.added)
    for parallel in (True, False):
        free = recorded.text != ""
        grammar = model.grammar(TOOLS, AUTO if free else REQUIRED, parallel)
        if grammar is not None:
            fits = vocabulary.fits(grammar, recorded.completion)
            assert fits == ((parallel or len(recorded.calls) == 1) and not recorded.loose)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_one_call_where_several_are_not_allowed(format: str) -> None:
    draw, drawn = random.Random(5), 0
    for vocabulary in vocabularies(format):
        model = TOOL_FORMATS[format].with_tokens(vocabulary.added)
        grammar = model.grammar(ALL, REQUIRED, False)
        assert grammar is not None
        for _ in range(6):
            if text := vocabulary.draw(grammar, draw):
                assert len(read(model.parser(ALL, REQUIRED), [text]).values) == 1
                drawn += 1
    assert drawn >= 6


@pytest.mark.parametrize("format", UNMISTAKABLE)
def test_a_call_that_the_model_begins_by_itself_is_valid(format: str) -> None:
    draw, drawn = random.Random(3), 0
    for vocabulary in vocabularies(format):
        model = TOOL_FORMATS[format].with_tokens(vocabulary.added)
        grammar = model.grammar(ALL, AUTO, True)
        assert grammar is not None
        mark = {"hermes": "<tool_call>", "qwen_coder": "<tool_call>", "kimi": "<|tool_calls_section_begin|>"}.get(
            format, "[TOOL_CALLS]" if format.startswith("mistral") else "<｜tool▁calls▁begin｜>"
        )
        for _ in range(6):
            if text := vocabulary.draw(grammar, draw, begun="So < be it.\n" + mark):
                found = read(model.parser(ALL, AUTO), cut(text, 2))
                assert found.text.startswith("So < be it.\n")
                assert found.values
                check_calls(found.values)
                drawn += 1
    assert drawn >= 6


@pytest.mark.parametrize("format", UNMISTAKABLE)
def test_text_stays_free_where_calls_may_come(format: str) -> None:
    for vocabulary in vocabularies(format):
        grammar = TOOL_FORMATS[format].with_tokens(vocabulary.added).grammar(ALL, AUTO, True)
        assert grammar is not None
        matcher = open_matcher(vocabulary.library, to_lark(grammar))
        assert matcher.consume_tokens(vocabulary.library.tokenize_str('{"a": <tool 🙂 [TOOL] \n\n```json'))
        assert matcher.is_accepting()


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_nothing_is_held_to_without_tools_or_against_the_choice(format: str) -> None:
    model = TOOL_FORMATS[format]
    assert model.grammar([], AUTO, True) is None
    assert model.grammar(ALL, ToolSelection("none"), True) is None
    assert (model.grammar(ALL, AUTO, True) is None) == (format not in UNMISTAKABLE)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_a_schema_that_the_library_refuses_is_traced_to_its_tool(format: str) -> None:
    bad = tool("bad_one", {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}})
    grammar = TOOL_FORMATS[format].grammar([*ALL, bad, tool("last")], REQUIRED, True)
    assert grammar is not None
    for source in (to_lark(grammar), grammar.source):  # a replica's, and ours
        message = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(source), built_in().library)
        assert "uniqueItems" in message
        assert call_grammar.tool_at_fault(grammar.source, message) == "bad_one"


def test_a_message_without_a_line_is_no_tools_fault() -> None:
    assert call_grammar.tool_at_fault("start: answer\n", "too many items") is None
    assert call_grammar.tool_at_fault("start: answer\n", "at 1(3): what?") is None


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_names_cannot_break_out_of_a_grammar(format: str) -> None:
    nasty = 'x"\n// "other"\nstart: /.*/ \\'
    model = TOOL_FORMATS[format].with_tokens(built_in().added)
    if format in ("pythonic", "qwen_coder", "kimi", "harmony", "deepseek", "deepseek_fenced", "mistral_named"):
        with pytest.raises(ApiError, match="its name may have letters"):
            model.grammar([tool(nasty, WEATHER)], REQUIRED, True)
        return
    grammar = model.grammar([tool(nasty, WEATHER)], REQUIRED, True)
    assert grammar is not None
    text = next(text for seed in range(9) if (text := built_in().draw(grammar, random.Random(seed))))
    assert {name for name, _ in read(model.parser([tool(nasty)], REQUIRED), [text]).values} == {nasty}


def test_members_come_in_order_with_commas_between_only() -> None:
    lines = ["start: m", *call_grammar.members("m", [False, True, False], '","'), 'm0: "a"', 'm1: "b"', 'm2: "c"']
    grammar = Grammar(GrammarKind.LARK, "\n".join(lines))
    assert all(built_in().fits(grammar, text) for text in ("b", "a,b", "b,c", "a,b,c"))
    assert not any(built_in().fits(grammar, text) for text in ("a", "", "a,c", "b,a", ",b", "b,", "a,,b"))


def test_what_a_format_cannot_hold_to_is_refused_with_the_tools_name() -> None:
    patterned = tool("sized", {"type": "object", "properties": {"x": {"type": "string", "pattern": "^a"}}})
    either = tool("either", {"type": "object", "anyOf": [{"required": ["x"]}, {"required": ["y"]}]})
    spaced = tool("spaced", {"type": "object", "properties": {"a)b": {"type": "integer"}}})
    nameless = tool("nameless", {"type": "object", "properties": {"": {"type": "integer"}}})
    array = tool("array", {"type": "array"})
    for format, one in [
        *(("qwen_coder", patterned), ("qwen_coder", either), ("pythonic", either), ("pythonic", spaced)),
        *(("qwen_coder", nameless), ("pythonic", nameless)),
        *((name, array) for name in FORMAT_NAMES),
    ]:
        with pytest.raises(ApiError) as refused:
            TOOL_FORMATS[format].grammar([one], REQUIRED, True)
        assert refused.value.param == "tools"
        assert one["function"]["name"] in refused.value.message


def test_parameters_that_are_not_described_are_not_written() -> None:
    for schema, more in [(WEATHER, False), ({"type": "object", "properties": {}}, False), ({}, True)]:
        grammar = TOOL_FORMATS["ember"].grammar([tool("f", {**schema, "required": []})], REQUIRED, False)
        assert grammar is not None
        assert built_in().fits(grammar, '{"name": "f", "arguments": {}}')
        assert built_in().fits(grammar, '{"name": "f", "arguments": {"more": 1}}') == more


def test_the_same_tools_make_the_same_grammar() -> None:
    grammars = [TOOL_FORMATS["kimi"].grammar(json.loads(json.dumps(ALL)), REQUIRED, True) for _ in range(2)]
    assert grammars[0] == grammars[1]
