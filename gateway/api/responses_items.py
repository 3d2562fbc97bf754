"""The items of OpenAI's Responses: messages, reasoning, calls of functions and what these gave become the turns that a
chat template reads, and their images.

It does not know the fields beside `input` and `instructions`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.api.conversation import ConversationBuilder
from gateway.api.tool_fields import ToolName
from gateway.errors import bad_input
from gateway.images.source import ImageSource, check_count, from_data_uri

Id = Annotated[str, Meta(max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class Breakpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a cache may cut. Every prefix is cached here in any case."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image", forbid_unknown_fields=True):
    """An image of a user's message as a data: URI in base64: no address is fetched, and no file is kept. `detail`
    changes nothing: a model sees images at sizes of its own."""

    image_url: str | None = None
    file_id: None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: Breakpoint | None = None


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """As an answer had it; what it had beside the text is not read."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class RefusalText(msgspec.Struct, frozen=True, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text", forbid_unknown_fields=True):
    text: str


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True):
    text: str


ContentPart = InputText | InputImage | OutputText | RefusalText | ReasoningText


class ResponsesDirectCaller(msgspec.Struct, frozen=True, tag_field="type", tag="direct", forbid_unknown_fields=True):
    """The caller of a tool is the model itself."""


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message, a call of a function, what it gave, or reasoning; without a `type` it is a message.

    `id`, `status`, `phase` and `caller` are taken as an answer had them, and change nothing.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    name: ToolName | None = None
    arguments: str | None = None
    call_id: Id | None = None
    output: str | list[InputText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: None = None
    id: Id | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    caller: ResponsesDirectCaller | None = None
    namespace: None = None
    parsed_arguments: Any = None


ANY_ITEM: Final = ("type", "id", "status")
# What an item of each type must have, and what it may have.
FIELDS: Final = {
    "message": (("role", "content"), ("phase",)),
    "function_call": (("call_id", "name", "arguments"), ("caller", "parsed_arguments")),
    "function_call_output": (("call_id", "output"), ("caller",)),
    "reasoning": ((), ("summary", "content")),
}


def item_turns(instructions: str | None, items: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation as a chat template reads it. Raises ApiError."""
    conversation = ConversationBuilder()
    if instructions:
        conversation.add_text("system", instructions)
    if isinstance(items, str):
        conversation.add_text("user", items)
        return conversation.turns
    for i, item in enumerate(items):
        _add(conversation, item, f"input[{i}]")
    if not conversation.turns:
        raise bad_input("'input' has no message; send one", "input")
    return conversation.turns


def item_images(items: str | Sequence[Item]) -> tuple[ImageSource, ...]:
    """The images of messages, in their order. Raises ApiError."""
    if isinstance(items, str):
        return ()
    places = [
        (part, f"input[{i}].content[{j}].image_url")
        for i, item in enumerate(items)
        for j, part in enumerate(_parts(item))
        if isinstance(part, InputImage)
    ]
    check_count([place for _, place in places])
    return tuple(from_data_uri(part.image_url or "", place) for part, place in places)


def _add(conversation: ConversationBuilder, item: Item, place: str) -> None:
    _check(item, place)
    match item.type:
        case "message" if _has_image(item):
            conversation.add_parts("user", [_turn_part(part) for part in _parts(item)])
        case "message":
            conversation.add_text(item.role or "", _text(item.content))
        case "reasoning":
            conversation.add_reasoning(_text(item.content) or _text(item.summary))
        case "function_call":
            conversation.add_call(item.call_id or "", item.name or "", item.arguments or "", place)
        case "function_call_output":
            conversation.add_result(item.call_id or "", _text(item.output), f"{place}.call_id")


def _check(item: Item, place: str) -> None:
    """Raises ApiError for what an item of its type lacks, or has too much."""
    needed, possible = FIELDS[item.type]
    for field in item.__struct_fields__:
        missing = getattr(item, field) is None
        if field in needed and missing:
            raise bad_input(f"'{place}.{field}' is missing; give it", f"{place}.{field}")
        if not missing and field not in (*needed, *possible, *ANY_ITEM):
            raise bad_input(f"'{place}.{field}' is not a field of a {item.type}; leave it out", f"{place}.{field}")
    if _has_image(item) and (item.type, item.role) != ("message", "user"):
        raise bad_input(f"'{place}.content': an image belongs to a user's message; leave it out", f"{place}.content")


def _parts(item: Item) -> list[ContentPart]:
    return item.content if isinstance(item.content, list) else []


def _has_image(item: Item) -> bool:
    return any(isinstance(part, InputImage) for part in _parts(item))


def _turn_part(part: ContentPart) -> dict[str, str]:
    return {"type": "image"} if isinstance(part, InputImage) else {"type": "text", "text": part.text}


def _text(content: str | Sequence[ContentPart] | Sequence[SummaryText] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content if not isinstance(part, InputImage))
