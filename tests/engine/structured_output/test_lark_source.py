"""engine/structured_output/lark_source.py: what of a caller's grammar reaches the library, and what is refused before
it."""

import json

import pytest

from engine.protocol.types import Grammar, GrammarKind, RejectReason
from engine.sequences.validation import SubmitRejected
from engine.structured_output.lark_source import SCHEMA_DEPTH_MAX, SOURCE_BYTES_MAX, to_lark


def schema_of(schema: object) -> dict[str, object]:
    """What the library is given for it."""
    lark = to_lark(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    found, _ = json.JSONDecoder().raw_decode(lark, lark.index("{", lark.index("%json")))
    assert isinstance(found, dict)
    return found


def refusal(kind: GrammarKind, source: str) -> str:
    with pytest.raises(SubmitRejected) as refused:
        to_lark(Grammar(kind, source))
    assert refused.value.reason == RejectReason.GRAMMAR
    return refused.value.message


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(levels - 1):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_source_may_have_so_many_bytes_and_no_more(kind: GrammarKind) -> None:
    most = SOURCE_BYTES_MAX[kind]
    long = {GrammarKind.JSON_SCHEMA: f'{{"title":"{"x" * (most - 12)}"}}'}.get(kind, "é" * (most // 2))
    assert len(long.encode()) == most
    to_lark(Grammar(kind, long))
    assert str(most) in refusal(kind, long + " ")


def test_schemas_may_be_nested_so_deeply_and_no_deeper() -> None:
    schema_of(nested(SCHEMA_DEPTH_MAX))
    assert f"deeper than {SCHEMA_DEPTH_MAX}" in refusal(
        GrammarKind.JSON_SCHEMA, json.dumps(nested(SCHEMA_DEPTH_MAX + 1))
    )
    refusal(GrammarKind.JSON_SCHEMA, "[" * 10_000 + "]" * 10_000)


@pytest.mark.parametrize("source", ["", "[1", "nonsense", '{"a": NaN}', "false", "3", "[]"])
def test_what_is_no_schema_is_refused(source: str) -> None:
    assert refusal(GrammarKind.JSON_SCHEMA, source)
    assert refusal(GrammarKind.LARK, f"start: %json {source}")


def test_a_schema_cannot_ask_the_library_to_ignore_what_it_cannot_do() -> None:
    """Neither by itself, nor inside a grammar, nor where it is spelled in another way."""
    lenient = {"type": "object", "x-guidance": {"lenient": True}}
    assert "lenient" not in json.dumps(schema_of(lenient))
    spelled = json.dumps(lenient).replace("-", "\\u002d")
    lark = to_lark(Grammar(GrammarKind.LARK, f'start: "a" %json {spelled} "b"\n'))
    assert "lenient" not in lark
    assert lark.endswith('"b"\n')


def test_formats_that_assert_nothing_are_left_out_where_they_are_formats() -> None:
    schema = {
        "properties": {"format": {"type": "string", "format": "binary"}, "when": {"format": "date-time"}},
        "items": [{"format": "int32"}],
        "enum": [{"format": "binary"}],
        "uniqueItems": False,
    }
    found = schema_of(schema)
    assert found["properties"] == {"format": {"type": "string"}, "when": {"format": "date-time"}}
    assert found["items"] == [{}]
    assert found["enum"] == [{"format": "binary"}]
    assert "uniqueItems" not in found
    assert schema_of({"uniqueItems": True})["uniqueItems"] is True, "to be refused by name"


def test_the_order_of_properties_is_kept() -> None:
    assert list(schema_of({"properties": {"z": {}, "a": {}, "m": {}}})["properties"]) == ["z", "a", "m"]  # type: ignore[call-overload]


@pytest.mark.parametrize("literal", ['"%json {\\"a\\": 1}"', "/%json {x}/", "// %json [\n", "# %json [\n"])
def test_what_only_looks_like_a_schema_is_left_as_it_is(literal: str) -> None:
    assert literal in to_lark(Grammar(GrammarKind.LARK, f'start: "x" {literal}'))


@pytest.mark.parametrize(
    ("regex", "inner"),
    [
        ("^a+$", "a+"),
        ("a/b", r"a\/b"),
        (r"a\$", r"a\$"),
        (r"a\\$", r"a\\"),
        (r"\d", "[0-9]"),
        ("a\nb", r"a\nb"),
        ("", "()"),
    ],
)
def test_a_regex_is_about_all_of_the_text(regex: str, inner: str) -> None:
    assert to_lark(Grammar(GrammarKind.REGEX, regex)).endswith(f"start: /{inner}/\n")
