"""What is written, read by the types of the official SDK, which are strict here about every word and number."""

import json
from itertools import repeat
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from gateway import errors
from gateway.api.messages_response import MessagesReply
from gateway.inference.reply import Completion, RunningUsage, ToolUse, Usage

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BEGUN = RunningUsage(7, 4)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4, neurons=0.25, left={"day": 2.0}, thought_tokens=1)
RAIN = ToolUse("call_1", "rain", '{"in":"Rome"}')
END = ("message_delta", "message_stop")


def reply(*, shows_thoughts: bool = True) -> MessagesReply:
    return MessagesReply("@cf/test/stub", "the-id", repeat(b"abc"), shows_thoughts=shows_thoughts)


def events(raw: bytes) -> list[dict[str, Any]]:
    """The events, each of a type that the SDK knows, which is also that of its line; comments are left out."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        line, said, *comments = block.split("\n")
        event = json.loads(said.removeprefix("data: "))
        assert line == f"event: {event['type']}"
        assert all(comment.startswith(": ") for comment in comments)
        assert EVENT.validate_python(event).type == event["type"]
        found.append(event)
    return found


def streamed(answer: MessagesReply) -> bytes:
    """A thought, a text and a call."""
    raw = answer.begin(BEGUN) + answer.thought(0, "Rome") + answer.thought(0, "?")
    raw += answer.text(0, "I'll ", []) + answer.text(0, "look.", [])
    raw += answer.call(0, 0, ToolUse(RAIN.id, RAIN.name, ""))
    raw += answer.arguments(0, 0, '{"in":') + answer.arguments(0, 0, '"Rome"}') + answer.called(0, 0, RAIN)
    return raw + answer.finish(0, "tool_calls", None) + answer.end(USAGE)


def test_a_stream_builds_its_blocks_up_one_by_one() -> None:
    shown = events(streamed(reply()))
    block = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in shown] == ["message_start", *block * 3, *END]
    assert [event["index"] for event in shown if "index" in event] == [0] * 4 + [1] * 4 + [2] * 4
    assert [event["content_block"] for event in shown if "content_block" in event] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "rain", "input": {}},
    ]
    assert [event["delta"] for event in shown if event["type"] == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "Rome"},
        {"type": "thinking_delta", "thinking": "?"},
        {"type": "text_delta", "text": "I'll "},
        {"type": "text_delta", "text": "look."},
        {"type": "input_json_delta", "partial_json": '{"in":'},
        {"type": "input_json_delta", "partial_json": '"Rome"}'},
    ]
    start, *_, last, _ = shown
    assert start["message"] == {
        **{"id": "msg_the-id", "type": "message", "role": "assistant", "model": "@cf/test/stub", "content": []},
        **{"stop_reason": None, "stop_sequence": None},
        "usage": {
            **{"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0},
            **{"output_tokens": 0, "service_tier": "standard"},
        },
    }
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (last["usage"]["output_tokens"], last["usage"]["neurons_left"]) == (3, {"day": 2.0})


def test_the_whole_answer_has_what_a_stream_has() -> None:
    whole = json.loads(reply().whole([Completion("I'll look.", "tool_calls", [RAIN], None, "Rome?")], USAGE))
    read = Message.model_validate(whole)
    assert [block.type for block in read.content] == ["thinking", "text", "tool_use"]
    assert whole["content"][2] == {"type": "tool_use", "id": "call_1", "name": "rain", "input": {"in": "Rome"}}
    assert (read.id, read.stop_reason, read.stop_sequence) == ("msg_the-id", "tool_use", None)
    last = events(streamed(reply()))[-2]["usage"]
    assert last.pop("neurons_left") == {"day": 2.0}
    assert whole["usage"] == {**last, "service_tier": "standard"}
    usage = read.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 4, 0)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 1


def test_why_it_ended_is_told_in_the_words_of_the_api() -> None:
    endings = {
        ("stop", None): ("end_turn", None),
        ("stop", "END"): ("stop_sequence", "END"),
        ("length", None): ("max_tokens", None),
        ("tool_calls", None): ("tool_use", None),
        ("tool_calls", "END"): ("tool_use", None),
        ("quota", None): ("quota", None),
    }
    for (reason, stopped_by), told in endings.items():
        whole = json.loads(reply().whole([Completion("hi", reason, [], None, "", stopped_by)], USAGE))
        assert (whole["stop_reason"], whole["stop_sequence"]) == told
        answer = reply()
        raw = answer.text(0, "hi", []) + answer.finish(0, reason, stopped_by) + answer.end(USAGE)
        delta = json.loads(raw.decode().split("data: ")[-2].partition("\n")[0])["delta"]
        assert (delta["stop_reason"], delta["stop_sequence"]) == told


def test_a_call_that_the_end_cut_is_closed_in_a_stream_and_left_out_of_a_whole_answer() -> None:
    cut = ToolUse("call_2", "rain", '{"in":"Os')
    whole = json.loads(reply().whole([Completion("", "length", [RAIN, cut], None)], USAGE))
    assert [block["id"] for block in whole["content"]] == ["call_1"]
    answer = reply()
    raw = answer.begin(BEGUN) + answer.call(0, 0, cut) + answer.arguments(0, 0, cut.arguments)
    raw += answer.finish(0, "length", None) + answer.end(USAGE)
    assert [event["type"] for event in events(raw)][-3:] == ["content_block_stop", *END]


def test_calls_in_a_row_are_blocks_of_their_own_and_so_is_text_after_them() -> None:
    answer = reply()
    raw = answer.begin(BEGUN)
    for number in range(2):
        raw += answer.call(0, number, RAIN) + answer.called(0, number, RAIN)
    raw += answer.text(0, "done", []) + answer.finish(0, "tool_calls", None) + answer.end(USAGE)
    assert [event["index"] for event in events(raw) if event["type"] == "content_block_start"] == [0, 1, 2]


def test_thoughts_may_be_left_out() -> None:
    answer = reply(shows_thoughts=False)
    raw = answer.begin(BEGUN) + answer.thought(0, "secret") + answer.text(0, "hi", [])
    raw += answer.finish(0, "stop", None) + answer.end(USAGE)
    whole = reply(shows_thoughts=False).whole([Completion("hi", "stop", [], None, "secret")], USAGE)
    assert b"secret" not in raw + whole
    assert [event["index"] for event in events(raw) if "index" in event] == [0, 0, 0]


def test_pieces_are_padded_by_comments() -> None:
    raw = streamed(reply())
    assert raw.count(b"\n: abc\n\n") == 6
    assert len(events(raw)) == 15


def test_a_stream_that_fails_ends_with_an_error() -> None:
    raw = reply().fail(errors.replica_lost(), "the-id").decode()
    line, _, said = raw.partition("\n")
    told = json.loads(said.removeprefix("data: "))
    assert (line, told["type"], told["error"]["type"]) == ("event: error", "error", "api_error")
    assert "(the-id)" in told["error"]["message"]
    assert told["request_id"] == "the-id"
