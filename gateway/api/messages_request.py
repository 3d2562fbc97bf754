"""Anthropic's Messages: a body with blocks to a Prompt. The answer is made in `message_blocks`.

It does not know accounts, replicas or sockets.
"""

from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.protocol.types import SamplingParams
from gateway.api.conversation import ConversationBuilder
from gateway.api.dialect import GenerationRequest, TokenCountRequest
from gateway.api.messages_response import MessagesReply
from gateway.api.sampling_fields import TOP_P_MIN
from gateway.errors import bad_input, no_threads
from gateway.http import sse
from gateway.http.json_body import decode_body
from gateway.inference.prompt import (
    MESSAGES_MAX,
    STOPS_MAX,
    TOOLS_MAX,
    Function,
    MaxTokens,
    Probability,
    Prompt,
    ReasoningEffort,
    ShortText,
    StopString,
    ToolName,
    TopK,
    refuse_field,
    seed_of,
    strict,
    template_options,
    tool_definitions,
)
from gateway.inference.prompt import Tool as AnyTool
from gateway.inference.response_format import UNCONSTRAINED, schema_constraint
from gateway.inference.tool_choice import ChosenTool, ToolChoiceField, select_tools

TEMPERATURE_DEFAULT: Final = 1.0
FIELD_NAMES: Final = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs.enable_thinking": "thinking",
}
BUDGET: Final = "thinking.budget_tokens"
BETWEEN_MESSAGES: Final = "\n\n"
Id = Annotated[str, Meta(min_length=1, max_length=256)]


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a cache may cut. Every prefix is cached here in any case, for as long as the account's settings say."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None
    parsed_output: Any = None


class DirectCaller(msgspec.Struct, frozen=True, tag_field="type", tag="direct", forbid_unknown_fields=True):
    """The caller of a tool is the model itself."""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    id: Id
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """What a call gave. Where `is_error` is set the model reads "Error: " before it."""

    tool_use_id: Id
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """As an answer had it; thoughts are not signed here."""

    thinking: str
    signature: str = ""


MessageBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock


class MessageParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn, or a part of one: messages of the same role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[MessageBlock], Meta(min_length=1)]


class MessagesTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool of the caller's. Its input follows `input_schema` where a call is required or `strict` is set; it streams
    as it is written, with `eager_input_streaming` and without."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model thinks first, where its template has `enable_thinking`; `adaptive` leaves it to the template.

    `budget_tokens` is a wish: what bounds thoughts and text together is `max_tokens`. `display` omitted leaves thoughts
    out of the answer; else they come whole.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`effort` goes to the chat template; the answer's text follows the schema of `format`."""

    effort: ReasoningEffort | None = None
    format: JsonFormat | None = None


class Labels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`user_id` may keep cached prefixes apart, and is kept nowhere."""

    user_id: ShortText | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model reads: the fields of a count. From `speed` on they are refused where they ask for something."""

    model: ShortText
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    thinking: Thinking | None = None
    speed: str | None = None
    thread: Any = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field of Messages. From `service_tier` on they are refused where they ask for something."""

    max_tokens: MaxTokens
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=STOPS_MAX)] | None = None
    stream: bool | None = None
    metadata: Labels | None = None
    service_tier: str | None = None
    inference_geo: Any = None
    container: Any = None
    diagnostics: Any = None


_decoder: Final = msgspec.json.Decoder(MessagesBody)
_asking_decoder: Final = msgspec.json.Decoder(CountTokensBody)


def parse(asked: MessagesBody, drawn_seed: int) -> Prompt:
    """The body as a Prompt. Raises Refusal."""
    _refuse_unserved(asked)
    if asked.thinking is not None and (asked.thinking.budget_tokens or 0) >= asked.max_tokens:
        raise bad_input(f"'{BUDGET}' is not below 'max_tokens', which bounds thoughts and text together", BUDGET)
    prompt = messages_prompt(asked)
    sampling = SamplingParams(
        temperature=TEMPERATURE_DEFAULT if asked.temperature is None else asked.temperature,
        top_k=asked.top_k or 0,
        top_p=1.0 if asked.top_p is None else max(asked.top_p, TOP_P_MIN),
        seed=seed_of(None, drawn_seed),
    )
    return replace(
        prompt,
        sampling=sampling,
        max_tokens=asked.max_tokens,
        stop=list(asked.stop_sequences or ()),
        stream=bool(asked.stream),
        user=None if asked.metadata is None else asked.metadata.user_id,
    )


def messages_prompt(asked: CountTokensBody) -> Prompt:
    """What the model reads, and what it may answer, with nothing said of how it is sampled. Raises Refusal."""
    refuse_field("speed", None if asked.speed == "standard" else asked.speed, "there is one speed; leave it out")
    if asked.thread is not None:
        raise no_threads()
    output = asked.output_config or OutputConfig()
    constraint = (
        UNCONSTRAINED
        if output.format is None
        else schema_constraint(output.format.schema, "output_config.format.schema")
    )
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or ())]
    told, choice = select_tools(tool_definitions(tools), _choice(asked.tool_choice))
    return Prompt(
        messages=messages_turns(asked),
        tools=told,
        tool_choice=choice,
        parallel_calls=asked.tool_choice is None or not asked.tool_choice.disable_parallel_tool_use,
        strict_calls=strict(tools),
        template_options=template_options(_thinking(asked.thinking), output.effort),
        grammar=constraint.grammar,
        grammar_field=constraint.field,
        json=constraint.json,
        sampling=SamplingParams(),
        stop=[],
        field_names=FIELD_NAMES,
    )


def messages_turns(asked: CountTokensBody) -> list[dict[str, Any]]:
    """The conversation as a chat template reads it. Raises Refusal."""
    if asked.messages[-1].role == "assistant":
        advice = "an assistant's turn is not continued here; end with a user's"
        raise bad_input(f"'messages' end with the role 'assistant'; {advice}", "messages")
    conversation = ConversationBuilder()
    if asked.system:
        conversation.say("system", _text(asked.system))
    for role, messages in groupby(enumerate(asked.messages), key=lambda one: one[1].role):
        texts: dict[int, str] = {}  # by message: those in a row are one text
        for i, message in messages:
            for j, block in enumerate(_blocks(message)):
                if isinstance(block, TextBlock):
                    texts[i] = texts.get(i, "") + block.text
                    continue
                if texts:
                    conversation.say(role, BETWEEN_MESSAGES.join(texts.values()))
                    texts = {}
                _add(conversation, role, block, f"messages[{i}].content[{j}]")
        if texts:
            conversation.say(role, BETWEEN_MESSAGES.join(texts.values()))
    return conversation.turns


def _blocks(message: MessageParam) -> list[MessageBlock]:
    return [TextBlock(message.content)] if isinstance(message.content, str) else message.content


def _add(
    conversation: ConversationBuilder, role: str, block: ToolUseBlock | ToolResultBlock | ThinkingBlock, place: str
) -> None:
    whose = "user" if isinstance(block, ToolResultBlock) else "assistant"
    if role != whose:
        raise bad_input(f"'{place}': a block of this type belongs to a turn of role '{whose}'", place)
    match block:
        case ToolUseBlock():
            conversation.call(block.id, block.name, block.input, place)
        case ToolResultBlock():
            text = _text(block.content or "")
            conversation.result(block.tool_use_id, f"Error: {text}" if block.is_error else text, f"{place}.tool_use_id")
        case ThinkingBlock():
            conversation.think(block.thinking)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tool(tool: MessagesTool, place: str) -> AnyTool:
    refuse_field(f"{place}.defer_loading", tool.defer_loading or None, "all tools are loaded; leave it out")
    refuse_field(f"{place}.input_examples", tool.input_examples or None, "give examples in 'description'")
    return AnyTool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice(asked: ToolChoice | None) -> ToolChoiceField | None:
    if asked is None:
        return None
    if (asked.name is None) == (asked.type == "tool"):
        raise bad_input("'tool_choice.name' goes with the type 'tool', and the type with it", "tool_choice.name")
    match asked.type:
        case "tool":
            return ChosenTool(name=asked.name)
        case "any":
            return "required"
        case _:
            return asked.type


def _thinking(asked: Thinking | None) -> dict[str, Any]:
    if asked is None:
        return {}
    if (asked.budget_tokens is None) == (asked.type == "enabled"):
        raise bad_input(f"'{BUDGET}' goes with the type 'enabled', and the type with it", BUDGET)
    return {} if asked.type == "adaptive" else {"enable_thinking": asked.type == "enabled"}


def _refuse_unserved(asked: MessagesBody) -> None:
    tier = None if asked.service_tier in ("auto", "standard_only") else asked.service_tier
    refuse_field("service_tier", tier, "send 'auto' or 'standard_only'")
    refuse_field("inference_geo", asked.inference_geo, "where it runs is a setting of the account; leave it out")
    refuse_field("container", asked.container, "there are no containers; leave it out")
    refuse_field("diagnostics", asked.diagnostics, "leave it out")


class MessagesDialect:
    """The dialect of `/v1/messages`."""

    def __init__(self) -> None:
        self._paddings = sse.paddings()

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
        assert model is None, "the body names the model"
        asked = decode_body(body, _decoder)
        prompt = parse(asked, drawn_seed)
        omitted = asked.thinking is not None and asked.thinking.display == "omitted"
        return GenerationRequest(
            asked.model,
            prompt,
            lambda model, id, _: MessagesReply(model, id, self._paddings, shows_thoughts=not omitted),
        )


class CountTokensDialect:
    """The dialect of `/v1/messages/count_tokens`."""

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> TokenCountRequest:
        asked = decode_body(body, _asking_decoder)
        return TokenCountRequest(
            asked.model, messages_prompt(asked), lambda tokens: msgspec.json.encode({"input_tokens": tokens})
        )
