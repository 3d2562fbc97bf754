import pytest

from gateway.tools import may_be_calls, tool_uses


def test_one_call_is_found() -> None:
    (use,) = tool_uses(' {"name": "rain", "arguments": {"in": "Rome"}}\n', ["rain"])
    assert (use.name, use.arguments) == ("rain", {"in": "Rome"})
    assert use.id.startswith("call_")


def test_several_lines_are_several_calls_with_different_ids() -> None:
    uses = tool_uses('{"name": "a", "arguments": {}}\n\n{"name": "b", "parameters": {"x": 1}}', ["a", "b"])
    assert [(use.name, use.arguments) for use in uses] == [("a", {}), ("b", {"x": 1})]
    assert len({use.id for use in uses}) == 2


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
    assert tool_uses(text, ["rain"]) == []


def test_text_is_held_back_only_while_it_may_be_calls() -> None:
    assert all(may_be_calls(text) for text in ("", " ", '\n{"na', "{"))
    assert not any(may_be_calls(text) for text in ("The", " It", "["))
