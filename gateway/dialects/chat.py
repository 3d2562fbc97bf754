"""OpenAI's dialect: chat completion bodies to a Prompt, and a completion to `chat.completion` or its chunks.

It does not know accounts, replicas or sockets.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from engine.wire import Sampling
from gateway import sse
from gateway.body import decode
from gateway.errors import Refusal, bad_input, envelope, openai_envelope
from gateway.prompt import (
    CHOICES_MAX,
    LOGPROBS_MAX,
    LogitBias,
    MaxTokens,
    Messages,
    Metadata,
    Penalty,
    Probability,
    Prompt,
    RepetitionPenalty,
    ShortText,
    Stop,
    Tools,
    TopK,
    chat,
    max_tokens_of,
    refuse,
    same_model,
    seed_of,
    stops,
    toolbox,
)
from gateway.reply import Asked, Chosen, Completion, ToolUse, Usage, enveloped

TEMPERATURE_DEFAULT: Final = 1.0
TOP_P_MIN: Final = 0.001  # top_p 0 asks for the one most probable token, which any tiny mass is
_encode = msgspec.json.encode


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage asks for a last chunk with `usage`; include_obfuscation false leaves the padding out."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field of chat completions. Those below `prompt_cache_key` are refused where they ask for something.

    `metadata`, `safety_identifier` and `prompt_cache_key` are labels: they change nothing and are not kept.
    The cache is always the account's own, so that a key of the caller's is not needed.
    """

    messages: Messages
    model: ShortText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    stop: Stop | None = None
    tools: Tools | None = None
    metadata: Metadata | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    store: bool | None = None
    service_tier: str | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    function_call: Any = None
    functions: Any = None
    chat_template_kwargs: Any = None
    prompt_cache_retention: Any = None
    moderation: Any = None


class Input(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body where the path names no model."""

    model: ShortText


_decoder: Final = msgspec.json.Decoder(Input)
_body_decoder: Final = msgspec.json.Decoder(Body)


def parse(asked: Body, drawn_seed: int) -> Prompt:
    """The body of a chat completion as a Prompt. Raises Refusal."""
    _refuse_unserved(asked)
    if asked.stream_options is not None and not asked.stream:
        raise bad_input("'stream_options' goes with 'stream': true only; leave it out", "stream_options")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise bad_input("'top_logprobs' goes with 'logprobs': true only; set it", "top_logprobs")
    options = asked.stream_options or StreamOptions()
    return Prompt(
        messages=chat(asked.messages),
        tools=None if asked.tool_choice == "none" else toolbox(asked.tools),
        sampling=_sampling(asked, drawn_seed),
        max_tokens=max_tokens_of(asked.max_tokens, asked.max_completion_tokens),
        n=asked.n or 1,
        stop=stops(asked.stop),
        stream=bool(asked.stream),
        include_usage=bool(options.include_usage),
        padded=options.include_obfuscation is not False,
        user=asked.user,
    )


def _refuse_unserved(asked: Body) -> None:
    def unless(field: str, served: tuple[object, ...], advice: str) -> None:
        value = getattr(asked, field)
        refuse(field, None if value in served else True, advice)

    unless("tool_choice", (None, "auto", "none"), "send 'auto' or 'none'")
    unless("parallel_tool_calls", (None, True), "leave it out")
    unless("response_format", (None, {"type": "text"}), "ask for JSON in the messages")
    unless("store", (None, False), "nothing is stored; leave it out")
    unless("service_tier", (None, "auto", "default"), "leave it out")
    unless("modalities", (None, ["text"]), "send ['text']")
    unless("reasoning_effort", (None, "none"), "leave it out")
    unless("verbosity", (None, "medium"), "leave it out")
    for field in ("audio", "prediction", "web_search_options", "chat_template_kwargs", "moderation"):
        unless(field, (None,), "leave it out")
    unless("prompt_cache_retention", (None, "in_memory", "in-memory"), "leave it out")
    unless("function_call", (None,), "use 'tool_choice'")
    unless("functions", (None,), "use 'tools'")


def _sampling(asked: Body, drawn_seed: int) -> Sampling:
    return Sampling(
        temperature=TEMPERATURE_DEFAULT if asked.temperature is None else asked.temperature,
        top_k=asked.top_k or 0,
        top_p=1.0 if asked.top_p is None else max(asked.top_p, TOP_P_MIN),
        min_p=asked.min_p or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        seed=seed_of(asked.seed, drawn_seed),
        logit_bias=asked.logit_bias or {},
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
    )


class Reply:
    """`chat.completion`, or chunks: a role for each choice, contents, finishes, and the usage where asked for.

    `enveloped` is for `/ai/run`: the completion is the envelope's result, and the native dialect's usage ends a stream.
    """

    def __init__(
        self,
        prompt: Prompt,
        model: str,
        request_id: str,
        created: int,
        paddings: Iterator[bytes],
        *,
        enveloped: bool = False,
    ) -> None:
        self._prompt = prompt
        self._enveloped = enveloped
        self._id = f"chatcmpl-{request_id}"
        self._created = created
        self._model = model
        self._paddings = paddings
        head = {"id": self._id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b","
        self._usage = b',"usage":null' if prompt.include_usage else b""
        contents = [b'"choices":[{"index":%d,"delta":{"content":' % choice for choice in range(prompt.n)]
        self._contents = [self._head + content for content in contents]

    def begin(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, role, None) for choice in range(self._prompt.n))

    def text(self, choice: int, text: str, logprobs: list[Chosen]) -> bytes:
        beside = b"" if not logprobs else b',"logprobs":' + _encode({"content": [_chosen(one) for one in logprobs]})
        content = self._contents[choice] + _encode(text) + b"}" + beside + b',"finish_reason":null}]'
        return content + self._tail()

    def thought(self, choice: int, text: str) -> bytes:
        return self._chunk(choice, {"reasoning_content": text}, None)

    def call(self, choice: int, number: int, use: ToolUse) -> bytes:
        return self._chunk(choice, {"tool_calls": [{"index": number, **_call(use)}]}, None)

    def arguments(self, choice: int, number: int, fragment: str) -> bytes:
        return self._chunk(choice, {"tool_calls": [{"index": number, "function": {"arguments": fragment}}]}, None)

    def called(self, choice: int, number: int, use: ToolUse) -> bytes:
        return b""

    def finish(self, choice: int, reason: str, stopped_by: str | None) -> bytes:
        return self._chunk(choice, {}, reason)

    def end(self, usage: Usage) -> bytes:
        last = _encode(usage.last_fields())
        events = self._head + b'"choices":[],"usage":' + last + b"}\n\n" if self._prompt.include_usage else b""
        if self._enveloped:
            events += b'data: {"response":"","usage":' + last + b"}\n\n"
        return events + sse.DONE

    def fail(self, refusal: Refusal, request_id: str) -> bytes:
        error = envelope(refusal, request_id) if self._enveloped else openai_envelope(refusal, request_id)
        return sse.event(error) + sse.DONE

    def whole(self, completions: list[Completion], usage: Usage) -> bytes:
        result = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [_choice(i, completion) for i, completion in enumerate(completions)],
            "usage": usage.fields(),
        }
        return _encode(enveloped(result) if self._enveloped else result)

    def _chunk(self, choice: int, delta: dict[str, Any], finish: str | None) -> bytes:
        choices = [{"index": choice, "delta": delta, "finish_reason": finish}]
        return self._head + b'"choices":' + _encode(choices) + self._tail()

    def _tail(self) -> bytes:
        if not self._prompt.padded:
            return self._usage + b"}\n\n"
        return self._usage + b',"obfuscation":"' + next(self._paddings) + b'"}\n\n'


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
    if completion.tool_uses:
        message["content"] = completion.text or None
        message["tool_calls"] = [_call(use) for use in completion.tool_uses]
    if completion.thought:
        message["reasoning_content"] = completion.thought
    logprobs = None
    if completion.logprobs is not None:
        logprobs = {"content": [_chosen(one) for one in completion.logprobs], "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": completion.finish}


def _call(use: ToolUse) -> dict[str, Any]:
    return {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.arguments}}


def _chosen(one: Chosen) -> dict[str, Any]:
    return {**_scored(one), "top_logprobs": [_scored(other) for other in one.top]}


def _scored(one: Chosen) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.raw)}


class Chat:
    """The dialect of `/v1/chat/completions`."""

    def __init__(self) -> None:
        self._paddings = sse.paddings()

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> Asked:
        assert model is None, "the body names the model"
        asked = decode(body, _decoder)
        prompt = parse(asked, drawn_seed)
        return Asked(asked.model, prompt, lambda model, id, taken: Reply(prompt, model, id, taken, self._paddings))


class Enveloped:
    """The dialect of `/ai/run` for models whose bodies are chat completions."""

    def __init__(self) -> None:
        self._paddings = sse.paddings()

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> Asked:
        assert model is not None, "the path names the model"
        asked = decode(body, _body_decoder)
        same_model(asked.model, model)
        prompt = parse(asked, drawn_seed)
        paddings = self._paddings
        return Asked(model, prompt, lambda model, id, taken: Reply(prompt, model, id, taken, paddings, enveloped=True))
