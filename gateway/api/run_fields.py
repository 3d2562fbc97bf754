"""What bodies of `/ai/run` have in common, whichever family they are of: a prompt or messages, and what is not served.

It does not know sampling or answers.
"""

from dataclasses import dataclass
from typing import Any

from gateway import errors
from gateway.errors import bad_input
from gateway.inference.prompt import Message, chat_messages


@dataclass(frozen=True, slots=True)
class RunPrompt:
    """What the model gets: a text, which `raw` keeps from the chat template, or messages."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False


def run_prompt(prompt: str | None, messages: list[Message] | None, raw: bool | None) -> RunPrompt:
    """Raises Refusal where it is not one of both."""
    if (prompt is None) == (messages is None):
        matches = 0 if prompt is None else 2
        raise bad_input(f"oneOf at '/' not met, {matches} matches: send either 'prompt' or 'messages'", "prompt")
    if raw and messages is not None:
        raise bad_input("'raw' skips the chat template and goes with 'prompt' only; leave it out", "raw")
    return RunPrompt(prompt, None if messages is None else chat_messages(messages), bool(raw))


def refuse_lora(lora: object) -> None:
    """Raises Refusal where an adapter is asked for."""
    if lora is not None:
        raise errors.no_adapters()
