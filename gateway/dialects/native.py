"""The native dialect: `/ai/run/{model}` bodies to a Prompt, and a completion to the native envelope or events.

It does not know accounts, replicas or sockets.
"""

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from engine.wire import Sampling
from gateway import sse
from gateway.body import decode, options
from gateway.errors import Refusal, bad_input, envelope
from gateway.options import Within
from gateway.prompt import (
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

TEMPERATURE_DEFAULT: Final = 0.6
_encode = msgspec.json.encode


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every field of the native schema. Those below `user` are refused by name where they ask for something."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Messages | None = None
    model: ShortText | None = None
    raw: bool | None = None
    stream: bool | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=1, le=9_999_999_999)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stop: Stop | None = None
    n: int | None = None
    tools: Tools | None = None
    options: Within | None = None
    metadata: Metadata | None = None
    user: ShortText | None = None
    tool_choice: Any = None
    functions: Any = None
    lora: Any = None
    response_format: Any = None
    guided_json: Any = None
    requests: Any = None
    logprobs: Any = None
    top_logprobs: Any = None


_decoder: Final = msgspec.json.Decoder(Input)


def parse(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> tuple[str, Prompt]:
    """The body of `/ai/run/{model}` as a Prompt. Raises Refusal."""
    asked = decode(body, _decoder)
    assert model is not None, "the path names the model"
    same_model(asked.model, model)
    _refuse_unserved(asked)
    if (asked.prompt is None) == (asked.messages is None):
        matches = 0 if asked.prompt is None else 2
        raise bad_input(f"oneOf at '/' not met, {matches} matches: send either 'prompt' or 'messages'")
    if asked.raw and asked.messages is not None:
        raise bad_input("'raw' skips the chat template and goes with 'prompt' only; leave it out", "raw")
    if asked.tools and asked.messages is None:
        raise bad_input("'tools' go with 'messages' only; send the prompt as a user's message", "tools")
    _refuse_options(query)
    prompt = Prompt(
        text=asked.prompt,
        messages=None if asked.messages is None else chat(asked.messages),
        raw=bool(asked.raw),
        tools=toolbox(asked.tools),
        sampling=_sampling(asked, drawn_seed),
        max_tokens=max_tokens_of(asked.max_tokens, asked.max_completion_tokens),
        stop=stops(asked.stop),
        stream=bool(asked.stream),
        include_usage=True,
        user=asked.user,
        options=asked.options,
    )
    return model, prompt


def _refuse_unserved(asked: Input) -> None:
    choices = "use /ai/v1/chat/completions"
    refuse("n", None if asked.n in (None, 1) else asked.n, f"the native answer has one choice; {choices}")
    refuse("logprobs", asked.logprobs or None, f"the native answer has no place for them; {choices}")
    refuse("top_logprobs", asked.top_logprobs or None, f"the native answer has no place for them; {choices}")
    refuse("tool_choice", None if asked.tool_choice in (None, "auto") else True, "leave it out, or send 'auto'")
    plain = asked.response_format in (None, {"type": "text"})
    refuse("response_format", None if plain else True, "ask for JSON in the prompt")
    refuse("guided_json", asked.guided_json, "ask for JSON in the prompt")
    refuse("functions", asked.functions, "describe the functions in 'tools'")
    refuse("lora", asked.lora, "adapters are not served; leave it out")
    refuse("requests", asked.requests, "send one request a call")


def _sampling(asked: Input, drawn_seed: int) -> Sampling:
    return Sampling(
        temperature=TEMPERATURE_DEFAULT if asked.temperature is None else asked.temperature,
        top_k=asked.top_k or 0,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        min_p=asked.min_p or 0.0,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        seed=seed_of(asked.seed, drawn_seed),
        logit_bias=asked.logit_bias or {},
    )


def _refuse_options(query: bytes) -> None:
    """Raises Refusal for run options that are not served."""
    asked = options(query) if query else {}
    for name in ("queueRequest", "websocket", "returnRawResponse"):
        if asked.get(name, "") not in ("false", "0", ""):
            raise bad_input(f"the option '{name}' is not supported here; leave it out", name)


class Reply:
    """The native answer: a `response` with `usage` in the envelope, or events of `response` and padding."""

    def __init__(self, paddings: Iterator[bytes]) -> None:
        self._paddings = paddings

    def begin(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        return b""

    def text(self, choice: int, text: str, logprobs: list[Chosen]) -> bytes:
        assert choice == 0
        assert not logprobs
        return b'data: {"response":' + _encode(text) + b',"p":"' + next(self._paddings) + b'"}\n\n'

    def thought(self, choice: int, text: str) -> bytes:
        return b'data: {"response":"","reasoning":' + _encode(text) + b',"p":"' + next(self._paddings) + b'"}\n\n'

    def call(self, choice: int, number: int, use: ToolUse) -> bytes:
        return b""

    def arguments(self, choice: int, number: int, fragment: str) -> bytes:
        return b""

    def called(self, choice: int, number: int, use: ToolUse) -> bytes:
        calls = _encode(_calls([use]))
        return b'data: {"response":"","tool_calls":' + calls + b',"p":"' + next(self._paddings) + b'"}\n\n'

    def finish(self, choice: int, reason: str, stopped_by: str | None) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return sse.event(_encode({"response": "", "usage": usage.last_fields(), **_cut(usage)})) + sse.DONE

    def fail(self, refusal: Refusal, request_id: str) -> bytes:
        return sse.event(envelope(refusal, request_id)) + sse.DONE

    def whole(self, completions: list[Completion], usage: Usage) -> bytes:
        (completion,) = completions
        result = {
            "response": completion.text,
            "tool_calls": _calls(completion.tool_uses),
            "usage": usage.fields(),
            **_cut(usage),
        }
        return _encode(enveloped(result))


def _cut(usage: Usage) -> dict[str, str]:
    """The native answer has a finish reason only where a limit of neurons ended it."""
    return {"finish_reason": "quota"} if usage.cut else {}


def _calls(uses: list[ToolUse]) -> list[dict[str, Any]]:
    """With arguments as objects; a call that the answer's end cut is left out."""
    calls = []
    for use in uses:
        with contextlib.suppress(msgspec.DecodeError):
            calls.append({"name": use.name, "arguments": msgspec.json.decode(use.arguments)})
    return calls


class Native:
    """The dialect of `/ai/run`."""

    def __init__(self) -> None:
        self._paddings = sse.paddings()

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> Asked:
        name, prompt = parse(body, query, model, drawn_seed)
        return Asked(name, prompt, lambda *_: Reply(self._paddings))
