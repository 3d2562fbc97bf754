"""What is written, read by the types of the official SDK, which are strict here about every word and number."""

import json
from itertools import repeat
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.protocol.types import SamplingParams
from gateway import errors
from gateway.api.responses_request import ResponsesBody, echo_fields
from gateway.api.responses_response import ResponsesReply
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, RunningUsage, ScoredToken, ToolUse, Usage

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BEGUN = RunningUsage(7, 4)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4, neurons=0.25, left={"day": 2.0}, thought_tokens=1)
RAIN = ToolUse("call_1", "rain", '{"in":"Rome"}')


def reply(*, padded: bool = True, **asked: Any) -> ResponsesReply:
    body = ResponsesBody(model="@cf/test/stub", input="hello", **asked)
    prompt = Prompt(text="hello", sampling=SamplingParams(), stop=[], padded=padded)
    return ResponsesReply(echo_fields(body), prompt, "@cf/test/stub", "the-id", 1_700_000_000, repeat(b"abc"))


def events(raw: bytes) -> list[dict[str, Any]]:
    """The events, each of a type that the SDK knows, which is also that of its line."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        line, _, said = block.partition("\n")
        event = json.loads(said.removeprefix("data: "))
        assert line == f"event: {event['type']}"
        assert EVENT.validate_python(event).type == event["type"]
        found.append(event)
    return found


def streamed(answer: ResponsesReply) -> bytes:
    """A thought, a text and a call."""
    raw = answer.begin(BEGUN) + answer.thought(0, "Rome") + answer.thought(0, "?")
    raw += answer.text(0, "I'll ", []) + answer.text(0, "look.", [])
    raw += answer.call(0, 0, ToolUse(RAIN.id, RAIN.name, ""))
    raw += answer.arguments(0, 0, '{"in":') + answer.arguments(0, 0, '"Rome"}') + answer.called(0, 0, RAIN)
    return raw + answer.finish(0, "tool_calls", None) + answer.end(USAGE)


def test_a_stream_builds_its_items_up_one_by_one() -> None:
    shown = events(streamed(reply()))
    assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
    assert [event["type"].removeprefix("response.") for event in shown] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    for index, id in enumerate(("rs_the-id_0", "msg_the-id_1", "fc_the-id_2")):
        own = [event for event in shown if event.get("output_index") == index]
        assert {event.get("item_id") or event["item"]["id"] for event in own} == {id}
        text = "".join(event["delta"] for event in own if "delta" in event)
        (done,) = [event for event in own if event["type"].endswith(("text.done", "arguments.done"))]
        assert done.get("text", done.get("arguments")) == text
        assert [event["item"]["status"] for event in own if "item" in event] == ["in_progress", "completed"]
    assert [event["item"] for event in shown if event["type"].endswith("item.done")] == shown[-1]["response"]["output"]


def test_the_whole_answer_is_what_a_stream_ends_with() -> None:
    last = events(streamed(reply()))[-1]["response"]
    assert last["usage"].pop("neurons_left") == {"day": 2.0}
    whole = json.loads(reply().whole([Completion("I'll look.", "tool_calls", [RAIN], None, "Rome?")], USAGE))
    assert whole == last
    read = Response.model_validate(whole)
    assert (read.output_text, read.status, read.error, read.incomplete_details) == (
        "I'll look.",
        "completed",
        None,
        None,
    )
    assert read.usage is not None
    assert (read.usage.input_tokens, read.usage.output_tokens, read.usage.total_tokens) == (7, 3, 10)
    assert read.usage.input_tokens_details.cached_tokens == 4
    assert read.usage.output_tokens_details.reasoning_tokens == 1


def test_the_answer_says_again_what_was_asked() -> None:
    whole = json.loads(
        reply(instructions="be brief", metadata={"a": "b"}, user="u", max_output_tokens=5, temperature=0.5).whole(
            [Completion("hi", "stop", [], None)], USAGE
        )
    )
    read = Response.model_validate(whole)
    assert (read.id, read.model, read.created_at) == ("resp_the-id", "@cf/test/stub", 1_700_000_000)
    assert (read.instructions, read.metadata, read.user) == ("be brief", {"a": "b"}, "u")
    assert (read.max_output_tokens, read.temperature, read.tool_choice, read.tools) == (5, 0.5, "auto", [])
    assert whole["store"] is False


def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item() -> None:
    for reason, told in (("length", "max_output_tokens"), ("quota", "quota")):
        answer = reply()
        raw = answer.begin(BEGUN) + answer.text(0, "half", []) + answer.finish(0, reason, None) + answer.end(USAGE)
        last = json.loads(raw.decode().rpartition("data: ")[2])
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
        assert last["response"]["incomplete_details"] == {"reason": told}
        assert last["response"]["output"][0]["status"] == "incomplete"
        whole = json.loads(reply().whole([Completion("half", reason, [], None)], USAGE))
        assert (whole["status"], whole["output"]) == ("incomplete", last["response"]["output"])


def test_a_call_that_the_end_cut_is_incomplete_and_one_before_it_is_not() -> None:
    cut = ToolUse("call_2", "rain", '{"in":"Os')
    whole = json.loads(reply().whole([Completion("", "length", [RAIN, cut], None)], USAGE))
    assert [(item["arguments"], item["status"]) for item in whole["output"]] == [
        (RAIN.arguments, "completed"),
        (cut.arguments, "incomplete"),
    ]
    whole = json.loads(reply().whole([Completion("", "length", [RAIN], None)], USAGE))
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "completed")
    stopped = json.loads(reply().whole([Completion("", "stop", [cut], None, stopped_by="lo")], USAGE))
    assert (stopped["status"], stopped["output"][0]["status"]) == ("completed", "incomplete")


def test_a_text_after_a_call_is_an_item_of_its_own() -> None:
    answer = reply()
    raw = answer.begin(BEGUN) + answer.text(0, "a", []) + answer.call(0, 0, RAIN) + answer.called(0, 0, RAIN)
    raw += answer.text(0, "b", []) + answer.finish(0, "tool_calls", None) + answer.end(USAGE)
    items = events(raw)[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "message"]


def test_log_probabilities_go_with_the_text() -> None:
    scored = [ScoredToken("é", "é".encode(), -0.5, [ScoredToken("e", b"e", -0.5)])]
    shape = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    said = [{**shape, "top_logprobs": [{"token": "e", "logprob": -0.5, "bytes": [101]}]}]
    answer = reply()
    raw = answer.begin(BEGUN) + answer.text(0, "", scored) + answer.thought(0, "hm") + answer.text(0, "é", scored)
    raw += answer.finish(0, "stop", None) + answer.end(USAGE)
    shown = events(raw)
    assert [event["logprobs"] for event in shown if event["type"].endswith("text.delta") and "logprobs" in event] == [
        said * 2
    ]
    assert shown[-1]["response"]["output"][1]["content"][0]["logprobs"] == said * 2
    whole = json.loads(reply().whole([Completion("é", "stop", [], scored * 2, "hm")], USAGE))
    assert whole["output"] == shown[-1]["response"]["output"]


def test_pieces_are_padded_unless_it_is_declined() -> None:
    for padded, count in ((True, 5), (False, 0)):
        answer = reply(padded=padded)
        raw = answer.begin(BEGUN) + answer.thought(0, "a") + answer.text(0, "b", []) + answer.text(0, "c", [])
        raw += answer.call(0, 0, RAIN) + answer.arguments(0, 0, "{") + answer.arguments(0, 0, "}")
        assert len(events(raw)) > 5
        assert raw.count(b'"obfuscation":"abc"') == count


def test_a_stream_that_fails_says_so_in_events_that_count_on() -> None:
    for begun in (True, False):
        answer = reply()
        raw = answer.begin(BEGUN) + answer.text(0, "half", []) if begun else b""
        shown = events(raw + answer.fail(errors.replica_lost(), "the-id"))
        assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
        assert shown[0]["type"] == "response.created"
        error, failed = shown[-2:]
        assert (error["type"], error["code"], error["param"]) == ("error", "replica_lost", None)
        assert "(the-id)" in error["message"]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    codes = {errors.busy(): "rate_limit_exceeded", errors.bad_input("x"): "invalid_prompt"}
    for refusal, code in codes.items():
        assert events(reply().fail(refusal, "x"))[-1]["response"]["error"]["code"] == code
