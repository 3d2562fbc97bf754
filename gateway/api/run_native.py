"""The native dialect: `/ai/run/{model}` bodies to a Prompt, and a completion to the native envelope or events.

It does not know accounts, replicas or sockets.
"""

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.api.dialect import GenerationRequest
from gateway.api.run_fields import refuse_lora, run_prompt
from gateway.api.sampling_fields import SamplingFields, constraint_of, sampling_params
from gateway.errors import ApiError, bad_input
from gateway.http import sse
from gateway.http.error_format import envelope
from gateway.http.json_body import decode_body
from gateway.inference.prompt import (
    MaxTokens,
    Messages,
    Prompt,
    ReasoningEffort,
    ShortText,
    TemplateOptions,
    Tools,
    check_same_model,
    max_tokens_of,
    only,
    refuse_field,
    stops,
    strict,
    template_options,
    tool_definitions,
)
from gateway.inference.reply import Completion, ScoredToken, ToolUse, Usage, enveloped
from gateway.inference.run_options import RunOptionsBody
from gateway.inference.tool_choice import ToolChoiceField, select_tools

TEMPERATURE_DEFAULT: Final = 0.6
MAX_TOKENS_DEFAULT: Final = 256
_encode = msgspec.json.encode


class RunNativeBody(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field of the native schema. Those below `options` are refused by name where they ask for something."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Messages | None = None
    model: ShortText | None = None
    raw: bool | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    seed: Annotated[int, Meta(ge=1, le=9_999_999_999)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    options: RunOptionsBody | None = None
    n: Annotated[int, only(1)] | None = None
    functions: Any = None
    lora: Any = None
    requests: Annotated[Any, Meta(description="Of a batch, which has nothing beside them and ?queueRequest=true.")] = (
        None
    )
    logprobs: Any = None
    top_logprobs: Any = None


_decoder: Final = msgspec.json.Decoder(RunNativeBody)


def prompt_of(asked: RunNativeBody, drawn_seed: int) -> Prompt:
    """What a body of `/ai/run` asks for. Raises Refusal."""
    _refuse_unserved(asked)
    found = run_prompt(asked.prompt, asked.messages, asked.raw)
    if asked.tools and asked.messages is None:
        raise bad_input("'tools' go with 'messages' only; send the prompt as a user's message", "tools")
    tools, choice = select_tools(tool_definitions(asked.tools), asked.tool_choice)
    held = constraint_of(asked)
    return Prompt(
        text=found.text,
        messages=found.messages,
        raw=found.raw,
        tools=tools,
        tool_choice=choice,
        parallel_calls=asked.parallel_tool_calls is not False,
        strict_calls=strict(asked.tools),
        template_options=template_options(asked.chat_template_kwargs, asked.reasoning_effort),
        grammar=held.grammar,
        grammar_field=held.field,
        json=held.json,
        sampling=sampling_params(
            asked,
            temperature=TEMPERATURE_DEFAULT if asked.temperature is None else asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            drawn_seed=drawn_seed,
        ),
        max_tokens=max_tokens_of(asked.max_tokens, asked.max_completion_tokens) or MAX_TOKENS_DEFAULT,
        stop=stops(asked.stop),
        stream=bool(asked.stream),
        include_usage=True,
        options=asked.options,
        user=asked.user,
    )


def _refuse_unserved(asked: RunNativeBody) -> None:
    choices = "use /ai/v1/chat/completions"
    refuse_field(
        "n", None if asked.n in (None, 1) else asked.n, f"the native answer has one choice; send 1, or {choices}"
    )
    refuse_field("logprobs", asked.logprobs or None, f"the native answer has no place for them; {choices}")
    refuse_field("top_logprobs", asked.top_logprobs or None, f"the native answer has no place for them; {choices}")
    refuse_field("functions", asked.functions, "no code is run here; describe the functions in 'tools'")
    refuse_field("requests", asked.requests, "send one request a call, or many with the option queueRequest=true")
    refuse_lora(asked.lora)


class NativeReply:
    """The native answer: a `response` with `usage` in the envelope, or events of `response` and padding.

    A `document` that is not streamed is an object, not its text.
    """

    def __init__(self, paddings: Iterator[bytes], *, document: bool = False) -> None:
        self._paddings = paddings
        self._document = document

    def begin(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        return b""

    def text(self, choice: int, text: str, logprobs: list[ScoredToken]) -> bytes:
        assert choice == 0
        assert not logprobs
        return b'data: {"response":' + _encode(text) + b',"p":"' + next(self._paddings) + b'"}\n\n'

    def thought(self, choice: int, text: str) -> bytes:
        return (
            b'data: {"response":"","reasoning_content":' + _encode(text) + b',"p":"' + next(self._paddings) + b'"}\n\n'
        )

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

    def fail(self, refusal: ApiError, request_id: str) -> bytes:
        return sse.event(envelope(refusal, request_id)) + sse.DONE

    def whole(self, completions: list[Completion], usage: Usage) -> bytes:
        (completion,) = completions
        result = {
            "response": msgspec.Raw(completion.text.encode()) if self._is_document(completion) else completion.text,
            "tool_calls": _calls(completion.tool_uses),
            "usage": usage.fields(),
            **_cut(usage),
        }
        if completion.thought:
            result["reasoning_content"] = completion.thought
        return _encode(enveloped(result))

    def _is_document(self, completion: Completion) -> bool:
        """It was checked to be one where it ended; in place of a text there may be calls."""
        return self._document and not completion.tool_uses


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


class RunNativeDialect:
    """The dialect of `/ai/run`."""

    def __init__(self) -> None:
        self._paddings = sse.paddings()

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
        assert model is not None, "the path names the model"
        asked = decode_body(body, _decoder)
        check_same_model(asked.model, model)
        prompt = prompt_of(asked, drawn_seed)
        return GenerationRequest(model, prompt, lambda *_: NativeReply(self._paddings, document=prompt.json))
