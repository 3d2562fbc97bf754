"""The frame around the choices in answers of OpenAI's kind: ids, usage, padding and the end, streamed or whole.

It does not know what a choice looks like, nor where its text comes from.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any, Final

import msgspec

from gateway.errors import ApiError
from gateway.http import sse
from gateway.http.error_format import envelope, openai_envelope
from gateway.inference.prompt import Prompt
from gateway.inference.reply import RunningUsage, ScoredToken, Usage, enveloped

_encode: Final = msgspec.json.encode


class ChunkWriter:
    """The frame of one answer. `kinds` are the `object` of a whole answer and of a chunk.

    `enveloped` is for `/ai/run`: the object is the envelope's result, and a stream ends with the native usage. Where
    usage is `continuous` each chunk says what was used so far, and `tail` is none's.
    """

    def __init__(
        self,
        prompt: Prompt,
        kinds: tuple[str, str],
        id: str,
        created: int,
        model: str,
        paddings: Iterator[bytes],
        *,
        enveloped: bool = False,
    ) -> None:
        self._include_usage = prompt.include_usage
        self._enveloped = enveloped
        self.continuous = prompt.continuous_usage
        self._running = RunningUsage()
        self._common_fields = {"id": id, "object": kinds[0], "created": created, "model": model}
        self.head = b"data: " + _encode({**self._common_fields, "object": kinds[1]})[:-1] + b',"choices":['
        # The parts around a choice and its padding, for replies that write many pieces and join them themselves.
        usage = b'],"usage":null' if prompt.include_usage else b"]"
        self._padding = b',"obfuscation":"' if prompt.padded else b"}\n\n"
        self.tail = usage + self._padding
        self.paddings: Iterator[bytes] = paddings if prompt.padded else repeat(b"")
        self.last = b'"}\n\n' if prompt.padded else b""

    def event(self, choice: bytes) -> bytes:
        """A chunk with this one choice."""
        tail = b'],"usage":' + _encode(self._running.fields()) + self._padding if self.continuous else self.tail
        return self.head + choice + tail + next(self.paddings) + self.last

    @contextlib.contextmanager
    def beginning(self, running: RunningUsage) -> Iterator[None]:
        """Chunks made inside say that nothing is generated yet; those made later, what is by then."""
        self._running = replace(running, completion_tokens=0)
        yield
        self._running = running

    def end(self, usage: Usage) -> bytes:
        last = _encode(usage.last_fields())
        events = self.head + b'],"usage":' + last + b"}\n\n" if self._include_usage else b""
        if self._enveloped:
            events += b'data: {"response":"","usage":' + last + b"}\n\n"
        return events + sse.DONE

    def fail(self, refusal: ApiError, request_id: str) -> bytes:
        error = envelope(refusal, request_id) if self._enveloped else openai_envelope(refusal, request_id)
        return sse.event(error) + sse.DONE

    def body(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        result = {**self._common_fields, "choices": choices, "usage": usage.fields()}
        return _encode(enveloped(result) if self._enveloped else result)


def scored_token(token: ScoredToken) -> dict[str, Any]:
    """A token with its alternatives, as OpenAI has both."""
    return {**_alternative(token), "top_logprobs": [_alternative(other) for other in token.top]}


def _alternative(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.raw)}
