"""Messages as bodies of OpenAI's kind and native bodies have them, and the turns that a chat template reads.

It does not know sampling or answers.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway import errors
from gateway.api.body_fields import MESSAGES_MAX, ShortText
from gateway.api.tool_fields import SCHEMA_DEPTH_MAX, Tool
from gateway.errors import bad_input
from gateway.http.json_body import check_depth
from gateway.images.source import ImageSource, check_count, from_base64, from_bytes, from_data_uri


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image as a data: URI in base64: no address is fetched. `detail` changes nothing: a model sees images at
    sizes of its own."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of a message's content: a text, or in a user's message an image."""

    type: Literal["text", "image_url", "input_audio", "file", "refusal"]
    text: str | None = None
    image_url: ImageUrl | str | None = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`function` of a tool call: arguments as a JSON string (OpenAI) or as an object (native)."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call in an assistant's turn, flat (native) or as `function` (OpenAI)."""

    id: ShortText | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: Call | None = None
    name: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    arguments: str | dict[str, Any] | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. What follows `reasoning_content` are fields that SDKs send back in an assistant's turn, empty here."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: Annotated[str, Meta(max_length=128)] | None = None
    tool_call_id: ShortText | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]


def run_messages(
    prompt: str | None, messages: list[Message] | None, raw: bool | None, tools: Sequence[Tool] | None
) -> list[dict[str, Any]] | None:
    """The turns of a body of `/ai/run`; None where it has a prompt in their place. Raises ApiError for none, and for
    both, and for what goes with one of them only."""
    if (prompt is None) == (messages is None):
        matches = 0 if prompt is None else 2
        raise bad_input(f"oneOf at '/' not met, {matches} matches: send either 'prompt' or 'messages'", "prompt")
    if raw and messages is not None:
        raise bad_input("'raw' skips the chat template and goes with 'prompt' only; leave it out", "raw")
    turns = None if messages is None else chat_messages(messages)
    if tools and turns is None:
        raise bad_input("'tools' go with 'messages' only; send the prompt as a user's message", "tools")
    return turns


def refuse_lora(lora: object) -> None:
    """Raises ApiError where an adapter is named."""
    if lora is not None:
        raise errors.no_adapters()


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The turns as a chat template reads them. Raises ApiError for content that is neither text nor an image."""
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def chat_images(messages: Sequence[Message]) -> tuple[ImageSource, ...]:
    """The images of messages, in their order. Raises ApiError."""
    places = [
        (part.image_url, f"messages[{i}].content[{j}].image_url")
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if part.image_url is not None
    ]
    check_count([place for _, place in places])
    return tuple(from_data_uri(image if isinstance(image, str) else image.url, place) for image, place in places)


def native_image(image: str | list[int]) -> ImageSource:
    """`image` of a native body: bytes, or these in base64, by themselves or as a data: URI. Raises ApiError."""
    if isinstance(image, list):
        return from_bytes(bytes(image), None, "image")
    return from_data_uri(image, "image") if image[:5].lower() == "data:" else from_base64(image, None, "image")


def with_image(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with one image more, before what the last of them says, which is the user's. Raises ApiError."""
    *earlier, last = turns
    if last["role"] != "user" or isinstance(last["content"], list):
        advice = "end 'messages' with a user's text, or send all images in 'messages'"
        raise bad_input(f"'image' belongs to the last message; {advice}", "image")
    parts = [{"type": "image"}, {"type": "text", "text": last["content"]}]
    return [*earlier, {**last, "content": parts}]


def _turn(message: Message, place: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _content(message, f"{place}.content")}
    if message.tool_calls:
        if role != "assistant":
            raise bad_input(f"'{place}.tool_calls' belongs to an assistant's turn; leave it out", f"{place}.tool_calls")
        turn["tool_calls"] = [tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    elif message.content is None:
        raise bad_input(f"'{place}.content' is missing; give the turn a text", f"{place}.content")
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _content(message: Message, place: str) -> str | list[dict[str, str]]:
    """A text, or where there is an image the parts."""
    content = message.content
    if not isinstance(content, list):
        return content or ""
    for i, part in enumerate(content):
        if part.type == "image_url" and part.image_url is not None and message.role == "user":
            continue
        if part.type == "image_url":
            problem = "an image has an 'image_url' and belongs to a user's turn"
            raise bad_input(f"'{place}[{i}]': {problem}", f"{place}[{i}]")
        if part.type != "text" or part.text is None or part.image_url is not None:
            advice = "only parts of type 'text' and 'image_url' are supported; send one of these"
            raise bad_input(f"'{place}[{i}]': {advice}", f"{place}[{i}]")
    if all(part.type == "text" for part in content):
        return "".join(part.text or "" for part in content)
    return [
        {"type": "image"} if part.type == "image_url" else {"type": "text", "text": part.text or ""} for part in content
    ]


def tool_call(call: ToolCall, place: str) -> dict[str, Any]:
    """A call as chat templates read it, its arguments an object. Raises ApiError."""
    function = call.function or call
    arguments = function.arguments
    if (call.function is None) == (call.name is None):
        raise bad_input(f"'{place}' needs either 'function' or 'name' and 'arguments'", place)
    if isinstance(arguments, str) and arguments:
        try:
            arguments = msgspec.json.decode(arguments)
        except (ValueError, RecursionError):
            raise bad_input(f"'{place}': the arguments are no JSON; send them as they came", place) from None
    check_depth(arguments, place, SCHEMA_DEPTH_MAX)
    whole = {"type": "function", "function": {"name": function.name, "arguments": arguments or {}}}
    return whole if call.id is None else {"id": call.id, **whole}
