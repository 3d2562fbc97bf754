import json
from itertools import repeat
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from gateway.api.chat import ChatBody, ChatReply, read_chat
from gateway.errors import ApiError
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, RunningUsage, ScoredToken, ToolUse, Usage

BEGUN = RunningUsage(7, 4)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4, neurons=0.25)
HELLO: dict[str, Any] = {"model": "@cf/test/stub", "messages": [{"role": "user", "content": "hello"}]}


def parsed(**fields: Any) -> Prompt:
    asked = read_chat(json.dumps({**HELLO, **fields}).encode(), b"", None, 77)
    assert asked.model == "@cf/test/stub"
    return asked.prompt


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parsed(**fields)
    assert (raised.value.status, raised.value.code) == (400, 5006)
    return raised.value


def reply(prompt: Prompt) -> ChatReply:
    return ChatReply(prompt, "@cf/test/stub", "the-id", 1_700_000_000, repeat(b"abc"))


def events(raw: bytes) -> list[Any]:
    blocks = raw.split(b"\n\n")
    assert blocks.pop() == b""
    return [block[6:].decode() if block.endswith(b"[DONE]") else json.loads(block[6:]) for block in blocks]


def test_every_field_of_the_sdk_is_known() -> None:
    assert set(CompletionCreateParamsBase.__annotations__) <= set(ChatBody.__struct_fields__)


def test_defaults_are_those_of_the_api() -> None:
    prompt = parsed()
    assert (prompt.max_tokens, prompt.n, prompt.stream, prompt.include_usage, prompt.padded) == (
        None,
        1,
        False,
        False,
        True,
    )
    assert (prompt.sampling.temperature, prompt.sampling.top_p, prompt.sampling.logprobs) == (1.0, 1.0, None)


def test_null_is_the_same_as_nothing() -> None:
    nulls = ("stream", "temperature", "stop", "tools", "n", "seed", "max_tokens", "response_format", "stream_options")
    assert parsed(**dict.fromkeys(nulls)) == parsed()


def test_every_field_is_honoured() -> None:
    prompt = parsed(
        n=4,
        logprobs=True,
        top_logprobs=20,
        seed=-1,
        max_completion_tokens=5,
        stop="x",
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        top_p=0,
    )
    assert (prompt.n, prompt.sampling.logprobs, prompt.max_tokens, prompt.stop) == (4, 20, 5, ["x"])
    assert (prompt.stream, prompt.include_usage, prompt.padded) == (True, True, False)
    assert 0 <= prompt.sampling.seed < 1 << 62
    assert prompt.sampling.top_p == 0.001
    assert parsed(logprobs=True).sampling.logprobs == 0


def test_what_an_answer_is_to_be_is_honoured() -> None:
    prompt = parsed(
        tools=[{"type": "function", "function": {"name": "f", "strict": True}}],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="none",
        response_format={"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": {}}},
    )
    assert (prompt.tool_choice.mode, prompt.parallel_calls, prompt.strict_calls) == ("required", False, True)
    assert prompt.template_options == {"reasoning_effort": "none"}
    assert prompt.grammar is not None
    assert (prompt.grammar.source, prompt.json, prompt.grammar_field) == ("{}", True, "response_format")
    assert parsed(max_tokens=7).max_tokens == 7


def test_what_asks_for_nothing_is_accepted() -> None:
    assert parsed(
        user="u",
        metadata={"a": "b"},
        store=False,
        tool_choice="auto",
        response_format={"type": "text"},
        service_tier="auto",
        modalities=["text"],
        parallel_tool_calls=True,
        prompt_cache_key="k",
        safety_identifier="s",
    )


def test_no_alternatives_are_asked_for_without_log_probabilities() -> None:
    assert parsed(logprobs=False, top_logprobs=0).sampling.logprobs is None


def test_tool_choice_none_leaves_the_tools_out() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert parsed(tools=tools).tools is not None
    assert parsed(tools=tools, tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hello"),
        ("model", 5),
        ("temperature", 2.1),
        ("top_p", 1.1),
        ("n", 129),
        ("n", 0),
        ("top_logprobs", 21),
        ("top_logprobs", 2),
        ("stream_options", {"include_usage": True}),
        ("seed", 1 << 63),
        ("stop", ["x"] * 5),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format", {"type": "xml"}),
        ("store", True),
        ("service_tier", "flex"),
        ("modalities", ["audio"]),
        ("reasoning_effort", "huge"),
        ("verbosity", "low"),
        ("audio", {}),
        ("prediction", {}),
        ("web_search_options", {}),
        ("function_call", "auto"),
        ("functions", []),
        ("moderation", {}),
        ("prompt", "x"),
        ("max_tokens", 1.5),
    ],
)
def test_a_wrong_or_unserved_field_is_refused_by_name(field: str, value: Any) -> None:
    refused = refusal(**{field: value})
    assert f"'{field}" in refused.message, refused.message
    assert (refused.param or "").startswith(field)


def test_both_limits_on_tokens_are_one_too_many() -> None:
    assert refusal(max_tokens=5, max_completion_tokens=5).param == "max_completion_tokens"


def test_the_stream_is_clean() -> None:
    chunks = reply(prompt := parsed(stream=True, stream_options={"include_usage": True}))
    assert prompt.include_usage
    raw = chunks.begin(BEGUN) + chunks.text(0, "hi", []) + chunks.finish(0, "stop", None) + chunks.end(USAGE)
    *shown, done = events(raw)
    assert done == "[DONE]"
    assert [chunk["choices"] for chunk in shown] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        [],
    ]
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in shown} == {
        ("chatcmpl-the-id", "chat.completion.chunk", 1_700_000_000, "@cf/test/stub")
    }
    assert [chunk["usage"] for chunk in shown[:-1]] == [None] * 3
    assert shown[-1]["usage"]["total_tokens"] == 10


def test_without_include_usage_there_is_none() -> None:
    chunks = reply(parsed(stream=True))
    raw = chunks.begin(BEGUN) + chunks.text(0, "hi", []) + chunks.finish(0, "stop", None) + chunks.end(USAGE)
    assert b"usage" not in raw
    assert len(events(raw)) == 4


def test_every_chunk_says_what_was_used_so_far_where_that_is_asked_for() -> None:
    chunks = reply(prompt := parsed(stream=True, stream_options={"continuous_usage_stats": True}))
    assert prompt.include_usage, "vLLM's last chunk has it then, too"
    running = RunningUsage(7, 4, completion_tokens=2)  # the first step came with two tokens
    raw = chunks.begin(running) + chunks.text(0, "hi", [])
    running.completion_tokens = 3
    raw += chunks.text(0, "!", []) + chunks.finish(0, "stop", None) + chunks.end(USAGE)
    *shown, _ = events(raw)
    assert [chunk["usage"]["completion_tokens"] for chunk in shown] == [0, 2, 3, 3, USAGE.completion_tokens]
    assert [chunk["usage"]["total_tokens"] for chunk in shown[:-1]] == [7, 9, 10, 10]
    assert shown[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert [chunk["choices"][0]["delta"] for chunk in shown[1:3]] == [{"content": "hi"}, {"content": "!"}]


def test_usage_in_every_chunk_is_not_declined_at_the_same_time() -> None:
    options = {"continuous_usage_stats": True, "include_usage": False}
    assert refusal(stream=True, stream_options=options).param == "stream_options.include_usage"


def test_padding_is_in_every_chunk_unless_it_is_declined() -> None:
    for options, count in ((None, 2), ({"include_obfuscation": False}, 0)):
        chunks = reply(parsed(stream=True, stream_options=options))
        raw = chunks.begin(BEGUN) + chunks.text(0, "hi", [])
        assert raw.count(b'"obfuscation":"abc"') == count


def test_each_choice_has_its_role_and_index() -> None:
    chunks = reply(parsed(stream=True, n=2))
    roles = events(chunks.begin(BEGUN))
    assert [chunk["choices"][0]["index"] for chunk in roles] == [0, 1]
    (chunk,) = events(chunks.text(1, "hi", []))
    assert chunk["choices"][0]["index"] == 1


def test_logprobs_are_beside_the_text() -> None:
    scored = ScoredToken("é", "é".encode(), -0.5, [ScoredToken("e", b"e", -0.5, [])])
    shape = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    top = [{"token": "e", "logprob": -0.5, "bytes": [101]}]
    chunks = reply(parsed(stream=True, logprobs=True, top_logprobs=1))
    (chunk,) = events(chunks.text(0, "é", [scored]))
    assert chunk["choices"][0]["logprobs"] == {"content": [{**shape, "top_logprobs": top}]}
    whole = json.loads(chunks.whole([Completion("é", "stop", [], [scored])], USAGE))
    assert whole["choices"][0]["logprobs"]["content"] == [{**shape, "top_logprobs": top}]


def test_the_whole_answer_is_a_chat_completion() -> None:
    whole = json.loads(reply(parsed()).whole([Completion("hi", "length", [], None)], USAGE))
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_tool_calls_have_ids_and_arguments_as_text() -> None:
    use = ToolUse("call_1", "rain", '{"in":"Rome"}')
    call = {"id": "call_1", "type": "function", "function": {"name": "rain", "arguments": '{"in":"Rome"}'}}
    whole = json.loads(reply(parsed()).whole([Completion("", "tool_calls", [use], None)], USAGE))
    message = whole["choices"][0]["message"]
    assert (message["content"], message["tool_calls"]) == (None, [call])
    chunks = reply(parsed(stream=True))
    raw = chunks.call(0, 0, ToolUse("call_1", "rain", "")) + chunks.arguments(0, 0, '{"in":"Rome"}')
    begun, rest = [chunk["choices"][0]["delta"]["tool_calls"] for chunk in events(raw)]
    assert begun == [{"index": 0, **call, "function": {"name": "rain", "arguments": ""}}]
    assert rest == [{"index": 0, "function": {"arguments": '{"in":"Rome"}'}}]
    assert chunks.called(0, 0, use) == b""
