"""What a caller asks of a text model, checked and in one shape whichever dialect it came in.

It does not know JSON paths, accounts or replicas; dialects make it, `pipeline` serves it.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engine.protocol.types import Grammar, SamplingParams
from gateway.inference.run_options import RunOptionsBody
from gateway.tool_parsers.tool_schema import ToolSelection

SEED_BITS: Final = 62  # choice i samples with seed + i, and the sum stays below 2**63
AUTO: Final = ToolSelection()


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request that cannot be wrong, short of what only the model knows: its vocabulary and its context.

    Exactly one of `text`, `messages` and `ids` is set. `raw` text skips the chat template; `ids` are tokens.
    `user` is the caller's own word for whom it asks; it may keep cached prefixes apart, and is kept nowhere.
    `messages` and `tools` are what a chat template reads: role, content (str), tool_calls, tool_call_id, name; so are
    `template_options`, its further variables. `parallel_calls` allows several calls in one answer; with `strict_calls`
    their arguments are held to the tools' schemas even where the model need not call any.
    `grammar` is what the answer's text must be, and `grammar_field` the field that says so; `json`: it is a document.
    `max_tokens` None is as many as the model's catalogue entry gives. `field_names` are the dialect's for fields that
    may turn out to be wrong later, where they are not those of chat completions.
    `options` are what the body says of how the call is run, where it has a place for that.
    """

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    raw: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolSelection = AUTO
    parallel_calls: bool = True
    strict_calls: bool = False
    template_options: dict[str, Any] = {}
    grammar: Grammar | None = None
    grammar_field: str = "response_format"
    json: bool = False
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    n: int = 1
    stop: list[str] = []
    stream: bool = False
    include_usage: bool = False
    padded: bool = True
    options: RunOptionsBody | None = None
    user: str | None = None
    field_names: Mapping[str, str] = {}

    def field_name(self, field: str) -> str:
        """What the caller's dialect calls a field of chat completions."""
        return self.field_names.get(field, field)

    @property
    def length(self) -> int:
        """Characters of text in it, those of tools and calls left out."""
        if self.messages is None:
            return len(self.text or "")
        return sum(len(message["content"]) for message in self.messages)
