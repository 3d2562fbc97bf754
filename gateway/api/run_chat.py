"""The dialect of `/ai/run` for models whose bodies are chat completions: the completion is the envelope's result.

It does not know accounts, replicas or sockets.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.api import chat, completions
from gateway.api.body_fields import ShortText, check_same_model
from gateway.api.dialect import GenerationRequest
from gateway.api.message_fields import Messages, run_prompt
from gateway.errors import bad_input
from gateway.http import sse
from gateway.http.json_body import decode_body
from gateway.inference.reply import Reply
from gateway.inference.run_options import RunOptionsBody


class RunChatBody(chat.ChatFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chat completion, where a prompt may stand in place of the messages; then the answer is a `text_completion`."""

    messages: Messages | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    raw: bool | None = None
    options: RunOptionsBody | None = None
    model: ShortText | None = None


_decoder: Final = msgspec.json.Decoder(RunChatBody)


class RunChatDialect:
    """The dialect."""

    def __init__(self) -> None:
        self._paddings = sse.paddings()

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
        assert model is not None, "the path names the model"
        request = decode_body(body, _decoder)
        check_same_model(request.model, model)
        found = run_prompt(request.prompt, request.messages, request.raw)
        if request.tools and request.prompt is not None:
            raise bad_input("'tools' go with 'messages' only; send the prompt as a user's message", "tools")
        prompt = chat.prompt_of(request, found, drawn_seed, request.options)

        def answer(model: str, id: str, taken: int) -> Reply:
            if prompt.messages is not None:
                return chat.ChatReply(prompt, chat.chunks_of(prompt, model, id, taken, self._paddings, enveloped=True))
            chunks = completions.chunks_of(prompt, model, id, taken, self._paddings, enveloped=True)
            return completions.CompletionsReply(prompt, chunks, shown=prompt.n, scored=bool(request.logprobs))

        return GenerationRequest(model, prompt, answer)
