import pytest

from gateway.tools import calls_in, may_be_calls


def test_one_call_is_found() -> None:
    (use,) = calls_in(' {"name": "rain", "arguments": {"in": "Rome"}}\n', ["rain"])
    assert (use.name, use.arguments) == ("rain", {"in": "Rome"})


def test_several_lines_are_several_calls() -> None:
    uses = calls_in('{"name": "a", "arguments": {"x": 1}}\n\n{"name": "b", "parameters": {"x": 1}}', ["a", "b"])
    assert [(use.name, use.arguments or use.parameters) for use in uses] == [("a", {"x": 1}), ("b", {"x": 1})]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It rains.",
        '{"name": "rain", "arguments": {}} as I said',
        '{"name": "snow", "arguments": {}}',
        '{"name": "rain", "arguments": "x"}',
        '{"name": "rain", "more": 1}',
        '{"name": "rain", "arguments": {}',
        '{"answer": 4}',
        '{"name": "rain"}\n' * 17,
    ],
)
def test_anything_else_stays_text(text: str) -> None:
    assert calls_in(text, ["rain"]) == []


def test_text_is_held_back_only_while_it_may_be_calls() -> None:
    assert all(may_be_calls(text) for text in ("", " ", '\n{"na', "{"))
    assert not any(may_be_calls(text) for text in ("The", " It", "["))
