"""OpenAI's Responses: a body to a Prompt. Its items are read in `responses_items`; the answer is made in
`responses_response`.

Nothing is stored: a conversation is sent whole each time. It does not know accounts, replicas or sockets.
"""

from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from engine.protocol.types import SamplingParams
from gateway.api.body_fields import (
    LOGPROBS_MAX,
    MESSAGES_MAX,
    TEMPERATURE_DEFAULT,
    TOP_P_MIN,
    MaxTokens,
    Metadata,
    MinTokens,
    Probability,
    ReasoningEffort,
    ShortText,
    Stop,
    prompt_constraint,
    refuse_field,
    refuse_unless,
    stop_strings,
    template_options,
)
from gateway.api.dialect import GenerationRequest, TokenCountRequest
from gateway.api.responses_items import Item, item_images, item_turns
from gateway.api.responses_response import ResponsesReply
from gateway.api.tool_fields import (
    TOOLS_MAX,
    Allowed,
    AllowedTool,
    ChosenTool,
    Function,
    ToolChoiceField,
    ToolName,
    prompt_tools,
)
from gateway.api.tool_fields import Tool as AnyTool
from gateway.errors import bad_input
from gateway.http.json_body import decode_body
from gateway.inference.prompt import Prompt, left_to_model
from gateway.inference.response_format import UNCONSTRAINED, ResponseConstraint, schema_constraint

FIELD_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
STORED: Final = "nothing is stored here; send the whole conversation in 'input'"
WHOLE: Final = "reasoning is answered whole; leave it out"


class ResponsesTool(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A function. Its arguments follow `parameters` where a call is required or `strict` is set."""

    type: Literal["function"]
    name: ToolName
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None
    async_: bool | None = msgspec.field(default=None, name="async")


class NamedFunction(msgspec.Struct, frozen=True, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: ToolName


class AllowedTools(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """The model sees these of the tools alone."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1, max_length=TOOLS_MAX)]


ResponsesToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools


class PlainText(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObject(msgspec.Struct, frozen=True, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    pass


class JsonSchema(
    msgspec.Struct, frozen=True, tag_field="type", tag="json_schema", omit_defaults=True, forbid_unknown_fields=True
):
    """The answer follows `schema`, whether `strict` is set or not."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: PlainText | JsonObject | JsonSchema | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`effort` goes to the chat template. Reasoning is answered whole, as text; a summary is made by none."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_obfuscation false leaves the padding out."""

    include_obfuscation: bool | None = None


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponsesFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model reads: the fields of a count. Fields below `reasoning` are refused where they ask for something."""

    model: ShortText
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MESSAGES_MAX)]
    instructions: str | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: str | None = None
    previous_response_id: Any = None
    conversation: Any = None


class InputTokensBody(ResponsesFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a count. `personality` is refused."""

    personality: Any = None


class ResponsesBody(ResponsesFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field of Responses. From `store` on they are refused where they ask for something.

    `metadata`, `safety_identifier` and `prompt_cache_key` are labels: the answer repeats them, they change nothing.
    The cache is always the account's own. Reasoning is sent back as text, without `encrypted_content`. `stop`,
    `min_tokens` and `ignore_eos` are vLLM's.
    """

    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    include: list[Include] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: Metadata | None = None
    user: ShortText | None = None
    stop: Stop | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    background: bool | None = None
    background_options: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    context_management: Any = None
    access_programs: Any = None
    image: Any = None


_decoder: Final = msgspec.json.Decoder(ResponsesBody)
_count_decoder: Final = msgspec.json.Decoder(InputTokensBody)


def parse(body: ResponsesBody, drawn_seed: int) -> Prompt:
    """The body as a Prompt. Raises ApiError."""
    _refuse_unserved(body)
    scored = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs and not scored:
        raise bad_input("'top_logprobs' goes with 'include': ['message.output_text.logprobs']", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad_input("'stream_options' goes with 'stream': true only; leave it out", "stream_options")
    return msgspec.structs.replace(
        responses_prompt(body),
        sampling=SamplingParams(
            temperature=TEMPERATURE_DEFAULT if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else max(body.top_p, TOP_P_MIN),
            seed=drawn_seed,
            logprobs=(body.top_logprobs or 0) if scored else None,
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
        ),
        left_to_model=left_to_model(temperature=body.temperature, top_p=body.top_p),
        stop=stop_strings(body.stop),
        max_tokens=body.max_output_tokens,
        stream=bool(body.stream),
        padded=body.stream_options is None or body.stream_options.include_obfuscation is not False,
        user=body.user,
    )


def responses_prompt(body: ResponsesFields) -> Prompt:
    """The model's input, and what it may answer, without its sampling. Raises ApiError."""
    refuse_unless("truncation", body.truncation, ("disabled",), "shorten 'input' yourself")
    refuse_field("previous_response_id", body.previous_response_id, STORED)
    refuse_field("conversation", body.conversation, STORED)
    text, reasoning = body.text or TextConfig(), body.reasoning or Reasoning()
    refuse_unless("text.verbosity", text.verbosity, ("medium",), "ask for it in 'instructions'")
    refuse_unless("reasoning.summary", reasoning.summary, ("auto",), WHOLE)
    refuse_unless("reasoning.generate_summary", reasoning.generate_summary, ("auto",), WHOLE)
    refuse_unless("reasoning.context", reasoning.context, ("auto",), "the chat template decides; leave it out")
    refuse_unless("reasoning.mode", reasoning.mode, ("standard",), "leave it out")
    constraint = _constraint(text.format)
    messages = item_turns(body.instructions, body.input)
    options = template_options(None, reasoning.effort)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    return Prompt(
        messages=messages,
        images=item_images(body.input),
        template_options=options,
        field_names=FIELD_NAMES,
        **prompt_constraint(constraint),
        **prompt_tools(tools, _choice(body.tool_choice), body.parallel_tool_calls),
    )


def _refuse_unserved(body: ResponsesBody) -> None:
    refuse_unless("store", body.store, (False,), "nothing is stored; send false, or leave it out")
    refuse_unless("service_tier", body.service_tier, ("auto", "default"), "leave it out")
    refuse_unless("prompt_cache_retention", body.prompt_cache_retention, ("in_memory",), "leave it out")
    refuse_unless("prompt_cache_options", body.prompt_cache_options, ({"mode": "implicit"},), "leave it out")
    refuse_unless("background", body.background, (False,), "wait for the answer, or stream it")
    refuse_field("background_options", body.background_options, "wait for the answer, or stream it")
    refuse_field("prompt", body.prompt, "send its text in 'instructions' or 'input'")
    refuse_field("max_tool_calls", body.max_tool_calls, "there are no built-in tools; leave it out")
    refuse_unless("context_management", body.context_management, ([],), "shorten 'input' yourself")
    for field in ("moderation", "access_programs", "image"):
        refuse_field(field, getattr(body, field), "leave it out")


def _tool(tool: ResponsesTool, place: str) -> AnyTool:
    refuse_field(f"{place}.defer_loading", tool.defer_loading or None, "all tools are loaded; leave it out")
    refuse_field(f"{place}.output_schema", tool.output_schema, "say in 'description' what the function gives")
    refuse_field(f"{place}.async", tool.async_ or None, "leave it out")
    return AnyTool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))


def _choice(choice: ResponsesToolChoice | None) -> ToolChoiceField | None:
    match choice:
        case NamedFunction(name):
            return ChosenTool(name=name)
        case AllowedTools(mode, allowed):
            tools = [AllowedTool(name=tool.name) for tool in allowed]
            return ChosenTool("allowed_tools", allowed_tools=Allowed(mode, tools))
        case _:
            return choice


def _constraint(format: PlainText | JsonObject | JsonSchema | None) -> ResponseConstraint:
    match format:
        case JsonObject():
            return schema_constraint({"type": "object"}, "text.format")
        case JsonSchema():
            return schema_constraint(format.schema, "text.format.schema")
        case _:
            return UNCONSTRAINED


def echo_fields(body: ResponsesBody) -> dict[str, Any]:
    """The fields of the request that the answer repeats, with the defaults of others; null is left to the model."""
    text, reasoning = body.text or TextConfig(), body.reasoning or Reasoning()
    return {
        "instructions": body.instructions,
        "tools": msgspec.to_builtins(body.tools or []),
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": msgspec.to_builtins(text.format or PlainText()), "verbosity": "medium"},
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "service_tier": "default",
        "truncation": "disabled",
    }


def read_responses(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
    """The dialect of `/v1/responses`."""
    assert model is None, "the body names the model"
    request = decode_body(body, _decoder)
    prompt = parse(request, drawn_seed)
    return GenerationRequest(request.model, prompt, partial(ResponsesReply, echo_fields(request), prompt))


def read_input_tokens(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> TokenCountRequest:
    """The dialect of `/v1/responses/input_tokens`."""
    request = decode_body(body, _count_decoder)
    refuse_field("personality", request.personality, "say it in 'instructions'")
    return TokenCountRequest(request.model, responses_prompt(request), {"object": "response.input_tokens"})
