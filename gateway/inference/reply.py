"""What a dialect turns into an answer: completions and what they cost, and the protocol of all answers of text.

It does not know where the tokens come from, nor how bytes reach the client.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from gateway.errors import ApiError


@dataclass(slots=True)
class RunningUsage:
    """What a request has used so far: the only part of an answer that changes while it is written."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0  # of all its choices

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Usage(msgspec.Struct, frozen=True):
    """What a request cost. `cached_tokens` of the prompt were read from the caller's own cache, `thought_tokens` of the
    completion are thoughts. `left` has the neurons that limits have left, by the limit's name; `cut` tells whether such
    a limit ended the answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    neurons: float
    left: dict[str, float] = {}
    cut: bool = False
    thought_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        spent = RunningUsage(self.prompt_tokens, self.cached_tokens, self.completion_tokens)
        return {**spent.fields(), "neurons": self.neurons}

    def last_fields(self) -> dict[str, Any]:
        """The fields for the last event of a stream, whose headers could only tell what was left at its beginning."""
        return {**self.fields(), "neurons_left": self.left}


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token with its log probability (natural) and the alternatives, best first."""

    token: str
    raw: bytes
    logprob: float
    top: "list[ScoredToken]" = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call of the model; `id` names it in the next turn. `arguments` is the text of a JSON object, or only its
    beginning where the answer ended within it."""

    id: str
    name: str
    arguments: str

    @property
    def input(self) -> dict[str, Any] | None:
        """The arguments as an object; None if the answer ended within them."""
        try:
            return msgspec.json.decode(self.arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice. `finish` is stop, length, tool_calls or quota; `thought` is the reasoning before the text;
    `stopped_by` is the stop string that ended it, if any."""

    text: str
    finish: str
    tool_uses: list[ToolUse]
    logprobs: list[ScoredToken] | None
    thought: str = ""
    stopped_by: str | None = None


class Reply(Protocol):
    """Renders one request's answer. Stream methods return whole SSE events, several at a time, or b"" for what the
    dialect does not show."""

    def begin(self, running: RunningUsage) -> bytes:
        """The first events of a stream, once its model has begun with the prompt. `running` goes on counting."""
        ...

    def text(self, choice: int, text: str, logprobs: list[ScoredToken]) -> bytes: ...

    def thought(self, choice: int, text: str) -> bytes:
        """A piece of the reasoning, which comes before the text."""
        ...

    def call(self, choice: int, number: int, use: ToolUse) -> bytes:
        """The beginning of the choice's tool call of this number; its arguments are still empty."""
        ...

    def arguments(self, choice: int, number: int, fragment: str) -> bytes:
        """A piece of the JSON text of the call's arguments."""
        ...

    def called(self, choice: int, number: int, use: ToolUse) -> bytes:
        """The end of a tool call, with all its arguments."""
        ...

    def finish(self, choice: int, reason: str, stopped_by: str | None) -> bytes:
        """The end of a choice: stop (by this stop string, if any), length, tool_calls, or quota where a limit of
        neurons had no more."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The last events of a stream that ended well, [DONE] included."""
        ...

    def fail(self, refusal: ApiError, request_id: str) -> bytes:
        """The last events of a stream that failed, before or after it began."""
        ...

    def whole(self, completions: list[Completion], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...


def enveloped(result: dict[str, Any]) -> dict[str, Any]:
    """A result in the envelope of `/ai/run`."""
    return {"result": result, "success": True, "errors": [], "messages": []}
