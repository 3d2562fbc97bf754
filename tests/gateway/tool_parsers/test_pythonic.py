import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.tool_parsers.test_registry import arguments
from tests.support.call_reading import check, cut, parser, read


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("'it''", None),
        (r"'it\'s'", "it's"),
        (r'"a\tb\\n\x41\u00e9\U0001F642\d\/"', "a\tb\\nAé🙂\\d/"),
        (r'"\ud83d\ude42"', "🙂"),
        (r'"\ud83d!"', "\ufffd!"),
        (r'"\u12"', "\\u12"),
        ("'''", None),
        ('"two\nlines"', "two\nlines"),
        ("'say \"no\"'", 'say "no"'),
        ("(1, 2.5, -3e2,)", [1, 2.5, -300.0]),
        ("{'a': {\"b\": []}, 'c': ()}", {"a": {"b": []}, "c": []}),
        ("[True, False, None, true, false, null]", [True, False, None, True, False, None]),
        ("{}", {}),
        ("{1: 2}", None),
        ("{'a' 1}", None),
        ("[1 2]", None),
        ("[1,,2]", None),
        ("nan", None),
        ("01", None),
        ("1_000", None),
        ("f()", None),
        ("\x1e1", None),  # white space for Python's isspace alone
        ("", None),
        ("'open", None),
        ("[" * 70, None),
    ],
)
def test_a_literal_becomes_json_or_the_call_has_no_end(value: str, meant: object) -> None:
    text = f"[get_weather(city={value}, days=1)]"
    ((name, said, ended),) = check("pythonic", text, cut(text, 1)).calls
    assert name == "get_weather"
    assert ended == (meant is not None)
    if ended:
        assert json.loads(said) == {"city": meant, "days": 1}


@settings(max_examples=150, deadline=None)
@given(arguments.map(lambda one: {key.replace(" ", "_"): value for key, value in one.items()}), st.integers(1, 9))
def test_what_python_writes_comes_back(values: dict[str, object], size: int) -> None:
    inner = ", ".join(f"{key}={value!r}" for key, value in values.items())
    found = read(parser("pythonic"), cut(f"[get_weather({inner}), now()]", size))
    assert found.text == ""
    assert found.values == [("get_weather", values), ("now", {})]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20), st.integers(1, 9))
def test_strings_mean_what_python_means(said: str, size: int) -> None:
    for spelled in (repr(said), json.dumps(said), ascii(said)):
        assert ast.literal_eval(spelled) == said or "\\ud" in spelled
        found = read(parser("pythonic"), cut(f"[get_weather(city={spelled})]", size))
        assert found.values == [("get_weather", {"city": said})]


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        "[get_weather]",
        "[get_weather(1)]",
        "[get_weather('Rome')]",
        "[tomorrow(city=1)]",
        "get_weather(city=1)",
        "As in [get_weather(city=1)]",
        "[]",
        "[get_weather(=1)]",
        "[[now()]]",
    ],
)
def test_lists_of_anything_else_are_text(text: str) -> None:
    assert check("pythonic", text, cut(text, 1)).text == text


def test_a_call_of_an_unknown_tool_behind_a_known_one_is_text() -> None:
    text = "[now(), tomorrow(a=1)]"
    found = check("pythonic", text, cut(text, 1))
    assert (found.values, found.text) == ([("now", {})], ", tomorrow(a=1)]")
