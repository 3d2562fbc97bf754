"""The native dialect: `/ai/run/{model}` bodies to a Prompt, and a completion to the native envelope or events.

It does not know accounts, replicas or sockets.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.api.body_fields import (
    MaxTokens,
    ReasoningEffort,
    SamplingFields,
    ShortText,
    TemplateOptions,
    check_same_model,
    max_tokens_of,
    only,
    prompt_sampling,
    refuse_field,
    refuse_unless,
    template_options,
)
from gateway.api.dialect import GenerationRequest
from gateway.api.message_fields import Messages, chat_images, native_image, refuse_lora, run_messages, with_image
from gateway.api.tool_fields import ToolChoiceField, Tools, prompt_tools
from gateway.errors import ApiError, bad_input
from gateway.http import sse
from gateway.http.error_format import envelope
from gateway.http.json_body import decode_body
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, RunningUsage, ScoredToken, ToolUse, Usage, enveloped
from gateway.inference.run_options import RunOptionsBody

TEMPERATURE_DEFAULT: Final = 0.6  # which Workers AI states, and a model's own does not change
MAX_TOKENS_DEFAULT: Final = 256
_encode = msgspec.json.encode


NativeImage = Annotated[
    Annotated[str, Meta(min_length=1)] | Annotated[list[Annotated[int, Meta(ge=0, le=255)]], Meta(min_length=1)],
    Meta(description="An image before the prompt, or before the last user's message: its bytes, or these in base64."),
]


class RunNativeBody(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field of the native schema. Fields below `options` are refused by name where they ask for something."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Messages | None = None
    image: NativeImage | None = None
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
    requests: Annotated[Any, Meta(description="The requests of a batch, sent alone and with ?queueRequest=true.")] = (
        None
    )
    logprobs: Any = None
    top_logprobs: Any = None


_decoder: Final = msgspec.json.Decoder(RunNativeBody)


def native_prompt(body: RunNativeBody, drawn_seed: int) -> Prompt:
    """What a body of `/ai/run` asks for. Raises ApiError."""
    _refuse_unserved(body)
    text, messages = body.prompt, run_messages(body.prompt, body.messages, body.raw, body.tools)
    images = chat_images(body.messages or ())
    if body.image is not None:
        if body.raw:
            raise bad_input("'raw' skips the chat template, which an 'image' needs; leave one of them out", "raw")
        messages = with_image(messages or [{"role": "user", "content": text}])
        text, images = None, (*images, native_image(body.image))
    return Prompt(
        text=text,
        messages=messages,
        images=images,
        raw=bool(body.raw),
        template_options=template_options(body.chat_template_kwargs, body.reasoning_effort),
        max_tokens=max_tokens_of(body.max_tokens, body.max_completion_tokens) or MAX_TOKENS_DEFAULT,
        stream=bool(body.stream),
        include_usage=True,
        whole_only=True,
        options=body.options,
        **prompt_tools(body.tools, body.tool_choice, body.parallel_tool_calls),
        **prompt_sampling(
            body,
            drawn_seed,
            temperature=TEMPERATURE_DEFAULT if body.temperature is None else body.temperature,
            top_p=body.top_p,
            seed=body.seed,
        ),
    )


def _refuse_unserved(body: RunNativeBody) -> None:
    elsewhere = "use /ai/v1/chat/completions"
    refuse_unless("n", body.n, (1,), f"the native answer has one choice; send 1, or {elsewhere}")
    refuse_field("logprobs", body.logprobs or None, f"the native answer has no place for them; {elsewhere}")
    refuse_field("top_logprobs", body.top_logprobs or None, f"the native answer has no place for them; {elsewhere}")
    refuse_field("functions", body.functions, "no code is run here; describe the functions in 'tools'")
    refuse_field("requests", body.requests, "send one request a call, or many with the option queueRequest=true")
    refuse_lora(body.lora)


class NativeReply:
    """The native answer: a `response` with `usage` in the envelope, or events of `response` and padding.

    A `document` that is not streamed is an object, not its text.
    """

    def __init__(self, paddings: Iterator[bytes], *, document: bool = False) -> None:
        self._paddings = paddings
        self._document = document

    def begin(self, running: RunningUsage) -> bytes:
        return b""

    def text(self, choice: int, text: str, logprobs: list[ScoredToken]) -> bytes:
        assert choice == 0
        assert not logprobs
        return b'data: {"response":' + _encode(text) + b',"p":"' + next(self._paddings) + b'"}\n\n'

    def thought(self, choice: int, text: str) -> bytes:
        head = b'data: {"response":"","reasoning_content":'
        return head + _encode(text) + b',"p":"' + next(self._paddings) + b'"}\n\n'

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
        # It was checked to be one where it ended; in place of a text there may be calls.
        document = self._document and not completion.tool_uses
        result = {
            "response": msgspec.Raw(completion.text.encode()) if document else completion.text,
            "tool_calls": _calls(completion.tool_uses),
            "usage": usage.fields(),
            **_cut(usage),
        }
        if completion.thought:
            result["reasoning_content"] = completion.thought
        return _encode(enveloped(result))


def _cut(usage: Usage) -> dict[str, str]:
    """The native answer has a finish reason only where a limit of neurons ended it."""
    return {"finish_reason": "quota"} if usage.cut else {}


def _calls(uses: list[ToolUse]) -> list[dict[str, Any]]:
    """With arguments as objects; a call that the answer's end cut is left out."""
    inputs = [(use.name, use.input) for use in uses]
    return [{"name": name, "arguments": input} for name, input in inputs if input is not None]


def read_run_native(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
    """The dialect of `/ai/run`."""
    assert model is not None, "the path names the model"
    request = decode_body(body, _decoder)
    check_same_model(request.model, model)
    prompt = native_prompt(request, drawn_seed)
    return GenerationRequest(model, prompt, lambda *answer: NativeReply(answer[-1], document=prompt.json))
