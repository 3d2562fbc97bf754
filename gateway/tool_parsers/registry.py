"""The tool-call formats of model families: the one that a model has, and what each can do.

It does not know requests, nor how text becomes tokens.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from engine.protocol.types import Grammar
from gateway.tool_parsers.deepseek import DeepSeekFencedFormat, DeepSeekFormat
from gateway.tool_parsers.ember import EmberFormat
from gateway.tool_parsers.hermes import HermesFormat
from gateway.tool_parsers.kimi import KimiFormat
from gateway.tool_parsers.llama import LlamaJsonFormat
from gateway.tool_parsers.mistral import MistralListFormat, MistralNamedFormat
from gateway.tool_parsers.parts import OutputParser
from gateway.tool_parsers.pythonic import PythonicFormat
from gateway.tool_parsers.qwen_coder import QwenCoderFormat
from gateway.tool_parsers.types import ToolSelection


class ToolFormat(Protocol):
    """How a family of models writes calls of tools.

    `markers` are the spellings that its parser looks for: a decoder must show them even where they are control tokens.
    Tools are dictionaries in OpenAI's shape, as chat templates read them.
    """

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> frozenset[str]: ...

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> OutputParser: ...

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolSelection, parallel: bool) -> Grammar | None:
        """What the answer must be, so that the calls in it are valid by their tools' schemas: nothing but one call
        (several if `parallel`) where they are required; with `auto`, text until they begin. None: nothing is to be held
        to, or it cannot be: the format's calls begin like text. Raises ApiError for a tool that it cannot hold to."""
        ...


# By name; each is made from the added tokens of a model's tokenizer, their ids by their spellings.
TOOL_FORMATS: Final[Mapping[str, Callable[[Mapping[str, int]], ToolFormat]]] = {
    format.name: format
    for format in (
        *(DeepSeekFormat, DeepSeekFencedFormat, EmberFormat, HermesFormat, KimiFormat),
        *(LlamaJsonFormat, MistralListFormat, MistralNamedFormat, PythonicFormat, QwenCoderFormat),
    )
}


def tool_format_of(template: str, tokens: Mapping[str, int]) -> ToolFormat | None:
    """The format of the model with this chat template (its source) and these added tokens; None: none that is known."""
    name = _name(template, tokens)
    return None if name is None else TOOL_FORMATS[name](tokens)


def _name(template: str, tokens: Mapping[str, int]) -> str | None:
    # The first template of Kimi K2 had no place for calls, though the model writes them.
    if "<|tool_call_argument_begin|>" in template or "<|tool_call_argument_begin|>" in tokens:
        return KimiFormat.name
    if "<｜tool▁calls▁begin｜>" in template:
        return (DeepSeekFencedFormat if "```json" in template else DeepSeekFormat).name
    if "[TOOL_CALLS]" in template:
        return (MistralNamedFormat if "[ARGS]" in template else MistralListFormat).name
    if "<function=" in template and "<parameter=" in template:
        return QwenCoderFormat.name
    if "<tool_call>" in template:
        return None if "<arg_key>" in template else HermesFormat.name  # GLM puts something else between the same tags
    if re.search(r"\[\w*func\w*\(", template):
        return PythonicFormat.name
    llama = "<|start_header_id|>" in template or "<|header_start|>" in template
    if llama and re.search(r"""["']parameters\\?["']: """, template):
        return LlamaJsonFormat.name
    if re.search(r"""\{\\?["']name\\?["']: """, template) and re.search(r"""["']arguments\\?["']: """, template):
        return EmberFormat.name
    return None
