"""The answer of Anthropic's Messages: blocks in a `message`, or the events that build them up one by one.

It does not know what was asked, nor sockets. Silence on a stream is broken by comments, not by `ping` events.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from gateway.errors import ApiError
from gateway.http import sse
from gateway.http.error_format import anthropic_envelope
from gateway.inference.reply import Completion, RunningUsage, ScoredToken, ToolUse, Usage

BlockKind = Literal["text", "thinking", "tool_use"]
# What the pieces of a block are called, and the field that they are in.
DELTAS: Final[dict[BlockKind, tuple[str, str]]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "quota": "quota"}
TIER: Final = {"service_tier": "standard"}
_encode = msgspec.json.encode


class MessagesReply:
    """A `message`, or its events. Each is padded by a comment, which clients skip: the API has no field for it.

    A thought, a text or a call that follows another kind begins a new block. Thoughts are not signed.
    """

    def __init__(self, model: str, request_id: str, paddings: Iterator[bytes], *, shows_thoughts: bool = True) -> None:
        self._head: dict[str, Any] = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._paddings = paddings
        self._shows_thoughts = shows_thoughts
        self._open: BlockKind | None = None
        self._blocks = 0  # so many have begun
        self._delta = b""  # how the events of the open block's pieces begin
        self._ending: dict[str, Any] = {}

    def begin(self, running: RunningUsage) -> bytes:
        usage = {**_read(running.prompt_tokens, running.cached_tokens), "output_tokens": 0, **TIER}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def text(self, choice: int, text: str, logprobs: list[ScoredToken]) -> bytes:
        assert not logprobs
        return self._begin("text", {"type": "text", "text": ""}) + self._piece(text)

    def thought(self, choice: int, text: str) -> bytes:
        if not self._shows_thoughts:
            return b""
        return self._begin("thinking", _thinking("")) + self._piece(text)

    def call(self, choice: int, number: int, use: ToolUse) -> bytes:
        return self._end() + self._begin("tool_use", _tool_use(use, {}))

    def arguments(self, choice: int, number: int, fragment: str) -> bytes:
        return self._piece(fragment)

    def called(self, choice: int, number: int, use: ToolUse) -> bytes:
        return self._end()

    def finish(self, choice: int, reason: str, stopped_by: str | None) -> bytes:
        self._ending = _ending(reason, stopped_by)
        return self._end()

    def end(self, usage: Usage) -> bytes:
        spent = {**_usage(usage), "neurons_left": usage.left}
        return _event("message_delta", delta=self._ending, usage=spent) + _event("message_stop")

    def fail(self, refusal: ApiError, request_id: str) -> bytes:
        return sse.named_event("error", anthropic_envelope(refusal, request_id))

    def whole(self, completions: list[Completion], usage: Usage) -> bytes:
        """A call that the answer's end cut has no input that could be given, and is left out."""
        (completion,) = completions
        content: list[dict[str, Any]] = []
        if completion.thought and self._shows_thoughts:
            content.append(_thinking(completion.thought))
        if completion.text:
            content.append({"type": "text", "text": completion.text})
        uses = [(use, use.input) for use in completion.tool_uses]
        content += [_tool_use(use, input) for use, input in uses if input is not None]
        ending = _ending(completion.finish, completion.stopped_by)
        return _encode({**self._head, "content": content, **ending, "usage": {**_usage(usage), **TIER}})

    def _begin(self, kind: BlockKind, block: dict[str, Any]) -> bytes:
        """The block that the next piece belongs to: the open one where it is of this kind, else a new one."""
        if self._open == kind:
            return b""
        ended = self._end()
        index, self._open = self._blocks, kind
        self._blocks += 1
        name, field = DELTAS[kind]
        delta = f'"index":{index},"delta":{{"type":"{name}","{field}":'
        self._delta = b'event: content_block_delta\ndata: {"type":"content_block_delta",' + delta.encode()
        return ended + _event("content_block_start", index=index, content_block=block)

    def _piece(self, text: str) -> bytes:
        return self._delta + _encode(text) + b"}}\n: " + next(self._paddings) + b"\n\n"

    def _end(self) -> bytes:
        """Closes the open block, where there is one."""
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return sse.named_event(kind, _encode({"type": kind, **fields}))


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(use: ToolUse, input: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": use.id, "name": use.name, "input": input}


def _ending(reason: str, stopped_by: str | None) -> dict[str, Any]:
    if reason == "stop" and stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}


def _read(prompt_tokens: int, cached_tokens: int) -> dict[str, int]:
    """What was read of the prompt. What is written into the cache costs nothing, and is not told apart."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        **_read(usage.prompt_tokens, usage.cached_tokens),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.thought_tokens},
        "neurons": usage.neurons,
    }
