"""Which tools a model is told of, and whether it calls them."""

from typing import Any

import msgspec
import pytest

from gateway.api.tool_fields import ToolChoiceField, select_tools
from gateway.errors import ApiError
from gateway.inference.prompt import AUTO
from gateway.tool_parsers.tool_schema import ToolSelection

RAIN, SUN = [{"type": "function", "function": {"name": name}} for name in ("rain", "sun")]
TOOLS = [RAIN, SUN]


def chosen(asked: Any, tools: Any = TOOLS) -> Any:
    return select_tools(tools, msgspec.convert(asked, ToolChoiceField | None))


def test_words_say_whether() -> None:
    assert chosen(None) == chosen("auto") == (TOOLS, AUTO)
    assert chosen("required") == (TOOLS, ToolSelection("required"))
    assert chosen("none") == (None, ToolSelection("none"))
    assert chosen("none", None) == (None, ToolSelection("none"))
    assert chosen(None, None) == chosen("auto", None) == (None, AUTO)


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "function", "function": {"name": "sun"}},
        {"type": "function", "name": "sun"},
        {"function": {"name": "sun"}},
    ],
)
def test_one_is_named_in_all_spellings(asked: Any) -> None:
    assert chosen(asked) == (TOOLS, ToolSelection("named", "sun"))


@pytest.mark.parametrize("named", [{"type": "function", "function": {"name": "sun"}}, {"name": "sun"}])
def test_some_are_allowed(named: Any) -> None:
    for mode in ("auto", "required"):
        asked = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        assert chosen(asked) == ([SUN], ToolSelection(mode))


@pytest.mark.parametrize(
    ("asked", "tools", "words"),
    [
        ("required", None, "there are no 'tools'"),
        ({"name": "snow"}, TOOLS, "'snow' is none of the 'tools'"),
        ({"name": "rain"}, None, "'rain' is none of the 'tools'"),
        ({"type": "function"}, TOOLS, "'function' with its 'name'"),
        ({"name": "rain", "function": {"name": "rain"}}, TOOLS, "needs either"),
        ({"type": "allowed_tools"}, TOOLS, "has 'allowed_tools' alone"),
        ({"name": "rain", "allowed_tools": {"mode": "auto", "tools": [{"name": "rain"}]}}, TOOLS, "'allowed_tools'"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "snow"}]}},
            TOOLS,
            "'snow' is none",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(asked: Any, tools: Any, words: str) -> None:
    with pytest.raises(ApiError) as raised:
        chosen(asked, tools)
    assert raised.value.param == "tool_choice"
    assert words in raised.value.message
