import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tool_parsers.qwen_coder import VALUE_MAX
from tests.support.call_reading import check, cut


def written(*parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=get_weather>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("city", "5", "5"),
        ("city", 'say "no"\n\\ \t', 'say "no"\n\\ \t'),
        ("city", "\n\nx\n\n", "\n\nx\n\n"),
        ("city", "</parameter", "</parameter"),
        ("days", "5", 5),
        ("days", " -7 ", -7),
        ("days", "five", "five"),
        ("days", "5.5", "5.5"),
        ("exact", "True", True),
        ("exact", "false", False),
        ("unit", "null", None),
        ("unit", "None", None),
        ("unit", "kelvin", "kelvin"),
        ("unit", "12", "12"),
        ("wind", '{"knots": 1.5, "x": "</parameter>"}', {"knots": 1.5, "x": "</parameter>"}),
        ("wind", "{'knots': (1, None)}", {"knots": [1, None]}),
        ("hours", "[1,\n 2]", [1, 2]),
        ("note", "12", 12),
        ("note", '{"a": [1]}', {"a": [1]}),
        ("note", "{'a'", "{'a'"),
        ("note", "NaN", "NaN"),
        ("note", "[" * 5000, "[" * 5000),
        ("unknown", "x", "x"),
    ],
)
def test_a_value_has_the_type_of_its_parameter(key: str, value: str, meant: object) -> None:
    text = written((key, value), ("city", "Rome"))
    found = check("qwen_coder", text, cut(text, 1))
    assert [json.loads(said) for _, said, _ in found.calls] == [{key: meant} | {"city": "Rome"}]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30).filter(lambda text: "</parameter>" not in text), st.integers(1, 9))
def test_text_comes_back_to_the_letter(said: str, size: int) -> None:
    text = written(("city", said))
    assert check("qwen_coder", text, cut(text, size)).values == [("get_weather", {"city": said})]


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\n<function=get_weather>\nRome</function>",
        "<function=get_weather>\n<parameter=city\nRome</function>",
        "<function=get_weather>\n<parameter=hours>\n[1, x]\n</parameter>\n</function>",
        "<function=get_weather>\n<parameter=hours>\n[1] 2\n</parameter>\n</function>",
    ],
)
def test_a_broken_call_has_no_end(broken: str) -> None:
    ((name, _, ended),) = check("qwen_coder", broken, cut(broken, 1)).calls
    assert (name, ended) == ("get_weather", False)


@pytest.mark.parametrize(
    "text", ["<tool_call>\n<function=tomorrow>\n</function>", "<function get_weather>", "<tool_call>x"]
)
def test_anything_else_is_text(text: str) -> None:
    assert check("qwen_coder", text, cut(text, 1)).text == text


def test_a_value_of_unknown_type_has_a_limit() -> None:
    text = written(("note", "x" * (VALUE_MAX + 1)))
    ((_, said, ended),) = check("qwen_coder", text, cut(text, 4001)).calls
    assert not ended
    assert said.endswith("</tool_call>")
    text = written(("note", "x" * (VALUE_MAX - 1)))
    assert check("qwen_coder", text, cut(text, 4001)).calls[0][2]


def test_a_long_text_streams() -> None:
    from tests.support.call_reading import parser

    begun = parser("qwen_coder")
    begun.push("<function=get_weather>\n<parameter=city>\n")
    assert all(begun.push("Rome ") for _ in range(20))
