"""The dialect of `/ai/run` for models whose bodies are chat completions: the completion is the envelope's result.

It does not know accounts, replicas or sockets.
"""

from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.api.body_fields import ShortText, check_same_model
from gateway.api.chat import ChatFields, ChatReply, chat_prompt
from gateway.api.completions import CompletionsReply
from gateway.api.dialect import GenerationRequest
from gateway.api.message_fields import Messages, run_messages
from gateway.http.json_body import decode_body
from gateway.inference.run_options import RunOptionsBody


class RunChatBody(ChatFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chat completion, where a prompt may stand in place of the messages; then the answer is a `text_completion`."""

    messages: Messages | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    raw: bool | None = None
    options: RunOptionsBody | None = None
    model: ShortText | None = None


_decoder: Final = msgspec.json.Decoder(RunChatBody)


def read_run_chat(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
    assert model is not None, "the path names the model"
    request = decode_body(body, _decoder)
    check_same_model(request.model, model)
    prompt = chat_prompt(
        request,
        drawn_seed,
        text=request.prompt,
        messages=run_messages(request.prompt, request.messages, request.raw, request.tools),
        raw=bool(request.raw),
        options=request.options,
    )
    if prompt.messages is not None:
        return GenerationRequest(model, prompt, partial(ChatReply, prompt, enveloped=True))
    reply = partial(CompletionsReply, prompt, shown=prompt.n, scored=bool(request.logprobs), enveloped=True)
    return GenerationRequest(model, prompt, reply)
