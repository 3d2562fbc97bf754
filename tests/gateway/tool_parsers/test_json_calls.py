import pytest

from gateway.tool_parsers.scanner import BUFFERED_CHARS_MAX
from tests.support.call_reading import check, cut


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "now"}', "{}"),
        ('{"name": "now", "arguments": {}}', "{}"),
        ('{"arguments": {"a": [1]}, "name": "now"}', '{"a": [1]}'),
        ('{ "type" : "function" ,\n"name":"now","id":"x","parameters":{ "a":1 } }', '{ "a":1 }'),
        ('{"name": "n\\u006fw", "arguments": {}, "id": "7"}', "{}"),
        ('\n {"name": "now", "arguments": {}} ;\n', "{}"),
    ],
)
def test_an_object_is_a_call(text: str, arguments: str) -> None:
    found = check("ember", text, cut(text, 1))
    assert found.calls == [("now", arguments, True)]
    assert found.text.strip() in ("", ";")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "It rains.",
        "{}",
        '{"name": "tomorrow", "arguments": {}}',
        '{"name": "now", "arguments": "x"}',
        '{"name": "now", "arguments": null}',
        '{"name": "now", "more": 1}',
        '{"name": "now", "name": "now"}',
        '{"name": ["now"]}',
        '{"name": "now"',
        '{"name": "now", }',
        '{"name" "now"}',
        '{"name": "now\n"}',
        '{"arguments": {}}',
        '{"arguments": {"a" 1}, "name": "now"}',
        '{"answer": 4}',
        '{"id": 4, "name": "now"}',
        '[{"name": "now"}]',
        'Say {"name": "now"}',
        '{"name": "now"' + " " * BUFFERED_CHARS_MAX + "}",
        '{"arguments": {"a": "' + "x" * BUFFERED_CHARS_MAX + '"}, "name": "now"}',
        '{"name": "' + "now" * BUFFERED_CHARS_MAX,
    ],
)
def test_anything_else_is_text_to_the_letter(text: str) -> None:
    found = check("ember", text, cut(text, 1))
    assert (found.text, found.calls) == (text, [])
    check("ember", text, cut(text, 1000))


def test_what_follows_a_call_is_text() -> None:
    text = '{"name": "now", "arguments": {}} as I said'
    found = check("ember", text, cut(text, 1))
    assert (found.text, found.values) == (" as I said", [("now", {})])


def test_members_behind_the_arguments_that_are_no_part_of_a_call_are_text() -> None:
    text = '{"name": "now", "arguments": {}, "more": 1}'
    found = check("ember", text, cut(text, 1))
    assert (found.text, found.values) == (', "more": 1}', [("now", {})])


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": [1, -0.5e+3, true, null, {"b": "\\u00e9\\"\\/"}], "c": {}, "d": []}',
        '{"a": "\\ud83d\\ude42"}',
        '{"a": ' + "[" * 63 + "]" * 63 + "}",
        '{"a": ' + "1" * 256 + "}",
        '{\n  "a": 1\n}',
    ],
)
def test_arguments_are_given_to_the_letter(arguments: str) -> None:
    text = f'{{"name": "now", "arguments": {arguments}}}'
    assert check("ember", text, cut(text, 1)).calls == [("now", arguments, True)]


@pytest.mark.parametrize(
    "arguments",
    [
        "{a: 1}",
        '{"a": 01}',
        '{"a": 1.}',
        '{"a": NaN}',
        '{"a": tru}',
        '{"a": "\\x"}',
        '{"a": "\\ud83d"}',
        '{"a": "\\ud83dabcdefgh"}',
        '{"a" 1}',
        '{"a": 1,}',
        '{"a": [1,]}',
        '{"a": [1}',
        '{"a": 1 "b": 2}',
        "{\"a\": 'x'}",
        '{"a": ' + "[" * 64 + "]" * 64 + "}",
        '{"a": ' + "1" * 257 + "}",
    ],
)
def test_a_call_with_broken_arguments_has_no_end_and_all_the_rest(arguments: str) -> None:
    text = f'{{"name": "now", "arguments": {arguments}}}'
    found = check("ember", text, cut(text, 1))
    assert found.calls == [("now", arguments + "}", False)]
    assert found.text == ""
