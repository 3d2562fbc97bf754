import json
from itertools import repeat
from typing import Any

import msgspec
import pytest
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseOutputMessageParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
)
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from openai.types.responses.response_input_param import FunctionCallOutput
from openai.types.shared_params import Reasoning

from engine.protocol.types import GrammarKind
from gateway.api.dialect import GenerationRequest
from gateway.api.responses_request import read_input_tokens, read_responses
from gateway.errors import ApiError
from gateway.inference.prompt import MODEL_SAMPLING, Prompt
from gateway.inference.reply import RunningUsage
from gateway.tool_parsers.tool_schema import ToolSelection

MODEL = "@cf/test/stub"
RAIN: dict[str, Any] = {"type": "function", "name": "rain", "parameters": {"type": "object"}}
SNOW: dict[str, Any] = {**RAIN, "name": "snow"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(**fields: Any) -> GenerationRequest:
    body = {"model": MODEL, "input": "hello", **fields}
    asked = read_responses(json.dumps(body).encode(), b"", None, 77)
    assert asked.model == MODEL
    return asked


def parsed(**fields: Any) -> Prompt:
    return read(**fields).prompt


def said(**fields: Any) -> dict[str, Any]:
    """The answer's first event: all that it says again."""
    raw = (
        read(**fields)
        .reply(MODEL, "the-id", 1, repeat(b"abc"))
        .begin(RunningUsage())
        .partition(b"data: ")[2]
        .partition(b"\n")[0]
    )
    found: dict[str, Any] = json.loads(raw)["response"]
    return found


def parts(kind: str, *texts: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parsed(**fields)
    assert (raised.value.status, raised.value.code) == (400, 5006)
    return raised.value


# Every field of the SDK's request is in one of these: what it changes here, or a value of it that is refused.
HONOURED: dict[str, Any] = {
    "input": "other",
    "instructions": "be brief",
    "max_output_tokens": 5,
    "parallel_tool_calls": False,
    "stream": True,
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "tools": [RAIN],
    "top_p": 0.5,
    "user": "u",
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
}
LABELS: dict[str, Any] = {
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
}
WITH_ANOTHER: dict[str, dict[str, Any]] = {
    "model": {"model": MODEL},
    "stream_options": {"stream": True, "stream_options": {"include_obfuscation": False}},
    "tool_choice": {"tools": [RAIN], "tool_choice": "required"},
    "top_logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
}
PIXEL = "data:image/gif;base64,R0lGODlh"
REFUSED: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "background": True,
    "background_options": {"completion_window": "2h"},
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "image": {"context_compression": "auto"},
    "max_tool_calls": 3,
    "moderation": {"model": "m"},
    "previous_response_id": "resp_1",
    "prompt": {"id": "p"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "store": True,
    "truncation": "auto",
}


def test_every_field_of_the_sdk_is_honoured_or_refused_by_name() -> None:
    known = HONOURED.keys() | LABELS.keys() | WITH_ANOTHER.keys() | REFUSED.keys()
    assert known == ResponseCreateParamsStreaming.__annotations__.keys()
    for field, value in HONOURED.items():
        assert parsed(**{field: value}) != parsed(), field
    for field, value in LABELS.items():
        assert parsed(**{field: value}) == parsed()
        assert said(**{field: value})[field] == value
    for field, fields in WITH_ANOTHER.items():
        assert parsed(**fields) != parsed() or field == "model", field
    for field, value in REFUSED.items():
        refused = refusal(**{field: value})
        assert f"'{field}' is not supported here" in refused.message
        assert refused.param == field


def test_every_field_of_a_count_is_honoured_or_refused_by_name() -> None:
    fields = InputTokenCountParams.__annotations__.keys()
    known = {**HONOURED, **REFUSED, "tool_choice": "none", "model": MODEL, "personality": "friendly"}
    refused = set()
    for field in fields:
        body = {"model": MODEL, "input": "hello", "tools": [RAIN], field: known[field]}
        try:
            read_input_tokens(json.dumps(body).encode(), b"", None, 77)
        except ApiError as told:
            refused.add(told.param)
    assert refused == {"personality", "truncation", "previous_response_id", "conversation"}


@pytest.mark.parametrize(
    ("kind", "place", "item", "values"),
    [
        (EasyInputMessageParam, "input[0]", {"role": "user", "content": "x"}, {"phase": "commentary"}),
        (
            ResponseOutputMessageParam,
            "input[0]",
            {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
            {"id": "msg_1", "status": "completed", "phase": "final_answer"},
        ),
        (
            ResponseFunctionToolCallParam,
            "input[0]",
            {"type": "function_call", "call_id": "a", "name": "rain", "arguments": "{}"},
            {"id": "fc_1", "status": "completed", "caller": {"type": "direct"}, "namespace": "n", "async": True},
        ),
        (
            FunctionCallOutput,
            "input[1]",
            {"type": "function_call_output", "call_id": "a", "output": "x"},
            {"id": "x", "status": "completed", "caller": {"type": "direct"}, "namespace": "n", "name": "n"},
        ),
        (
            ResponseReasoningItemParam,
            "input[0]",
            {"type": "reasoning", "summary": []},
            {"id": "rs_1", "status": "completed", "content": [], "encrypted_content": "x"},
        ),
        (
            FunctionToolParam,
            "tools[0]",
            {"type": "function", "name": "rain", "parameters": {}},
            {
                "strict": True,
                "description": "d",
                "allowed_callers": ["programmatic"],
                "defer_loading": True,
                "output_schema": {},
                "async": True,
            },
        ),
    ],
)
def test_every_field_of_an_item_and_a_tool_is_taken_or_refused_by_name(
    kind: Any, place: str, item: dict[str, Any], values: dict[str, Any]
) -> None:
    assert item.keys() | values.keys() | {"type"} == kind.__annotations__.keys() | {"type"}
    call = {"type": "function_call", "call_id": "a", "name": "rain", "arguments": "{}"}
    refused = set()
    for field, value in {**item, **values}.items():
        one = {**item, field: value}
        items = [{"role": "user", "content": "x"}]
        fields: dict[str, Any] = {"tools": [one]}
        if not place.startswith("tools"):
            fields = {"input": [call, one, *items] if place == "input[1]" else [one, *items]}
        try:
            parsed(**fields)
        except ApiError as told:
            refused.add(str(told.param).removeprefix(f"{place}.").partition("[")[0])
    never = {"namespace", "async", "name", "encrypted_content", "allowed_callers", "defer_loading", "output_schema"}
    assert refused == (values.keys() & never) - item.keys()


@pytest.mark.parametrize(
    ("kind", "field", "refused"),
    [
        (ResponseTextConfigParam, "text", {"verbosity": "low"}),
        (
            Reasoning,
            "reasoning",
            {"context": "all_turns", "generate_summary": "detailed", "mode": "pro", "summary": "concise"},
        ),
    ],
)
def test_every_field_of_a_setting_is_known(kind: Any, field: str, refused: dict[str, Any]) -> None:
    assert kind.__annotations__.keys() - refused.keys() <= {"format", "effort"}
    for name, value in refused.items():
        assert refusal(**{field: {name: value}}).param == f"{field}.{name}"


def test_defaults_are_those_of_the_api() -> None:
    prompt = parsed()
    assert prompt.messages == [{"role": "user", "content": "hello"}]
    assert (prompt.max_tokens, prompt.n, prompt.stream, prompt.padded, prompt.stop) == (None, 1, False, True, [])
    assert (prompt.sampling.temperature, prompt.sampling.top_p, prompt.sampling.logprobs) == (1.0, 1.0, None)
    assert prompt.left_to_model == MODEL_SAMPLING
    nothing = ("instructions", "tools", "tool_choice", "text", "stream", "store", "metadata", "reasoning", "include")
    assert parsed(**dict.fromkeys(nothing)) == prompt


def test_what_asks_for_nothing_is_accepted() -> None:
    assert (
        parsed(
            store=False,
            background=False,
            service_tier="auto",
            truncation="disabled",
            prompt_cache_retention="in_memory",
            prompt_cache_options={"mode": "implicit"},
            context_management=[],
            reasoning={"summary": "auto", "effort": None},
            text={"format": {"type": "text"}, "verbosity": "medium"},
            include=["reasoning.encrypted_content"],
            top_logprobs=0,
        )
        == parsed()
    )


def test_items_are_the_conversation() -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": parts("input_text", "ra", "in?")},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts("reasoning_text", "look")},
        {"type": "function_call", "call_id": "a", "name": "rain", "arguments": '{"in": "Rome"}'},
        {"type": "function_call_output", "call_id": "a", "output": parts("input_text", "no")},
        {"id": "msg_1", "role": "assistant", "status": "completed", "content": parts("output_text", "Dry.")},
        {"role": "user", "content": "and Oslo?"},
    ]
    assert parsed(instructions="be kind", input=items).messages == [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "look",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "rain", "arguments": {"in": "Rome"}}}],
        },
        {"role": "tool", "content": "no", "tool_call_id": "a", "name": "rain"},
        {"role": "assistant", "content": "Dry."},
        {"role": "user", "content": "and Oslo?"},
    ]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        ([{"type": "reasoning", "summary": []}], "input"),
        ([{"role": "user"}], "input[0].content"),
        ([{"content": "x"}], "input[0].role"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": "x", "name": "bob"}], "input[0].name"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "input[0].content[0].file_id"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}] * 17}],
            "input[0].content[16].image_url",
        ),
        ([{"role": "assistant", "content": [{"type": "input_image", "image_url": PIXEL}]}], "input[0].content"),
        ([{"type": "reasoning", "content": [{"type": "input_image", "image_url": PIXEL}]}], "input[0].content"),
        ([{"type": "input_file", "file_data": "x"}], "input[0].type"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"type": "web_search_call", "id": "x"}], "input[0].type"),
        ([{"type": "function_call", "call_id": "a", "name": "f", "arguments": "no"}], "input[0]"),
        ([{"type": "function_call_output", "call_id": "a", "output": "x"}], "input[0].call_id"),
    ],
)
def test_a_wrong_item_is_refused_by_its_place(items: list[Any], param: str) -> None:
    assert refusal(input=items).param == param


def test_images_stand_where_they_were_sent() -> None:
    image = {"type": "input_image", "image_url": PIXEL, "detail": "auto"}
    content = [{"type": "input_text", "text": "look"}, image, {"type": "input_text", "text": "and"}, image]
    prompt = parsed(input=[{"role": "user", "content": content}, {"role": "user", "content": "what is it?"}])
    parts = [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    assert prompt.messages == [{"role": "user", "content": parts}, {"role": "user", "content": "what is it?"}]
    assert [image.field for image in prompt.images] == [f"input[0].content[{j}].image_url" for j in (1, 3)]
    assert {(image.content, image.media_type) for image in prompt.images} == {(b"GIF89a", "image/gif")}


def test_a_choice_of_tools_is_what_the_model_gets() -> None:
    def chosen(choice: Any) -> tuple[list[str] | None, ToolSelection]:
        prompt = parsed(tools=[RAIN, SNOW], tool_choice=choice)
        names = None if prompt.tools is None else [tool["function"]["name"] for tool in prompt.tools]
        return names, prompt.tool_choice

    both = ["rain", "snow"]
    assert chosen("auto") == (both, ToolSelection("auto"))
    assert chosen("none") == (None, ToolSelection("none"))
    assert chosen("required") == (both, ToolSelection("required"))
    assert chosen({"type": "function", "name": "snow"}) == (both, ToolSelection("named", "snow"))
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "snow"}]}
    assert chosen(allowed) == (["snow"], ToolSelection("required"))
    for wrong in ({"type": "function", "name": "hail"}, {"type": "web_search_preview"}, "always"):
        assert str(refusal(tools=[RAIN], tool_choice=wrong).param).startswith("tool_choice")
    assert refusal(tool_choice="required").param == "tool_choice"


def test_a_strict_tool_holds_its_calls() -> None:
    assert parsed(tools=[RAIN, {**SNOW, "strict": True}]).strict_calls
    assert not parsed(tools=[RAIN, SNOW]).strict_calls


def test_built_in_tools_are_refused_with_what_is_served() -> None:
    for kind in ("web_search", "file_search", "code_interpreter", "mcp", "custom", "image_generation", "local_shell"):
        refused = refusal(tools=[{"type": kind, "server_label": "x"}])
        assert refused.param == "tools[0].type"
        assert "send one of function" in refused.message


def test_a_format_is_a_grammar() -> None:
    wrapped = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    for format, source in (({"type": "json_object"}, {"type": "object"}), (wrapped, SCHEMA)):
        prompt = parsed(text={"format": format})
        assert prompt.grammar is not None
        assert (prompt.grammar.kind, prompt.json) == (GrammarKind.JSON_SCHEMA, True)
        assert msgspec.json.decode(prompt.grammar.source).items() >= source.items()
    assert said(text={"format": wrapped})["text"]["format"] == wrapped
    assert refusal(text={"format": {"type": "json_schema", "name": "n"}}).param == "text.format.schema"
    assert refusal(text={"format": {"type": "grammar"}}).param == "text.format.type"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("top_p", 1.1),
        ("top_logprobs", 21),
        ("top_logprobs", 2),
        ("max_output_tokens", 0),
        ("stream_options", {"include_obfuscation": False}),
        ("model", 5),
        ("input", 5),
        ("include", ["file_search_call.results"]),
        ("metadata", {"a": "x" * 513}),
        ("seed", 5),
        ("n", 2),
    ],
)
def test_a_wrong_or_unknown_field_is_refused_by_name(field: str, value: Any) -> None:
    assert str(refusal(**{field: value}).param).startswith(field)
