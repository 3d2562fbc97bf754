"""The answer of OpenAI's Responses: output items in a `response`, or the events that build them up one by one.

It does not know what was asked but for what the answer says again, nor sockets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from gateway.api.chunks import scored_token
from gateway.errors import ApiError
from gateway.http import sse
from gateway.http.error_format import message_with_id
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, RunningUsage, ScoredToken, ToolUse, Usage

ItemKind = Literal["reasoning", "message", "function_call"]
# How the ids of an item begin, and the events of its pieces.
NAMES: Final[dict[ItemKind, tuple[str, str]]] = {
    "reasoning": ("rs", "response.reasoning_text"),
    "message": ("msg", "response.output_text"),
    "function_call": ("fc", "response.function_call_arguments"),
}
INCOMPLETE_REASONS: Final = {"length": "max_output_tokens", "quota": "quota"}
_encode = msgspec.json.encode


@dataclass(slots=True)
class OutputItem:
    """One output item in the making; `call` is what a function call began with."""

    kind: ItemKind
    id: str
    index: int
    call: ToolUse | None = None
    pieces: list[str] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> dict[str, Any]:
        """How its events name it; calls have no parts of content."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.call is not None else {**place, "content_index": 0}

    @property
    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.scores}

    def fields(self, status: str) -> dict[str, Any]:
        """The item as the API shows it; one that is in progress is still empty."""
        head = {"type": self.kind, "id": self.id, "status": status}
        content = [] if status == "in_progress" else [self.part]
        if self.call is not None:
            return {**head, "call_id": self.call.id, "name": self.call.name, "arguments": self.text}
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content, "encrypted_content": None}
        return {**head, "role": "assistant", "content": content}


class ResponsesReply:
    """A `response` with its items, or its events, which are numbered. `echoed` is what it says again of the request.

    A thought, a text or a call that follows another kind begins a new item. Log probabilities are of what is not a text
    too; they go with the text that follows.
    """

    def __init__(
        self,
        echoed: dict[str, Any],
        prompt: Prompt,
        model: str,
        request_id: str,
        created: int,
        paddings: Iterator[bytes],
    ) -> None:
        self._paddings = paddings if prompt.padded else None
        self._request_id = request_id
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created, "model": model, **echoed}
        self._sequence = 0
        self._done: list[dict[str, Any]] = []
        self._item: OutputItem | None = None
        self._delta = b""  # how the item's events of pieces begin
        self._waiting: list[dict[str, Any]] = []  # log probabilities that no text has come for
        self._reason = "stop"

    def begin(self, running: RunningUsage) -> bytes:
        response = self._response("in_progress", [], None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def text(self, choice: int, text: str, logprobs: list[ScoredToken]) -> bytes:
        if self._item is not None and self._item.kind == "message" and not logprobs:
            return self._piece(text, b',"logprobs":[]')  # most events of most streams
        self._waiting += [scored_token(token) for token in logprobs]
        if not text and (self._item is None or self._item.kind != "message"):
            return b""
        opened = self._begin("message")
        scores, self._waiting = self._waiting, []
        assert self._item is not None
        self._item.scores += scores
        return opened + self._piece(text, b',"logprobs":' + _encode(scores))

    def thought(self, choice: int, text: str) -> bytes:
        return self._begin("reasoning") + self._piece(text)

    def call(self, choice: int, number: int, use: ToolUse) -> bytes:
        return self._begin("function_call", use)

    def arguments(self, choice: int, number: int, fragment: str) -> bytes:
        return self._piece(fragment)

    def called(self, choice: int, number: int, use: ToolUse) -> bytes:
        return self._end("completed")

    def finish(self, choice: int, reason: str, stopped_by: str | None) -> bytes:
        self._reason = reason
        cut = reason in INCOMPLETE_REASONS or (self._item is not None and self._item.call is not None)
        return self._end("incomplete" if cut else "completed")

    def end(self, usage: Usage) -> bytes:
        status = _status(self._reason)
        spent = {**_usage(usage), "neurons_left": usage.left}
        return self._event(f"response.{status}", response=self._response(status, self._done, spent))

    def fail(self, refusal: ApiError, request_id: str) -> bytes:
        begun = b"" if self._sequence else self.begin(RunningUsage())
        message = message_with_id(refusal, request_id)
        error = self._event("error", code=refusal.kind, message=message, param=refusal.param)
        response = self._response("failed", self._done, None)
        response["error"] = {"code": _code(refusal), "message": message}
        return begun + error + self._event("response.failed", response=response)

    def whole(self, completions: list[Completion], usage: Usage) -> bytes:
        """What a stream would have built up, its events left out."""
        (completion,) = completions
        if completion.thought:
            self.thought(0, completion.thought)
        self.text(0, completion.text, completion.logprobs or [])
        for number, use in enumerate(completion.tool_uses):
            self.call(0, number, use)
            self.arguments(0, number, use.arguments)
            if use.input is not None:
                self.called(0, number, use)
        self.finish(0, completion.finish, completion.stopped_by)
        return _encode(self._response(_status(completion.finish), self._done, _usage(usage)))

    def _begin(self, kind: ItemKind, call: ToolUse | None = None) -> bytes:
        """The item that the next piece belongs to: the open one where it is of this kind, else a new one."""
        if call is None and self._item is not None and self._item.kind == kind:
            return b""
        ended = self._end("completed")
        index = len(self._done)
        prefix, piece = NAMES[kind]
        item = self._item = OutputItem(kind, f"{prefix}_{self._request_id}_{index}", index, call)
        delta = f"{piece}.delta"
        place = _encode({"type": delta, **item.place})[:-1]
        self._delta = b"event: " + delta.encode() + b"\ndata: " + place + b',"delta":'
        added = self._event("response.output_item.added", output_index=index, item=item.fields("in_progress"))
        if call is not None:
            return ended + added
        return ended + added + self._event("response.content_part.added", **item.place, part=item.part)

    def _piece(self, text: str, beside: bytes = b"") -> bytes:
        assert self._item is not None
        self._item.pieces.append(text)
        padding = b"" if self._paddings is None else b',"obfuscation":"' + next(self._paddings) + b'"'
        event = b'%b%b%b,"sequence_number":%d%b}\n\n' % (self._delta, _encode(text), beside, self._sequence, padding)
        self._sequence += 1
        return event

    def _end(self, status: str) -> bytes:
        """Closes the open item, where there is one."""
        item, self._item = self._item, None
        if item is None:
            return b""
        fields = item.fields(status)
        self._done.append(fields)
        done, place = f"{NAMES[item.kind][1]}.done", item.place
        if item.call is not None:
            events = self._event(done, **place, name=item.call.name, arguments=item.text)
        else:
            scores = {"logprobs": item.scores} if item.kind == "message" else {}
            events = self._event(done, **place, text=item.text, **scores)
            events += self._event("response.content_part.done", **place, part=item.part)
        return events + self._event("response.output_item.done", output_index=item.index, item=fields)

    def _event(self, type_: str, **fields: Any) -> bytes:
        body = _encode({"type": type_, **fields, "sequence_number": self._sequence})
        self._sequence += 1
        return sse.named_event(type_, body)

    def _response(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        details = {"reason": INCOMPLETE_REASONS[self._reason]} if status == "incomplete" else None
        state = {"status": status, "error": None, "incomplete_details": details}
        return {**self._head, **state, "output": output, "usage": usage}


def _status(reason: str) -> str:
    return "incomplete" if reason in INCOMPLETE_REASONS else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    """Writing into the cache is not told apart here: it costs nothing."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "neurons": usage.neurons,
    }


def _code(refusal: ApiError) -> str:
    """One of the words that the API has for why a response failed."""
    if refusal.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if refusal.status >= 500 else "invalid_prompt"
