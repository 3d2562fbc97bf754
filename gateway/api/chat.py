"""Chat completions, OpenAI's and those of `/ai/run`: bodies to a Prompt, a completion to `chat.completion` or chunks.

It does not know accounts, replicas or sockets.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.api.body_fields import (
    CHOICES_MAX,
    LOGPROBS_MAX,
    MaxTokens,
    Probability,
    ReasoningEffort,
    SamplingFields,
    ShortText,
    StreamOptions,
    TemplateOptions,
    check_same_model,
    max_tokens_of,
    only,
    prompt_sampling,
    prompt_stream,
    refuse_field,
    refuse_unless,
    template_options,
)
from gateway.api.chunks import ChunkWriter, scored_token
from gateway.api.completions import CompletionsReply
from gateway.api.dialect import GenerationRequest
from gateway.api.message_fields import Messages, chat_images, chat_messages, refuse_lora, run_messages
from gateway.api.tool_fields import ToolChoiceField, Tools, prompt_tools
from gateway.errors import bad_input
from gateway.http.json_body import decode_body
from gateway.images.source import ImageSource
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, RunningUsage, ScoredToken, ToolUse, Usage
from gateway.inference.run_options import RunOptionsBody

_encode = msgspec.json.encode


class ChatFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of chat completions. Fields below `prompt_cache_key` are refused where they ask for something.

    `safety_identifier` and `prompt_cache_key` are labels: they change nothing and are not kept.
    The cache is always the account's own, so that a key of the caller's is not needed.
    """

    stream_options: StreamOptions | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    store: Annotated[bool, only(False)] | None = None
    service_tier: Annotated[str, only("auto", "default")] | None = None
    modalities: Annotated[list[str], only(["text"])] | None = None
    verbosity: Annotated[str, only("medium")] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    function_call: Any = None
    functions: Any = None
    lora: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    moderation: Any = None


class ChatBody(ChatFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat completion."""

    messages: Messages
    model: ShortText


class RunChatBody(ChatFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chat completion, where a prompt may stand in place of the messages; then the answer is a `text_completion`."""

    messages: Messages | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    raw: bool | None = None
    options: RunOptionsBody | None = None
    model: ShortText | None = None


_decoder: Final = msgspec.json.Decoder(ChatBody)
_run_decoder: Final = msgspec.json.Decoder(RunChatBody)


def chat_prompt(
    body: ChatFields,
    drawn_seed: int,
    *,
    text: str | None = None,
    messages: list[dict[str, Any]] | None,
    images: tuple[ImageSource, ...] = (),
    raw: bool = False,
    options: RunOptionsBody | None = None,
) -> Prompt:
    """What the fields ask for of the messages, or of the text. Raises ApiError."""
    _refuse_unserved(body)
    stream = prompt_stream(body.stream, body.stream_options)
    if body.top_logprobs and not body.logprobs:
        raise bad_input("'top_logprobs' goes with 'logprobs': true only; set it", "top_logprobs")
    return Prompt(
        text=text,
        messages=messages,
        images=images,
        raw=raw,
        template_options=template_options(body.chat_template_kwargs, body.reasoning_effort),
        max_tokens=max_tokens_of(body.max_tokens, body.max_completion_tokens),
        n=body.n or 1,
        options=options,
        **stream,
        **prompt_tools(body.tools, body.tool_choice, body.parallel_tool_calls),
        **prompt_sampling(
            body,
            drawn_seed,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
    )


def _refuse_unserved(body: ChatFields) -> None:
    refuse_unless("store", body.store, (False,), "nothing is stored; leave it out")
    refuse_unless("service_tier", body.service_tier, ("auto", "default"), "leave it out, or send 'auto' or 'default'")
    refuse_unless("modalities", body.modalities, (["text"],), "send ['text']")
    refuse_unless("verbosity", body.verbosity, ("medium",), "leave it out, or send 'medium'")
    for field in ("audio", "prediction", "web_search_options", "moderation", "prompt_cache_options"):
        refuse_field(field, getattr(body, field), "leave it out")
    in_memory = ("in_memory", "in-memory")
    refuse_unless("prompt_cache_retention", body.prompt_cache_retention, in_memory, "leave it out, or send 'in_memory'")
    refuse_field("function_call", body.function_call, "use 'tool_choice'")
    refuse_field("functions", body.functions, "use 'tools'")
    refuse_lora(body.lora)


class ChatReply:
    """`chat.completion`, or chunks: a role for each choice, contents, finishes, and the usage where asked for."""

    def __init__(
        self, prompt: Prompt, model: str, id: str, created: int, paddings: Iterator[bytes], *, enveloped: bool = False
    ) -> None:
        kinds = "chat.completion", "chat.completion.chunk"
        chunks = ChunkWriter(prompt, kinds, f"chatcmpl-{id}", created, model, paddings, enveloped=enveloped)
        self._choices = prompt.n
        self._chunks = chunks
        self.end, self.fail = chunks.end, chunks.fail
        self._contents = [chunks.head + b'{"index":%d,"delta":{"content":' % choice for choice in range(prompt.n)]
        self._rest = b'},"finish_reason":null}' + chunks.tail
        self._arguments: dict[int, bytes] = {}  # by choice, of the call that is being written
        self._called = b'}}]},"finish_reason":null}' + chunks.tail
        self._paddings = chunks.paddings
        self._last = chunks.last

    def begin(self, running: RunningUsage) -> bytes:
        role = {"role": "assistant", "content": ""}
        with self._chunks.beginning(running):
            return b"".join(self._chunk(choice, role, None) for choice in range(self._choices))

    def text(self, choice: int, text: str, logprobs: list[ScoredToken]) -> bytes:
        if logprobs:
            scored = {"content": [scored_token(token) for token in logprobs]}
            chunk = {"index": choice, "delta": {"content": text}, "logprobs": scored, "finish_reason": None}
            return self._chunks.event(_encode(chunk))
        if self._chunks.continuous:
            return self._chunk(choice, {"content": text}, None)
        return self._contents[choice] + _encode(text) + self._rest + next(self._paddings) + self._last

    def thought(self, choice: int, text: str) -> bytes:
        return self._chunk(choice, {"reasoning_content": text}, None)

    def call(self, choice: int, number: int, use: ToolUse) -> bytes:
        head = b'{"index":%d,"delta":{"tool_calls":[{"index":%d,"function":{"arguments":' % (choice, number)
        self._arguments[choice] = self._chunks.head + head
        return self._chunk(choice, {"tool_calls": [{"index": number, **_call(use)}]}, None)

    def arguments(self, choice: int, number: int, fragment: str) -> bytes:
        if self._chunks.continuous:
            return self._chunk(choice, {"tool_calls": [{"index": number, "function": {"arguments": fragment}}]}, None)
        return self._arguments[choice] + _encode(fragment) + self._called + next(self._paddings) + self._last

    def called(self, choice: int, number: int, use: ToolUse) -> bytes:
        return b""

    def finish(self, choice: int, reason: str, stopped_by: str | None) -> bytes:
        return self._chunk(choice, {}, reason)

    def whole(self, completions: list[Completion], usage: Usage) -> bytes:
        return self._chunks.body([_choice(i, completion) for i, completion in enumerate(completions)], usage)

    def _chunk(self, choice: int, delta: dict[str, Any], finish: str | None) -> bytes:
        return self._chunks.event(_encode({"index": choice, "delta": delta, "finish_reason": finish}))


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
    if completion.tool_uses:
        message["content"] = completion.text or None
        message["tool_calls"] = [_call(use) for use in completion.tool_uses]
    if completion.thought:
        message["reasoning_content"] = completion.thought
    logprobs = None
    if completion.logprobs is not None:
        logprobs = {"content": [scored_token(token) for token in completion.logprobs], "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": completion.finish}


def _call(use: ToolUse) -> dict[str, Any]:
    return {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.arguments}}


def read_chat(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
    """The dialect of `/v1/chat/completions`."""
    assert model is None, "the body names the model"
    request = decode_body(body, _decoder)
    messages, images = chat_messages(request.messages), chat_images(request.messages)
    prompt = chat_prompt(request, drawn_seed, messages=messages, images=images)
    return GenerationRequest(request.model, prompt, partial(ChatReply, prompt))


def read_run_chat(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
    """The dialect of `/ai/run` for models that take such bodies: the completion is the envelope's result."""
    assert model is not None, "the path names the model"
    request = decode_body(body, _run_decoder)
    check_same_model(request.model, model)
    prompt = chat_prompt(
        request,
        drawn_seed,
        text=request.prompt,
        messages=run_messages(request.prompt, request.messages, request.raw, request.tools),
        images=chat_images(request.messages or ()),
        raw=bool(request.raw),
        options=request.options,
    )
    if prompt.messages is not None:
        return GenerationRequest(model, prompt, partial(ChatReply, prompt, enveloped=True))
    reply = partial(CompletionsReply, prompt, shown=prompt.n, scored=bool(request.logprobs), enveloped=True)
    return GenerationRequest(model, prompt, reply)
