"""Anthropic's Messages: a body with blocks to a Prompt. The answer is made in `messages_response`.

It does not know accounts, replicas or sockets.
"""

from itertools import groupby
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.protocol.types import SamplingParams
from gateway.api.body_fields import (
    MESSAGES_MAX,
    STOPS_MAX,
    TEMPERATURE_DEFAULT,
    TOP_P_MIN,
    MaxTokens,
    Probability,
    ReasoningEffort,
    ShortText,
    StopString,
    TopK,
    prompt_constraint,
    refuse_field,
    refuse_unless,
    template_options,
)
from gateway.api.conversation import ConversationBuilder
from gateway.api.dialect import GenerationRequest, TokenCountRequest
from gateway.api.messages_response import MessagesReply
from gateway.api.tool_fields import (
    TOOLS_MAX,
    ChosenTool,
    Function,
    ToolChoiceField,
    ToolName,
    prompt_tools,
)
from gateway.api.tool_fields import Tool as AnyTool
from gateway.errors import bad_input, no_threads
from gateway.http.json_body import decode_body
from gateway.images.source import ImageSource, check_count, from_base64, from_data_uri
from gateway.inference.prompt import Prompt, left_to_model
from gateway.inference.response_format import UNCONSTRAINED, schema_constraint

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


class Base64Source(msgspec.Struct, frozen=True, tag_field="type", tag="base64", forbid_unknown_fields=True):
    data: str
    media_type: Annotated[str, Meta(max_length=64)]


class UrlSource(msgspec.Struct, frozen=True, tag_field="type", tag="url", forbid_unknown_fields=True):
    """A data: URI; no address is fetched."""

    url: str


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image", forbid_unknown_fields=True):
    """An image of a user's turn."""

    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None


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


MessageBlock = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock


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


def parse(body: MessagesBody, drawn_seed: int) -> Prompt:
    """The body as a Prompt. Raises ApiError."""
    refuse_unless("service_tier", body.service_tier, ("auto", "standard_only"), "send 'auto' or 'standard_only'")
    refuse_field("inference_geo", body.inference_geo, "where it runs is a setting of the account; leave it out")
    refuse_field("container", body.container, "there are no containers; leave it out")
    refuse_field("diagnostics", body.diagnostics, "leave it out")
    if body.thinking is not None and (body.thinking.budget_tokens or 0) >= body.max_tokens:
        raise bad_input(f"'{BUDGET}' is not below 'max_tokens', which bounds thoughts and text together", BUDGET)
    return msgspec.structs.replace(
        messages_prompt(body),
        sampling=SamplingParams(
            temperature=TEMPERATURE_DEFAULT if body.temperature is None else body.temperature,
            top_k=body.top_k or 0,
            top_p=1.0 if body.top_p is None else max(body.top_p, TOP_P_MIN),
            seed=drawn_seed,
        ),
        left_to_model=left_to_model(temperature=body.temperature, top_k=body.top_k, top_p=body.top_p),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or [],
        stream=bool(body.stream),
        user=None if body.metadata is None else body.metadata.user_id,
    )


def messages_prompt(body: CountTokensBody) -> Prompt:
    """The model's input, and what it may answer, without its sampling. Raises ApiError."""
    refuse_unless("speed", body.speed, ("standard",), "there is one speed; leave it out")
    if body.thread is not None:
        raise no_threads()
    output, choice = body.output_config or OutputConfig(), body.tool_choice
    constraint = UNCONSTRAINED
    if output.format is not None:
        constraint = schema_constraint(output.format.schema, "output_config.format.schema")
    messages = messages_turns(body)
    options = template_options(_thinking(body.thinking), output.effort)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    return Prompt(
        messages=messages,
        images=messages_images(body),
        template_options=options,
        field_names=FIELD_NAMES,
        **prompt_constraint(constraint),
        **prompt_tools(tools, _choice(choice), choice is None or not choice.disable_parallel_tool_use),
    )


def messages_turns(body: CountTokensBody) -> list[dict[str, Any]]:
    """The conversation as a chat template reads it. Raises ApiError."""
    if body.messages[-1].role == "assistant":
        advice = "an assistant's turn is not continued here; end with a user's"
        raise bad_input(f"'messages' end with the role 'assistant'; {advice}", "messages")
    conversation = ConversationBuilder()
    if body.system:
        conversation.add_text("system", _text(body.system))
    for role, messages in groupby(enumerate(body.messages), key=lambda placed: placed[1].role):
        pieces: list[tuple[int, str | None]] = []  # a message's number and a text of it, or None for an image
        for i, message in messages:
            for j, block in enumerate(_blocks(message)):
                place = f"messages[{i}].content[{j}]"
                if isinstance(block, TextBlock):
                    pieces.append((i, block.text))
                elif isinstance(block, ImageBlock):
                    _require_owner(role, "user", place)
                    pieces.append((i, None))
                else:
                    _add_content(conversation, role, pieces)
                    pieces = []
                    _add(conversation, role, block, place)
        _add_content(conversation, role, pieces)
    return conversation.turns


def messages_images(body: CountTokensBody) -> tuple[ImageSource, ...]:
    """The images of the conversation, in their order. Raises ApiError."""
    places = [
        (block.source, f"messages[{i}].content[{j}].source")
        for i, message in enumerate(body.messages)
        for j, block in enumerate(_blocks(message))
        if isinstance(block, ImageBlock)
    ]
    check_count([place for _, place in places])
    return tuple(
        from_base64(source.data, source.media_type, f"{place}.data")
        if isinstance(source, Base64Source)
        else from_data_uri(source.url, f"{place}.url")
        for source, place in places
    )


def _add_content(conversation: ConversationBuilder, role: str, pieces: list[tuple[int, str | None]]) -> None:
    """Adds texts and images that follow each other: messages of one role in a row are one turn, with an empty line
    between their texts."""
    parts: list[dict[str, str]] = []
    for index, (message, text) in enumerate(pieces):
        between = BETWEEN_MESSAGES if index and pieces[index - 1][0] != message else ""
        if text is None:
            parts.append({"type": "image"})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += between + text
        else:
            parts.append({"type": "text", "text": between + text})
    if any(text is None for _, text in pieces):
        conversation.add_parts(role, parts)
    elif parts:
        conversation.add_text(role, parts[0]["text"])


def _blocks(message: MessageParam) -> list[MessageBlock]:
    return [TextBlock(message.content)] if isinstance(message.content, str) else message.content


def _add(
    conversation: ConversationBuilder, role: str, block: ToolUseBlock | ToolResultBlock | ThinkingBlock, place: str
) -> None:
    _require_owner(role, "user" if isinstance(block, ToolResultBlock) else "assistant", place)
    match block:
        case ToolUseBlock():
            conversation.add_call(block.id, block.name, block.input, place)
        case ToolResultBlock():
            text = _text(block.content or "")
            conversation.add_result(
                block.tool_use_id, f"Error: {text}" if block.is_error else text, f"{place}.tool_use_id"
            )
        case ThinkingBlock():
            conversation.add_reasoning(block.thinking)


def _require_owner(role: str, owner: str, place: str) -> None:
    if role != owner:
        raise bad_input(f"'{place}': a block of this type belongs to a turn of role '{owner}'", place)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tool(tool: MessagesTool, place: str) -> AnyTool:
    refuse_field(f"{place}.defer_loading", tool.defer_loading or None, "all tools are loaded; leave it out")
    refuse_field(f"{place}.input_examples", tool.input_examples or None, "give examples in 'description'")
    return AnyTool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice(choice: ToolChoice | None) -> ToolChoiceField | None:
    if choice is None:
        return None
    if (choice.name is None) == (choice.type == "tool"):
        raise bad_input("'tool_choice.name' goes with the type 'tool', and the type with it", "tool_choice.name")
    match choice.type:
        case "tool":
            return ChosenTool(name=choice.name)
        case "any":
            return "required"
        case _:
            return choice.type


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    if thinking is None:
        return {}
    if (thinking.budget_tokens is None) == (thinking.type == "enabled"):
        raise bad_input(f"'{BUDGET}' goes with the type 'enabled', and the type with it", BUDGET)
    return {} if thinking.type == "adaptive" else {"enable_thinking": thinking.type == "enabled"}


def read_messages(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
    """The dialect of `/v1/messages`."""
    assert model is None, "the body names the model"
    request = decode_body(body, _decoder)
    prompt = parse(request, drawn_seed)
    shows_thoughts = request.thinking is None or request.thinking.display != "omitted"
    return GenerationRequest(
        request.model,
        prompt,
        lambda model, id, _, paddings: MessagesReply(model, id, paddings, shows_thoughts=shows_thoughts),
    )


def read_count_tokens(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> TokenCountRequest:
    """The dialect of `/v1/messages/count_tokens`."""
    request = decode_body(body, _asking_decoder)
    return TokenCountRequest(request.model, messages_prompt(request))
