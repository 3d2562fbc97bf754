from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.conversation import ConversationBuilder
from gateway.errors import ApiError


def called(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_thoughts_text_and_calls_of_an_assistant_are_one_turn() -> None:
    talk = ConversationBuilder()
    talk.add_text("user", "rain?")
    talk.add_reasoning("I should ")
    talk.add_reasoning("look.")
    talk.add_text("assistant", "Let me see.")
    talk.add_call("a", "rain", '{"city": "Rome"}', "here")
    talk.add_call("b", "rain", {"city": "Oslo"}, "here")
    talk.add_result("a", "no", "here")
    talk.add_result("b", "yes", "here")
    talk.add_text("assistant", "In Oslo.")
    assert talk.turns == [
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I should look.",
            "tool_calls": [called("a", "rain", city="Rome"), called("b", "rain", city="Oslo")],
        },
        {"role": "tool", "content": "no", "tool_call_id": "a", "name": "rain"},
        {"role": "tool", "content": "yes", "tool_call_id": "b", "name": "rain"},
        {"role": "assistant", "content": "In Oslo."},
    ]


def test_what_does_not_fit_into_a_turn_begins_the_next() -> None:
    talk = ConversationBuilder()
    talk.add_text("assistant", "one")
    talk.add_text("assistant", "two")
    talk.add_call("a", "f", {}, "here")
    talk.add_text("assistant", "three")
    talk.add_reasoning("hm")
    talk.add_call("b", "f", {}, "here")
    assert [(turn["content"], "tool_calls" in turn, turn.get("reasoning_content")) for turn in talk.turns] == [
        ("one", False, None),
        ("two", True, None),
        ("three", False, None),
        ("", True, "hm"),
    ]


def test_thoughts_that_nothing_follows_are_left_out() -> None:
    talk = ConversationBuilder()
    talk.add_reasoning("lost")
    talk.add_text("user", "hi")
    talk.add_reasoning("lost too")
    assert talk.turns == [{"role": "user", "content": "hi"}]
    talk.add_text("developer", "be brief")
    talk.add_text("assistant", "ok")
    assert talk.turns[1:] == [{"role": "system", "content": "be brief"}, {"role": "assistant", "content": "ok"}]


def test_results_answer_calls_and_calls_have_their_own_ids() -> None:
    talk = ConversationBuilder()
    talk.add_call("c", "f", {}, "place")
    wrongs: list[Callable[[], None]] = [
        lambda: talk.add_result("a", "x", "place"),
        lambda: talk.add_call("b", "f", "no json", "place"),
        lambda: talk.add_call("c", "f", {}, "place"),
    ]
    for wrong in wrongs:
        with pytest.raises(ApiError, match="'place'") as refused:
            wrong()
        assert refused.value.param == "place"
