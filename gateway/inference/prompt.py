"""What a caller asks of a text model, checked and in one shape whichever dialect it came in.

It does not know JSON paths, accounts or replicas; the dialects make it, `generate` serves it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.protocol.types import Grammar, SamplingParams
from gateway.errors import bad_input
from gateway.http.json_body import check_depth
from gateway.inference.run_options import RunOptionsBody
from gateway.tool_parsers.types import ToolSelection

CHOICES_MAX: Final = 128
STOPS_MAX: Final = 4
BIASES_MAX: Final = 300
MESSAGES_MAX: Final = 4096
TOOLS_MAX: Final = 128
TOOLS_BYTES_MAX: Final = 128 << 10
SCHEMA_DEPTH_MAX: Final = 16
TEMPLATE_OPTIONS_MAX: Final = 16
TEMPLATE_OPTIONS_BYTES_MAX: Final = 4096
TEMPLATE_OPTIONS_DEPTH_MAX: Final = 4
LOGPROBS_MAX: Final = 20
SEED_BITS: Final = 62  # choice i samples with seed + i, and the sum stays below 2**63

StopString = Annotated[str, Meta(min_length=1, max_length=64)]
_IDS: Final = {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}}  # which JSON Schema cannot tell from a type
Stop = StopString | Annotated[list[StopString], Meta(max_length=STOPS_MAX)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=BIASES_MAX, extra_json_schema=_IDS)
]
MaxTokens = Annotated[int, Meta(ge=1, le=1 << 24)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=1, le=50)]
ShortText = Annotated[str, Meta(max_length=512)]
ToolName = Annotated[str, Meta(pattern="^[A-Za-z0-9_.:/-]{1,128}$")]
TemplateOptions = Annotated[dict[Annotated[str, Meta(max_length=64)], Any], Meta(max_length=TEMPLATE_OPTIONS_MAX)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)]


def only(*served: object) -> Meta:
    """Says in schemas of a field that it takes these alone; the dialect refuses all others by name."""
    return Meta(extra_json_schema={"enum": list(served)})


AUTO: Final = ToolSelection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request that cannot be wrong, short of what only the model knows: its vocabulary and its context.

    Exactly one of `text`, `messages` and `ids` is set. `raw` text skips the chat template; `ids` are tokens.
    `user` is the caller's own word for whom it asks; it may keep cached prefixes apart, and is kept nowhere.
    `messages` and `tools` are what a chat template reads: role, content (str), tool_calls, tool_call_id, name; so are
    `template_options`, its further variables. `parallel_calls` allows several calls in one answer; with `strict_calls`
    their arguments are held to the tools' schemas even where the model need not call any.
    `grammar` is what the answer's text must be, and `grammar_field` the field that says so; `json`: it is a document.
    `max_tokens` None is as many as the model's catalogue entry gives. `field_names` are the dialect's for fields that
    may turn out to be wrong later, where they are not those of chat completions.
    `options` are what the body says of how the call is run, where it has a place for that.
    """

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    raw: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolSelection = AUTO
    parallel_calls: bool = True
    strict_calls: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    grammar_field: str = "response_format"
    json: bool = False
    sampling: SamplingParams
    max_tokens: int | None = None
    n: int = 1
    stop: list[str]
    stream: bool = False
    include_usage: bool = False
    padded: bool = True
    options: RunOptionsBody | None = None
    user: str | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)

    def field_name(self, field: str) -> str:
        """What the caller's dialect calls a field of chat completions."""
        return self.field_names.get(field, field)

    @property
    def length(self) -> int:
        """Characters of text in it, those of tools and calls left out."""
        if self.messages is None:
            return len(self.text or "")
        return sum(len(message["content"]) for message in self.messages)

    @property
    def bulk(self) -> int:
        """Characters that the template may lay out: of text, and of tools as JSON."""
        return self.length + (len(msgspec.json.encode(self.tools)) if self.tools else 0)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of a message's content; only text is served."""

    type: Literal["text", "image_url", "input_audio", "file", "refusal"]
    text: str | None = None
    image_url: Any = None
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


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool, flat (native) or as `function` (OpenAI)."""

    type: Literal["function"] | None = None
    function: Function | None = None
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
Tools = Annotated[list[Tool], Meta(max_length=TOOLS_MAX)]


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The turns as a chat template reads them. Raises Refusal for content that is not text."""
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def tool_definitions(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's shape, which chat templates read; None where there are none. Raises Refusal."""
    if not tools:
        return None
    whole = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in whole]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise bad_input(f"'tools[{i}]': {name!r} is there twice; give each tool a name of its own", f"tools[{i}]")
    if len(msgspec.json.encode(whole)) > TOOLS_BYTES_MAX:
        raise bad_input(f"'tools' has more than {TOOLS_BYTES_MAX} bytes; shorten the schemas", "tools")
    return whole


def strict(tools: Sequence[Tool] | None) -> bool:
    """Whether one of them asks that its arguments be held to its schema."""
    return any(tool.strict or (tool.function is not None and tool.function.strict) for tool in tools or ())


def template_options(kwargs: dict[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """What is beside the messages for a chat template; which of it a model's knows is seen later. Raises Refusal."""
    options = {} if kwargs is None else kwargs
    check_depth(options, "chat_template_kwargs", TEMPLATE_OPTIONS_DEPTH_MAX)
    if len(msgspec.json.encode(options)) > TEMPLATE_OPTIONS_BYTES_MAX:
        problem = f"has more than {TEMPLATE_OPTIONS_BYTES_MAX} bytes; shorten it"
        raise bad_input(f"'chat_template_kwargs' {problem}", "chat_template_kwargs")
    if reasoning_effort is None:
        return options
    if "reasoning_effort" in options:
        raise bad_input("'reasoning_effort' is given twice; leave it out of 'chat_template_kwargs'", "reasoning_effort")
    return {**options, "reasoning_effort": reasoning_effort}


def stops(stop: Stop | None) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)


def max_tokens_of(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    """OpenAI's two words for one limit. Raises Refusal where both are used."""
    if max_tokens is not None and max_completion_tokens is not None:
        raise bad_input("'max_tokens' and 'max_completion_tokens' say the same; send one", "max_completion_tokens")
    return max_tokens or max_completion_tokens


def seed_of(asked: int | None, drawn: int) -> int:
    """The caller's seed where there is one, folded into what a frame holds; else the one drawn for it."""
    return (drawn if asked is None else asked) & ((1 << SEED_BITS) - 1)


def check_same_model(said: str | None, named: str) -> None:
    """Raises Refusal where the body names another model than the path does."""
    if said is not None and said != named:
        raise bad_input("'model' differs from the model in the path; leave it out", "model")


def refuse_field(field: str, asked: object, advice: str) -> None:
    """Raises Refusal where a field of the wider API is used that is not served; it is never silently ignored."""
    if asked is not None:
        raise bad_input(f"'{field}' is not supported here; {advice}", field)


def _turn(message: Message, place: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _text(message.content, f"{place}.content")}
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


def _text(content: str | list[Part] | None, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise bad_input(f"'{place}[{i}]': only parts of type 'text' are supported; send text", f"{place}[{i}]")
    return "".join(part.text for part in content if part.text is not None)


def tool_call(call: ToolCall, place: str) -> dict[str, Any]:
    """A call as chat templates read it, its arguments an object. Raises Refusal."""
    name, arguments = (
        (call.name, call.arguments) if call.function is None else (call.function.name, call.function.arguments)
    )
    if name is None or (call.function is not None and call.name is not None):
        raise bad_input(f"'{place}' needs either 'function' or 'name' and 'arguments'", place)
    if isinstance(arguments, str) and arguments:
        try:
            arguments = msgspec.json.decode(arguments)
        except (ValueError, RecursionError):
            raise bad_input(f"'{place}': the arguments are no JSON; send them as they came", place) from None
    check_depth(arguments, place, SCHEMA_DEPTH_MAX)
    whole = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    return whole if call.id is None else {"id": call.id, **whole}


def _tool(tool: Tool, place: str) -> dict[str, Any]:
    flat = tool.name is not None
    if flat == (tool.function is not None):
        raise bad_input(f"'{place}' needs either 'function' or 'name' with 'description' and 'parameters'", place)
    name = tool.name if flat else tool.function.name  # type: ignore[union-attr]
    description = tool.description if flat else tool.function.description  # type: ignore[union-attr]
    parameters = tool.parameters if flat else tool.function.parameters  # type: ignore[union-attr]
    check_depth(parameters, f"{place}.parameters", SCHEMA_DEPTH_MAX)
    function: dict[str, Any] = {"name": name, "description": description or ""}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
