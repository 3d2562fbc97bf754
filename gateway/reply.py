"""What a dialect makes of a completion: the types it gets, and the protocol both dialects fulfil.

It does not know where the tokens come from, nor how bytes reach the client.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. `cached_tokens` are those of the prompt that were read from the caller's own cache; `left`
    are the neurons that its limits have left, by the limit's name. `cut` is whether one of these ended it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    neurons: float
    left: dict[str, float] = field(default_factory=dict)
    cut: bool = False

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "neurons": self.neurons,
        }

    def last_fields(self) -> dict[str, Any]:
        """The same for the last event of a stream, whose head told what was left when it began."""
        return {**self.fields(), "neurons_left": self.left}


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token with its log probability (natural) and the alternatives, best first."""

    token: str
    raw: bytes
    logprob: float
    top: "list[Chosen]" = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call that the model asks for; `id` names it in the next turn."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice. `finish` is stop, length, tool_calls or quota."""

    text: str
    finish: str
    tool_uses: list[ToolUse]
    logprobs: list[Chosen] | None


class Reply(Protocol):
    """Renders one request's answer. Stream methods return whole SSE events, several or none at a time."""

    def begin(self) -> bytes:
        """Before anything else of a stream."""
        ...

    def text(self, choice: int, text: str, logprobs: list[Chosen]) -> bytes: ...

    def tools(self, choice: int, uses: list[ToolUse]) -> bytes: ...

    def finish(self, choice: int, reason: str) -> bytes:
        """The choice ended: stop, length, tool_calls, or quota where a limit of neurons had no more."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The last events of a stream that ended well, [DONE] included."""
        ...

    def whole(self, completions: list[Completion], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class Dialect(Protocol):
    """A module that reads one family of request bodies and writes its answers: `run` or `openai`."""

    def parse(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> tuple[str, Prompt]:
        """The model's name and the prompt. `model` is what the path names, where it does. Raises Refusal."""
        ...

    def reply(self, prompt: Prompt, model: str, request_id: str, created: int) -> Reply: ...
