"""Unknown fields of a body: each is found where it is, and taken out there and in its like, and nothing else is."""

import json
from typing import Any, Literal

import msgspec
import pytest

from gateway.errors import ApiError
from gateway.http.json_body import body_without, decode_body
from gateway.http.unknown_fields import UnknownField


class Text(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class Image(msgspec.Struct, tag_field="type", tag="image", forbid_unknown_fields=True):
    url: str


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "system"]
    content: str | list[Text | Image]


class Body(msgspec.Struct, forbid_unknown_fields=True):
    turns: list[Turn]
    named: dict[str, Turn] = {}


decoder = msgspec.json.Decoder(Body)


def read_again(document: Any) -> tuple[Body, list[str]]:
    """The body without what it does not know, and what that was."""
    body, ignored = json.dumps(document).encode(), list[str]()
    while True:
        try:
            return decode_body(body, decoder), ignored
        except UnknownField as unknown:
            ignored.append(unknown.pattern)
            body = body_without(unknown, body)


def test_a_field_goes_from_all_objects_of_its_list_at_once() -> None:
    turns = [{"role": "user", "content": str(turn), "weight": turn} for turn in range(100)]
    body, ignored = read_again({"turns": turns, "mood": {"a": [1]}})
    assert sorted(ignored) == ["mood", "turns[].weight"]
    assert [turn.content for turn in body.turns] == [str(turn) for turn in range(100)]


def test_a_field_stays_where_objects_of_another_type_have_it_by_right() -> None:
    parts = [{"type": "text", "text": "a", "url": 1}, {"type": "image", "url": "b"}, {"type": "text", "text": "c"}]
    body, ignored = read_again({"turns": [{"role": "user", "content": "x"}, {"role": "user", "content": parts}]})
    assert ignored == ["turns[].content[].url"]
    assert body.turns[1].content == [Text("a"), Image("b"), Text("c")]


def test_a_name_that_no_header_can_have_is_escaped_and_cut() -> None:
    _, (ignored,) = read_again({"turns": [], "a\r\nset-cookie: é" + "x" * 100: 1})
    assert ignored.isascii()
    assert ignored.isprintable()
    assert " " not in ignored
    assert len(ignored) < 100


def test_a_name_that_is_there_twice_is_refused_though_it_is_unknown() -> None:
    body = b'{"turns": [], "a": 1, "a": 2}'
    with pytest.raises(UnknownField) as unknown:
        decode_body(body, decoder)
    with pytest.raises(ApiError, match="'a' is given twice"):
        body_without(unknown.value, body)


def test_below_names_that_a_caller_chose_a_field_is_refused() -> None:
    with pytest.raises(UnknownField) as unknown:
        decode_body(b'{"turns": [], "named": {"x": {"role": "user", "content": "", "a": 1}}}', decoder)
    assert unknown.value.place is None
    assert unknown.value.param == "named[...].a"
