"""What an answer is held to, by all of its names."""

import json
from typing import Any

import msgspec
import pytest

from engine.protocol.types import GrammarKind
from gateway.errors import ApiError
from gateway.inference.response_format import SOURCE_BYTES_MAX, UNCONSTRAINED, ResponseFormat, response_constraint

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def formatted(**fields: Any) -> Any:
    return response_constraint(msgspec.convert(fields, ResponseFormat))


def refused(**asked: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        response_constraint(**asked)
    return raised.value


def schema_of(found: Any) -> Any:
    assert found.grammar.kind is GrammarKind.JSON_SCHEMA
    assert found.json
    return json.loads(found.grammar.source)


def test_nothing_asked_for_is_any_text() -> None:
    assert response_constraint() == formatted(type="text") == UNCONSTRAINED
    assert UNCONSTRAINED.grammar is None


def test_a_json_object_is_any_object() -> None:
    assert schema_of(formatted(type="json_object")) == {"type": "object"}
    assert schema_of(formatted(type="json_object", json_schema=PERSON)) == PERSON


@pytest.mark.parametrize(
    "given",
    [
        PERSON,
        {"name": "person", "schema": PERSON},
        {"name": "person", "description": "d", "strict": True, "schema": PERSON},
        {"name": "person", "strict": None, "schema": PERSON},
    ],
)
def test_a_schema_comes_bare_or_wrapped(given: Any) -> None:
    assert schema_of(formatted(type="json_schema", json_schema=given)) == PERSON


def test_a_guided_schema_comes_as_an_object_or_as_its_text() -> None:
    for given in (PERSON, json.dumps(PERSON)):
        found = response_constraint(guided_json=given)
        assert schema_of(found) == PERSON
        assert found.field == "guided_json"


def test_the_keys_keep_their_order() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    assert list(schema_of(response_constraint(guided_json=schema))["properties"]) == ["z", "a"]


def test_other_guides_are_no_json() -> None:
    found = response_constraint(guided_regex="[a-z]+")
    assert (found.grammar.kind, found.grammar.source, found.json) == (GrammarKind.REGEX, "[a-z]+", False)  # type: ignore[union-attr]
    found = response_constraint(guided_choice=["a", 'b"', "c\n|"])
    assert found.grammar.source == 'start: answer\nanswer: "a" | "b\\"" | "c\\n|"'  # type: ignore[union-attr]
    assert response_constraint(guided_grammar='start: "x"').grammar.source == 'start: "x"'  # type: ignore[union-attr]
    assert response_constraint(guided_grammar='root ::= "x"').grammar.source.startswith(
        "start: answer\nanswer: R0_ROOT\n"
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"guided_json": "{"}, "guided_json", "JSON object"),
        ({"guided_json": "[1]"}, "guided_json", "JSON object"),
        ({"guided_json": PERSON, "guided_regex": "a"}, "guided_regex", "send one"),
        ({"guided_json": {"description": "x" * SOURCE_BYTES_MAX}}, "guided_json", str(SOURCE_BYTES_MAX)),
        ({"response_format": ResponseFormat("json_schema")}, "response_format.json_schema", "missing"),
        (
            {"response_format": ResponseFormat("json_schema", {"name": "x"})},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            {"response_format": ResponseFormat("json_schema", {"schema": PERSON, "strict": "yes"})},
            "response_format.json_schema.strict",
            "bool",
        ),
        ({"response_format": ResponseFormat("json_object"), "guided_choice": ["a"]}, "guided_choice", "send one"),
    ],
)
def test_a_wrong_one_is_refused_by_name(asked: dict[str, Any], field: str, words: str) -> None:
    found = refused(**asked)
    assert found.param == field
    assert words in found.message


def test_depth_has_a_limit() -> None:
    deep: dict[str, Any] = {}
    for _ in range(48):
        deep = {"items": deep}
    assert refused(guided_json=deep).param == "guided_json"
    assert response_constraint(guided_json=deep["items"])
