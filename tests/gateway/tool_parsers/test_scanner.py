import pytest

from gateway.inference.prompt import AUTO
from gateway.tool_parsers.registry import TOOL_FORMATS
from gateway.tool_parsers.scanner import BUFFERED_CHARS_MAX, ScanningParser, partial_marker_start
from tests.support.call_reading import TOOLS, check, cut

# What might make a parser hold all of it: each is what comes first, and what comes without an end.
ENDLESS = [
    ("", " "),
    ("", "<"),
    ("", "x"),
    ('{"', "x"),
    ('{"name": "', "now"),
    ('{"arguments": {"a": ', "["),
    ('{"arguments": {"a": "', "x"),
    ('{"name": "now", "arguments": {"a": "', "x"),
    ('{"name": "now", "arguments": {"a": "', "\\"),
    ('{"name": "now", "arguments": {"a": "\\x', "x"),
    ('{"id": "', "x"),
    ('{"name": "now", "parameters": {"a": ', "1"),
    ('{"name": "now", "arguments": {}, "id": "', "x"),
    ("[", "now"),
    ("[now(a=", "("),
    ("[now(a=", "1"),
    ("[now(a", " "),
    ("<tool_call>", "\n"),
    ('<tool_call>{"id": "', "x"),
    ("<tool_call><function=", "now"),
    ("<function=get_weather><parameter=", "x"),
    ("<function=get_weather><parameter=city>", "\n"),
    ("<function=get_weather><parameter=hours>", "["),
    ("[TOOL_CALLS]", "now"),
    ("[TOOL_CALLS]now[CALL_ID]", "x"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>", "functions"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "now"),
]


@pytest.mark.parametrize("format", sorted(TOOL_FORMATS))
def test_what_is_held_back_has_a_limit(format: str) -> None:
    for begun, endless in ENDLESS:
        parser = TOOL_FORMATS[format].parser(TOOLS, AUTO)
        assert isinstance(parser, ScanningParser)
        for piece in [begun, *[endless] * (BUFFERED_CHARS_MAX + 1000)]:
            parser.push(piece)
            assert len(parser._scanner.text) <= BUFFERED_CHARS_MAX + 100, (begun, endless)
        parser.finish()


@pytest.mark.parametrize("format", sorted(TOOL_FORMATS))
def test_at_the_limit_too_cuts_change_nothing(format: str) -> None:
    for begun, endless in ENDLESS:
        for rest in (
            '"}}',
            '", "name": "now", "arguments": {}}',
            "</tool_call> <tool_call>",
            "\n",
            '<tool_call>{"name": "now", "arguments": {}}',
        ):
            text = begun + endless * (BUFFERED_CHARS_MAX // len(endless) + 300) + rest
            check(format, text, cut(text, 97))


@pytest.mark.parametrize(
    ("text", "start", "markers", "at"),
    [
        ("abc", 0, ("<x>",), 3),
        ("abc<", 0, ("<x>",), 3),
        ("abc<x", 0, ("<x>",), 3),
        ("a<b<x", 0, ("<x>",), 3),
        ("a<<", 0, ("<<<", "<x>"), 1),
        ("a<x", 2, ("<x>",), 3),
        ("a\n<", 0, ("\n</a>", "</a>"), 1),
        ("a\n\n", 0, ("\n</a>", "</a>"), 2),
        ("", 0, ("<x>",), 0),
        ("abc", 0, (), 3),
    ],
)
def test_what_may_begin_a_marker_is_found(text: str, start: int, markers: tuple[str, ...], at: int) -> None:
    assert partial_marker_start(text, start, markers) == at


def test_a_finished_parser_holds_nothing() -> None:
    parser = TOOL_FORMATS["hermes"].parser(TOOLS, AUTO)
    parser.push("It <tool_ca")
    assert len(parser.finish()) == 1
