from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.conversation import ConversationBuilder
from gateway.errors import ApiError


def called(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_thoughts_text_and_calls_of_an_assistant_are_one_turn() -> None:
    talk = ConversationBuilder()
    talk.say("user", "rain?")
    talk.think("I should ")
    talk.think("look.")
    talk.say("assistant", "Let me see.")
    talk.call("a", "rain", '{"city": "Rome"}', "here")
    talk.call("b", "rain", {"city": "Oslo"}, "here")
    talk.result("a", "no", "here")
    talk.result("b", "yes", "here")
    talk.say("assistant", "In Oslo.")
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
    talk.say("assistant", "one")
    talk.say("assistant", "two")
    talk.call("a", "f", {}, "here")
    talk.say("assistant", "three")
    talk.think("hm")
    talk.call("b", "f", {}, "here")
    assert [(turn["content"], "tool_calls" in turn, turn.get("reasoning_content")) for turn in talk.turns] == [
        ("one", False, None),
        ("two", True, None),
        ("three", False, None),
        ("", True, "hm"),
    ]


def test_thoughts_that_nothing_follows_are_left_out() -> None:
    talk = ConversationBuilder()
    talk.think("lost")
    talk.say("user", "hi")
    talk.think("lost too")
    assert talk.turns == [{"role": "user", "content": "hi"}]
    talk.say("developer", "be brief")
    talk.say("assistant", "ok")
    assert talk.turns[1:] == [{"role": "system", "content": "be brief"}, {"role": "assistant", "content": "ok"}]


def test_results_answer_calls_and_calls_have_their_own_ids() -> None:
    talk = ConversationBuilder()
    talk.call("c", "f", {}, "place")
    wrongs: list[Callable[[], None]] = [
        lambda: talk.result("a", "x", "place"),
        lambda: talk.call("b", "f", "no json", "place"),
        lambda: talk.call("c", "f", {}, "place"),
    ]
    for wrong in wrongs:
        with pytest.raises(ApiError, match="'place'") as refused:
            wrong()
        assert refused.value.param == "place"
