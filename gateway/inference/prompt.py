"""What a caller asks of a text model, checked and in one shape whichever dialect it came in.

It does not know JSON paths, accounts or replicas; dialects make it, `pipeline` serves it.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engine.protocol.types import Grammar, SamplingParams
from gateway.images.source import ImageSource
from gateway.inference.run_options import RunOptionsBody
from gateway.tool_parsers.tool_schema import ToolSelection

SEED_BITS: Final = 62  # choice i samples with seed + i, and the sum stays below 2**63
AUTO: Final = ToolSelection()
# What a model's generation_config.json may say of how it is sampled.
MODEL_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def left_to_model(**given: float | None) -> tuple[str, ...]:
    """The sampling parameters of which a body says nothing, so that the model's own are in force."""
    return tuple(name for name in MODEL_SAMPLING if given.get(name) is None)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request that cannot be wrong, short of what only the model knows: its vocabulary and its context.

    Exactly one of `text`, `messages` and `ids` is set. `raw` text skips the chat template; `ids` are tokens.
    `images` are those of `messages`, in their order: the content of such a message is a list of parts, of which
    those of type image stand for them.
    `user` is the caller's own word for whom it asks; it may keep cached prefixes apart, and is kept nowhere.
    `messages` and `tools` are what a chat template reads: role, content, tool_calls, tool_call_id, name; so are
    `template_options`, its further variables. `parallel_calls` allows several calls in one answer; with `strict_calls`
    their arguments are held to the tools' schemas even where the model need not call any.
    `grammar` is what the answer's text must be, and `grammar_field` the field that says so; `json`: it is a document.
    `whole_only`: such an answer that is cut is an error, since the dialect's answers have no reason for their end.
    `max_tokens` None is as many as the model's catalogue entry gives. `field_names` are the dialect's for fields that
    may turn out to be wrong later, where they are not those of chat completions.
    `left_to_model` names the parameters of `sampling` for which the model's own count, where it has any.
    `options` are what the body says of how the call is run, where it has a place for that.
    """

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    images: tuple[ImageSource, ...] = ()
    raw: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolSelection = AUTO
    parallel_calls: bool = True
    strict_calls: bool = False
    template_options: dict[str, Any] = {}
    grammar: Grammar | None = None
    grammar_field: str = "response_format"
    json: bool = False
    whole_only: bool = False
    sampling: SamplingParams = SamplingParams()
    left_to_model: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    stop: list[str] = []
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # every event of a stream says what was generated so far
    padded: bool = True
    options: RunOptionsBody | None = None
    user: str | None = None
    field_names: Mapping[str, str] = {}

    def field_name(self, field: str) -> str:
        """What the caller's dialect calls a field of chat completions."""
        return self.field_names.get(field, field)

    def sampling_of(self, model: Mapping[str, float]) -> SamplingParams:
        """How the answer of a model is sampled that has these parameters of its own."""
        own = {name: model[name] for name in self.left_to_model if name in model}
        return msgspec.structs.replace(self.sampling, **own) if own else self.sampling

    @property
    def length(self) -> int:
        """Characters of text in it, those of tools and calls left out."""
        if self.messages is None:
            return len(self.text or "")
        contents = [message["content"] for message in self.messages]
        texts = [part.get("text", "") for content in contents if isinstance(content, list) for part in content]
        return sum(map(len, [*texts, *(content for content in contents if isinstance(content, str))]))
