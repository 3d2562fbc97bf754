import json
from typing import Any

import msgspec
import pytest
from anthropic.types import (
    CacheControlEphemeralParam,
    MessageCountTokensParams,
    OutputConfigParam,
    TextBlockParam,
    ThinkingBlockParam,
    ThinkingConfigEnabledParam,
    ToolChoiceToolParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming as BetaStreaming
from anthropic.types.message_create_params import MessageCreateParamsStreaming

from engine.protocol.types import GrammarKind
from gateway.api.messages_request import read_count_tokens, read_messages
from gateway.errors import ApiError
from gateway.inference.prompt import Prompt
from gateway.tool_parsers.tool_schema import ToolSelection

MODEL = "@cf/test/stub"
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
RAIN: dict[str, Any] = {"name": "rain", "input_schema": {"type": "object"}}
SNOW: dict[str, Any] = {**RAIN, "name": "snow"}
CACHED: dict[str, Any] = {"type": "ephemeral", "ttl": "1h"}
CALL: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "rain", "input": {"in": "Rome"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a", "content": "no"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
# These are headers: what is asked for is in the body, and whose the request is says the credential.
HEADERS = {"betas", "user_profile_id", "workspace_id"}


def parsed(**fields: Any) -> Prompt:
    body = {"model": MODEL, "max_tokens": 2000, "messages": [HELLO], **fields}
    asked = read_messages(json.dumps(body).encode(), b"", None, 77)
    assert asked.model == MODEL
    return asked.prompt


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def image(**source: str) -> dict[str, Any]:
    if "url" not in source:
        source = {"type": "base64", "media_type": "image/png", "data": "AAEC", **source}
    return {"type": "image", "source": source}


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parsed(**fields)
    assert (raised.value.status, raised.value.code) == (400, 5006)
    return raised.value


# Every field of the SDK's request is in one of these: what it changes here, or a value of it that is refused.
HONOURED: dict[str, Any] = {
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "other"}],
    "metadata": {"user_id": "u"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["END"],
    "stream": True,
    "system": "be brief",
    "temperature": 0.5,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tools": [RAIN],
    "top_k": 5,
    "top_p": 0.5,
}
SERVED_ANYWAY: dict[str, Any] = {
    "cache_control": CACHED,
    "service_tier": "standard_only",
    "speed": "standard",
    "model": MODEL,
}
REFUSED: dict[str, Any] = {
    "container": "c",
    "billing_policy": {},
    "compaction": {},
    "context_management": {},
    "diagnostics": {},
    "fallback_credit_token": "t",
    "fallbacks": [],
    "inference_geo": "eu",
    "mcp_servers": [],
    "output_format": {},
    "service_tier": "priority",
    "speed": "fast",
    "thread": {"type": "create"},
}


def test_every_field_of_the_sdk_is_honoured_or_refused_by_name() -> None:
    known = HONOURED.keys() | SERVED_ANYWAY.keys() | REFUSED.keys() | {"tool_choice"} | HEADERS
    older = {"temperature", "top_k", "top_p", "output_format"}
    assert known - older == (MessageCreateParamsStreaming.__annotations__ | BetaStreaming.__annotations__).keys()
    for field, value in HONOURED.items():
        assert parsed(**{field: value}) != parsed(), field
    assert parsed(tools=[RAIN], tool_choice={"type": "any"}) != parsed(tools=[RAIN])
    assert parsed(**SERVED_ANYWAY) == parsed()
    for field, value in REFUSED.items():
        refused = refusal(**{field: value})
        assert f"'{field}' is not" in refused.message
        assert refused.param == field


def test_a_count_takes_what_a_model_reads_and_nothing_else() -> None:
    fields = MessageCountTokensParams.__annotations__.keys() - HEADERS
    known = {**HONOURED, **SERVED_ANYWAY, "tool_choice": {"type": "none"}}
    body = {"model": MODEL, "messages": [HELLO], **{field: known[field] for field in fields}}
    counted = read_count_tokens(json.dumps(body).encode(), b"", None, 77)
    assert counted.prompt.messages == parsed(messages=known["messages"], system="be brief").messages
    assert counted.render(5) == b'{"input_tokens":5}'
    for field in known.keys() - fields:
        with pytest.raises(ApiError) as raised:
            read_count_tokens(json.dumps({**body, field: known[field]}).encode(), b"", None, 77)
        assert raised.value.param == field


@pytest.mark.parametrize(
    ("kind", "example", "values", "refused"),
    [
        (TextBlockParam, {"type": "text", "text": "x"}, {"cache_control": CACHED, "citations": [{}]}, {"citations"}),
        (
            ToolUseBlockParam,
            CALL,
            {"cache_control": CACHED, "caller": {"type": "direct"}, "toolset_name": "t"},
            {"toolset_name"},
        ),
        (
            ToolResultBlockParam,
            RESULT,
            {"cache_control": CACHED, "is_error": True, "toolset_name": "t"},
            {"toolset_name"},
        ),
        (ThinkingBlockParam, {"type": "thinking", "thinking": "hm"}, {"signature": ""}, set()),
        (
            ToolParam,
            RAIN,
            {
                "type": "custom",
                "description": "d",
                "strict": True,
                "eager_input_streaming": True,
                "cache_control": CACHED,
                "allowed_callers": ["code_execution_20250825"],
                "defer_loading": True,
                "input_examples": [{}],
            },
            {"allowed_callers", "defer_loading", "input_examples"},
        ),
        (ThinkingConfigEnabledParam, {"type": "enabled", "budget_tokens": 1024}, {"display": "omitted"}, set()),
        (ToolChoiceToolParam, {"type": "tool", "name": "rain"}, {"disable_parallel_tool_use": True}, set()),
        (OutputConfigParam, {"effort": "low"}, {"format": {"type": "json_schema", "schema": {}}}, set()),
        (CacheControlEphemeralParam, {"type": "ephemeral"}, {"ttl": "5m"}, set()),
    ],
)
def test_every_field_of_a_part_is_taken_or_refused_by_name(
    kind: Any, example: dict[str, Any], values: dict[str, Any], refused: set[str]
) -> None:
    assert example.keys() | values.keys() == kind.__annotations__.keys()
    told = set()
    for field, value in {**example, **values}.items():
        part = {**example, field: value}
        bodies: dict[Any, dict[str, Any]] = {
            TextBlockParam: {"messages": [{"role": "user", "content": [part]}]},
            ThinkingBlockParam: {"messages": [{"role": "assistant", "content": [part]}, HELLO]},
            ToolUseBlockParam: {"messages": [{"role": "assistant", "content": [part]}, HELLO]},
            ToolResultBlockParam: {
                "messages": [{"role": "assistant", "content": [CALL]}, {"role": "user", "content": [part]}]
            },
            ToolParam: {"tools": [part]},
            ThinkingConfigEnabledParam: {"thinking": part},
            ToolChoiceToolParam: {"tools": [RAIN], "tool_choice": part},
            OutputConfigParam: {"output_config": part},
            CacheControlEphemeralParam: {"cache_control": part},
        }
        try:
            parsed(**bodies[kind])
        except ApiError as raised:
            told.add(str(raised.param).rpartition(".")[2].partition("[")[0])
    assert told == refused


def test_defaults_are_those_of_the_api() -> None:
    prompt = parsed()
    assert prompt.messages == [HELLO]
    assert (prompt.max_tokens, prompt.stream, prompt.stop, prompt.user) == (2000, False, [], None)
    assert (prompt.sampling.temperature, prompt.sampling.top_p, prompt.sampling.top_k) == (1.0, 1.0, 0)
    nothing = ("system", "tools", "tool_choice", "stop_sequences", "stream", "thinking", "metadata", "cache_control")
    assert parsed(**dict.fromkeys(nothing)) == prompt
    assert refusal(max_tokens=None).param == "max_tokens"


def test_blocks_are_the_conversation() -> None:
    thinking = {"type": "thinking", "thinking": "look", "signature": ""}
    messages = [
        {"role": "user", "content": [{**text("ra"), "cache_control": CACHED}, text("in?")]},
        {"role": "assistant", "content": [thinking, {**text("Let me see."), "citations": None}, CALL]},
        {"role": "user", "content": "one moment"},
        {"role": "user", "content": [RESULT, text("well?")]},
        {"role": "assistant", "content": "Dry."},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "and "},
        {"role": "user", "content": [text("Oslo?")]},
    ]
    assert parsed(system=[text("be brief")], messages=messages).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "look",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "rain", "arguments": {"in": "Rome"}}}],
        },
        {"role": "user", "content": "one moment"},
        {"role": "tool", "content": "no", "tool_call_id": "a", "name": "rain"},
        {"role": "user", "content": "well?"},
        {"role": "assistant", "content": "Dry."},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "and \n\nOslo?"},
    ]


def test_images_stand_where_their_blocks_do() -> None:
    prompt = parsed(
        messages=[
            {"role": "user", "content": [text("look"), text(" here"), image(), text("and"), image(data="AwQ=")]},
            {"role": "user", "content": [image(type="url", url="data:image/gif;base64,BQ==")]},
            {"role": "user", "content": "well?"},
        ]
    )
    assert prompt.messages == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look here"},
                {"type": "image"},
                {"type": "text", "text": "and"},
                {"type": "image"},
                {"type": "image"},
                {"type": "text", "text": "\n\nwell?"},
            ],
        }
    ]
    assert [(each.content, each.media_type, each.field) for each in prompt.images] == [
        (b"\0\1\2", "image/png", "messages[0].content[2].source.data"),
        (b"\3\4", "image/png", "messages[0].content[4].source.data"),
        (b"\5", "image/gif", "messages[1].content[0].source.url"),
    ]


def test_a_call_that_failed_says_so_to_the_model() -> None:
    blocks = [{**RESULT, "content": [text("no sky")], "is_error": True}]
    turns = parsed(messages=[{"role": "assistant", "content": [CALL]}, {"role": "user", "content": blocks}]).messages
    assert turns is not None
    assert turns[-1]["content"] == "Error: no sky"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([HELLO, {"role": "assistant", "content": "The answer is ("}], "messages"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [CALL]}], "messages[0].content[0]"),
        ([{"role": "system", "content": [CALL]}, HELLO], "messages[0].content[0]"),
        ([{"role": "assistant", "content": [RESULT]}, HELLO], "messages[0].content[0]"),
        ([{"role": "user", "content": [RESULT]}], "messages[0].content[0].tool_use_id"),
        ([{"role": "assistant", "content": [CALL, CALL]}, HELLO], "messages[0].content[1]"),
        *(
            ([{"role": "user", "content": [{"type": kind, "source": {}}]}], "messages[0].content[0].type")
            for kind in ("document", "redacted_thinking", "server_tool_use", "search_result")
        ),
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "messages[0].content[0].source.type"),
        (
            [{"role": "user", "content": [image(type="url", url="https://a/b.png")]}],
            "messages[0].content[0].source.url",
        ),
        ([{"role": "user", "content": [image(data="?")]}], "messages[0].content[0].source.data"),
        ([{"role": "user", "content": [image(media_type="image/svg+xml")]}], "messages[0].content[0].source.data"),
        ([{"role": "assistant", "content": [image()]}, HELLO], "messages[0].content[0]"),
        ([{"role": "user", "content": [image()] * 17}], "messages[0].content[16].source"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(messages: list[Any], param: str) -> None:
    assert refusal(messages=messages).param == param


def test_a_choice_of_tools_is_what_the_model_gets() -> None:
    def chosen(**choice: Any) -> tuple[list[str] | None, ToolSelection, bool]:
        prompt = parsed(tools=[RAIN, SNOW], tool_choice=choice)
        names = None if prompt.tools is None else [tool["function"]["name"] for tool in prompt.tools]
        return names, prompt.tool_choice, prompt.parallel_calls

    both = ["rain", "snow"]
    assert chosen(type="auto") == (both, ToolSelection("auto"), True)
    assert chosen(type="auto", disable_parallel_tool_use=True) == (both, ToolSelection("auto"), False)
    assert chosen(type="none") == (None, ToolSelection("none"), True)
    assert chosen(type="any") == (both, ToolSelection("required"), True)
    assert chosen(type="tool", name="snow") == (both, ToolSelection("named", "snow"), True)
    for wrong in ({"type": "tool"}, {"type": "any", "name": "rain"}, {"type": "tool", "name": "hail"}, {"type": "x"}):
        assert str(refusal(tools=[RAIN], tool_choice=wrong).param).startswith("tool_choice")
    assert refusal(tool_choice={"type": "any"}).param == "tool_choice"


def test_a_strict_tool_holds_its_calls() -> None:
    assert parsed(tools=[RAIN, {**SNOW, "strict": True}]).strict_calls
    assert not parsed(tools=[RAIN, SNOW]).strict_calls


def test_server_tools_are_refused_with_what_is_served() -> None:
    for kind in ("web_search_20250305", "bash_20250124", "text_editor_20250728", "code_execution_20250825"):
        refused = refusal(tools=[{"type": kind, "name": "x"}])
        assert (refused.param, "send one of custom" in refused.message) == ("tools[0].type", True)


def test_a_format_is_a_grammar() -> None:
    prompt = parsed(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert prompt.grammar is not None
    assert (prompt.grammar.kind, prompt.json) == (GrammarKind.JSON_SCHEMA, True)
    assert msgspec.json.decode(prompt.grammar.source).items() >= SCHEMA.items()


def test_thinking_is_an_option_of_the_template() -> None:
    assert parsed(thinking={"type": "enabled", "budget_tokens": 1024}).template_options == {"enable_thinking": True}
    assert parsed(thinking={"type": "disabled"}).template_options == {"enable_thinking": False}
    assert parsed(thinking={"type": "adaptive"}).template_options == {}
    assert parsed(output_config={"effort": "high"}).template_options == {"reasoning_effort": "high"}
    budgets: list[dict[str, Any]] = [{"type": "disabled", "budget_tokens": 1024}]
    budgets += [{"type": "enabled", "budget_tokens": 2000}, {"type": "enabled"}]
    for wrong in budgets:
        assert refusal(thinking=wrong).param == "thinking.budget_tokens"
    assert refusal(thinking={"type": "between_tools"}).param == "thinking.type"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1.1),
        ("top_p", 1.1),
        ("top_k", 51),
        ("max_tokens", 0),
        ("stop_sequences", ["x"] * 5),
        ("stop_sequences", [""]),
        ("model", 5),
        ("messages", "hello"),
        ("cache_control", {"type": "forever"}),
        ("n", 2),
    ],
)
def test_a_wrong_or_unknown_field_is_refused_by_name(field: str, value: Any) -> None:
    assert str(refusal(**{field: value}).param).startswith(field)
