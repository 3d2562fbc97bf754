import json
from itertools import repeat
from typing import Any

import pytest

from engine.protocol.types import Grammar, GrammarKind
from gateway.api.run_native import NativeReply, read_run_native
from gateway.errors import ApiError
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, RunningUsage, ToolUse, Usage
from gateway.inference.run_options import RunOptionsBody
from gateway.tool_parsers.tool_schema import ToolSelection

MODEL = "@cf/test/stub"
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4, neurons=0.25)
HELLO: dict[str, Any] = {"prompt": "hello"}


def parsed(body: dict[str, Any], query: bytes = b"") -> Prompt:
    asked = read_run_native(json.dumps(body).encode(), query, MODEL, 77)
    assert asked.model == MODEL
    return asked.prompt


def refusal(body: dict[str, Any], query: bytes = b"") -> ApiError:
    with pytest.raises(ApiError) as raised:
        parsed(body, query)
    assert (raised.value.status, raised.value.code) == ((405, 5005) if "lora" in body else (400, 5006))
    return raised.value


def test_the_prompt_form_has_the_documented_defaults() -> None:
    prompt = parsed(HELLO)
    assert (prompt.text, prompt.messages, prompt.max_tokens, prompt.n, prompt.stream) == ("hello", None, 256, 1, False)
    sampling = prompt.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.0, 0.0, 0.0)
    assert (sampling.seed, sampling.logprobs) == (77, None)


def test_every_sampling_field_is_honoured() -> None:
    asked = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 50,
        "min_p": 0.1,
        "seed": 9_999_999_999,
        "repetition_penalty": 1.5,
        "frequency_penalty": -2,
        "presence_penalty": 2,
        "logit_bias": {"12": -100},
    }
    sampling = parsed({**HELLO, **asked}).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 50, 0.1)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -2, 2)
    assert (sampling.seed, sampling.logit_bias) == (9_999_999_999, {12: -100})


def test_the_other_fields_are_honoured() -> None:
    prompt = parsed({**HELLO, "raw": True, "stream": True, "max_tokens": 9, "stop": ["a", "b"], "user": "u"})
    assert (prompt.raw, prompt.stream, prompt.max_tokens, prompt.stop) == (True, True, 9, ["a", "b"])
    assert parsed({**HELLO, "stop": "x"}).stop == ["x"]
    assert parsed({**HELLO, "max_completion_tokens": 3}).max_tokens == 3
    said = parsed({**HELLO, "options": {"rejectIfBusy": True, "tags": ["a"], "requestTimeoutMs": 9}}).options
    assert said == RunOptionsBody(rejectIfBusy=True, tags=["a"], requestTimeoutMs=9)
    assert parsed(HELLO, b"queueRequest=false").options is None


def test_messages_become_what_a_template_reads() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "rain", "arguments": {"in": "Rome"}}]},
        {"role": "tool", "name": "rain", "content": "no"},
    ]
    assert parsed({"messages": messages}).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "rain", "arguments": {"in": "Rome"}}}],
        },
        {"role": "tool", "content": "no", "name": "rain"},
    ]


def test_tools_come_flat_or_as_functions() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    flat = {"name": "rain", "description": "d", "parameters": schema}
    messages = [{"role": "user", "content": "?"}]
    for tool in (flat, {"type": "function", "function": flat}):
        assert parsed({"messages": messages, "tools": [tool]}).tools == [{"type": "function", "function": flat}]


def test_tools_are_chosen_as_in_chat_completions() -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "f"}, {"name": "g"}]}
    assert parsed(asked).tool_choice == ToolSelection()
    assert parsed({**asked, "tool_choice": "required"}).tool_choice == ToolSelection("required")
    named = parsed({**asked, "tool_choice": {"type": "function", "function": {"name": "g"}}})
    assert named.tool_choice == ToolSelection("named", "g")
    assert parsed({**asked, "tool_choice": "none"}).tools is None
    assert parsed(asked).parallel_calls
    assert not parsed({**asked, "parallel_tool_calls": False}).parallel_calls
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    assert [parsed({**asked, "tools": [one]}).strict_calls for one in ({"name": "f"}, strict)] == [False, True]


def test_an_answer_may_be_held_to_a_form() -> None:
    schema = {"type": "object"}
    for form in ({"response_format": {"type": "json_schema", "json_schema": schema}}, {"guided_json": schema}):
        prompt = parsed({**HELLO, **form})
        assert prompt.grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
        assert (prompt.json, prompt.grammar_field) == (True, next(iter(form)))
    free = parsed({**HELLO, "response_format": {"type": "text"}})
    assert (free.grammar, free.json) == (None, False)


def test_a_template_may_be_given_variables() -> None:
    asked = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert parsed({**HELLO, **asked}).template_options == {"enable_thinking": False, "reasoning_effort": "low"}
    twice = {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "low"}
    assert refusal({**HELLO, **twice}).param == "reasoning_effort"
    assert refusal({**HELLO, "chat_template_kwargs": {"a": "x" * 4096}}).param == "chat_template_kwargs"
    assert refusal({**HELLO, "chat_template_kwargs": {str(i): 1 for i in range(17)}}).param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("body", "matches"),
    [({}, "0 matches"), ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "2 matches")],
)
def test_one_of_prompt_and_messages_is_needed(body: dict[str, Any], matches: str) -> None:
    assert f"oneOf at '/' not met, {matches}" in refusal(body).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""),
        ("prompt", 5),
        ("temperature", 5.1),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", 51),
        ("top_k", 2.0),
        ("min_p", 1.1),
        ("seed", 0),
        ("seed", 10_000_000_000),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stream", "true"),
        ("raw", 1),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", "x" * 65),
        ("stop", ""),
        ("logit_bias", {str(i): 1 for i in range(301)}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("tool_choice", "required"),
        ("tool_choice", "perhaps"),
        ("functions", [{"name": "f", "code": "1"}]),
        ("lora", "my-adapter"),
        ("response_format", {"type": "xml"}),
        ("reasoning_effort", "huge"),
        ("requests", []),
        ("model", "@cf/another/one"),
        ("metadata", {"a": 1}),
        ("colour", 1),
    ],
)
def test_a_wrong_or_unserved_field_is_refused_by_name(field: str, value: Any) -> None:
    refused = refusal({**HELLO, field: value})
    assert f"'{field}" in refused.message, refused.message
    assert (refused.param or "").startswith(field)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": 1}]}, "messages[0].content[0].image_url"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[0].content[0].image_url",
        ),
        ({"role": "assistant", "content": [{"type": "image_url", "image_url": "data:"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "messages[0].tool_calls[0]"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour"),
    ],
)
def test_a_wrong_message_is_named(message: dict[str, Any], place: str) -> None:
    assert refusal({"messages": [message]}).param == place


def test_tools_have_limits() -> None:
    def asked(parameters: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "f", "parameters": parameters}]}

    deep: dict[str, Any] = {}
    for _ in range(17):
        deep = {"properties": deep}
    assert refusal(asked(deep)).param == "tools[0].parameters"
    assert refusal(asked({"description": "x" * 133_000})).param == "tools"
    assert refusal({**HELLO, "tools": [{"name": "f"}]}).param == "tools"
    assert refusal({**asked({}), "tools": [{"name": "f", "function": {"name": "g"}}]}).param == "tools[0]"


@pytest.mark.parametrize("image", [[0, 1, 2], "AAEC", "data:image/png;base64,AAEC"])
def test_an_image_stands_before_what_is_said_last(image: Any) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "hello"}]
    prompt = parsed({"prompt": "hello", "image": image})
    assert (prompt.text, prompt.messages) == (None, [{"role": "user", "content": parts}])
    assert [(each.content, each.field) for each in prompt.images] == [(b"\0\1\2", "image")]
    before = {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AwQ="}]}
    answer = {"role": "assistant", "content": "a cat"}
    prompt = parsed({"messages": [before, answer, {"role": "user", "content": "hello"}], "image": image})
    assert prompt.messages == [
        {"role": "user", "content": [{"type": "image"}]}, answer, {"role": "user", "content": parts}
    ]  # fmt: skip
    assert [each.content for each in prompt.images] == [b"\3\4", b"\0\1\2"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"image": [256]}, "image[0]"),
        ({"image": []}, "image"),
        ({"image": ""}, "image"),
        ({"image": "https://a/b.png"}, "image"),
        ({"image": "AAEC", "raw": True}, "raw"),
        ({"image": "AAEC", "prompt": None, "messages": [{"role": "assistant", "content": "x"}]}, "image"),
    ],
)
def test_an_image_that_is_none_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal({"prompt": "hello", **fields}).param == param


def test_raw_goes_with_a_prompt_only() -> None:
    assert refusal({"messages": [{"role": "user", "content": "x"}], "raw": True}).param == "raw"


def test_the_envelope_is_that_of_the_wire() -> None:
    use = ToolUse("call_1", "rain", '{"in":"Rome"}')
    body = NativeReply(repeat(b"abc")).whole([Completion("hi", "stop", [use], None)], USAGE)
    assert list(json.loads(body)) == ["result", "success", "errors", "messages"]
    assert json.loads(body) == {
        "result": {
            "response": "hi",
            "tool_calls": [{"name": "rain", "arguments": {"in": "Rome"}}],
            "usage": {
                "prompt_tokens": 7,
                "completion_tokens": 3,
                "total_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": 4},
                "neurons": 0.25,
            },
        },
        "success": True,
        "errors": [],
        "messages": [],
    }


def test_a_document_is_the_object_and_calls_take_its_place() -> None:
    reply = NativeReply(repeat(b"abc"), document=True)
    whole = json.loads(reply.whole([Completion('{"a": 1.50}', "stop", [], None)], USAGE))
    assert whole["result"]["response"] == {"a": 1.5}
    called = json.loads(reply.whole([Completion("", "tool_calls", [ToolUse("c", "f", "{}")], None)], USAGE))
    assert (called["result"]["response"], called["result"]["tool_calls"]) == ("", [{"name": "f", "arguments": {}}])


def test_thought_is_beside_the_response() -> None:
    reply = NativeReply(repeat(b"abc"))
    whole = json.loads(reply.whole([Completion("yes", "stop", [], None, thought="hm")], USAGE))
    assert (whole["result"]["response"], whole["result"]["reasoning_content"]) == ("yes", "hm")
    assert json.loads(reply.thought(0, "hm")[6:])["reasoning_content"] == "hm"


def test_the_stream_is_responses_with_padding_then_usage_then_done() -> None:
    reply = NativeReply(repeat(b"abc"))
    assert reply.begin(RunningUsage(7, 4)) == reply.finish(0, "stop", None) == b""
    assert reply.text(0, 'a"\n\u2028', []) == 'data: {"response":"a\\"\\n\u2028","p":"abc"}\n\n'.encode()
    usage, done, rest = reply.end(USAGE).split(b"\n\n")
    assert json.loads(usage[6:])["response"] == ""
    assert json.loads(usage[6:])["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert (done, rest) == (b"data: [DONE]", b"")
    tools = reply.called(0, 0, ToolUse("call_1", "f", "{}"))
    assert json.loads(tools[6:])["tool_calls"] == [{"name": "f", "arguments": {}}]
