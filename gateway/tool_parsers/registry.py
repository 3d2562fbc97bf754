"""The tool-call formats of model families: which one a model has, and what each can do.

It does not know requests, nor how text becomes tokens.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from engine.protocol.types import Grammar
from gateway.tool_parsers.deepseek import DeepSeek, DeepSeekFenced
from gateway.tool_parsers.ember import Ember
from gateway.tool_parsers.hermes import Hermes
from gateway.tool_parsers.kimi import Kimi
from gateway.tool_parsers.llama import LlamaJson
from gateway.tool_parsers.mistral import MistralList, MistralNamed
from gateway.tool_parsers.parts import Parser
from gateway.tool_parsers.pythonic import Pythonic
from gateway.tool_parsers.qwen_coder import QwenCoder
from gateway.tool_parsers.types import ToolChoice


class Format(Protocol):
    """How a family of models writes calls of tools.

    `markers` are the spellings that its parser looks for: a decoder must show them even where they are control tokens.
    Tools are dictionaries in OpenAI's shape, as chat templates read them.
    """

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> frozenset[str]: ...

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> Parser: ...

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool) -> Grammar | None:
        """What the answer must be, so that the calls in it are valid by their tools' schemas: nothing but one call
        (several if `parallel`) where they are required; with `auto`, text until they begin. None: nothing is to be held
        to, or it cannot be: the format's calls begin like text. Raises Refusal for a tool that it cannot hold to."""
        ...


# By name; each is made from the added tokens of a model's tokenizer, their ids by their spellings.
FORMATS: Final[Mapping[str, Callable[[Mapping[str, int]], Format]]] = {
    format.name: format
    for format in (
        *(DeepSeek, DeepSeekFenced, Ember, Hermes, Kimi),
        *(LlamaJson, MistralList, MistralNamed, Pythonic, QwenCoder),
    )
}


def format_of(template: str, tokens: Mapping[str, int]) -> Format | None:
    """The format of the model with this chat template (its source) and these added tokens; None: none that is known."""
    name = _name(template, tokens)
    return None if name is None else FORMATS[name](tokens)


def _name(template: str, tokens: Mapping[str, int]) -> str | None:
    # The first template of Kimi K2 had no place for calls, though the model writes them.
    if "<|tool_call_argument_begin|>" in template or "<|tool_call_argument_begin|>" in tokens:
        return Kimi.name
    if "<｜tool▁calls▁begin｜>" in template:
        return (DeepSeekFenced if "```json" in template else DeepSeek).name
    if "[TOOL_CALLS]" in template:
        return (MistralNamed if "[ARGS]" in template else MistralList).name
    if "<function=" in template and "<parameter=" in template:
        return QwenCoder.name
    if "<tool_call>" in template:
        return None if "<arg_key>" in template else Hermes.name  # GLM puts something else between the same tags
    if re.search(r"\[\w*func\w*\(", template):
        return Pythonic.name
    llama = "<|start_header_id|>" in template or "<|header_start|>" in template
    if llama and re.search(r"""["']parameters\\?["']: """, template):
        return LlamaJson.name
    if re.search(r"""\{\\?["']name\\?["']: """, template) and re.search(r"""["']arguments\\?["']: """, template):
        return Ember.name
    return None
