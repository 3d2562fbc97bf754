"""The tool-call formats of model families, and the one that a model has. It does not know requests."""

import re
from collections.abc import Mapping
from typing import Final

from gateway.tool_parsers.deepseek_kimi import DEEPSEEK, DEEPSEEK_FENCED, KIMI
from gateway.tool_parsers.harmony import CHANNEL, HARMONY, MESSAGE
from gateway.tool_parsers.hermes_llama import EMBER, HERMES, LLAMA_JSON
from gateway.tool_parsers.mistral import MISTRAL_LIST, MISTRAL_NAMED
from gateway.tool_parsers.pythonic import PYTHONIC
from gateway.tool_parsers.qwen_coder import QWEN_CODER
from gateway.tool_parsers.tool_format import ToolFormat

# By name, without the tokens of any model.
TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    format.name: format
    for format in (
        *(DEEPSEEK, DEEPSEEK_FENCED, EMBER, HARMONY, HERMES, KIMI),
        *(LLAMA_JSON, MISTRAL_LIST, MISTRAL_NAMED, PYTHONIC, QWEN_CODER),
    )
}


def tool_format_of(template: str, tokens: Mapping[str, int]) -> ToolFormat | None:
    """The format of the model with this chat template (its source) and these added tokens; None: none that is known."""
    format = _format(template, tokens)
    return None if format is None else format.with_tokens(tokens)


def _format(template: str, tokens: Mapping[str, int]) -> ToolFormat | None:
    if CHANNEL in template and MESSAGE in template:
        return HARMONY
    # The first template of Kimi K2 had no place for calls, though the model writes them.
    if "<|tool_call_argument_begin|>" in template or "<|tool_call_argument_begin|>" in tokens:
        return KIMI
    if "<｜tool▁calls▁begin｜>" in template:
        return DEEPSEEK_FENCED if "```json" in template else DEEPSEEK
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL_LIST
    if "<function=" in template and "<parameter=" in template:
        return QWEN_CODER
    if "<tool_call>" in template:
        return None if "<arg_key>" in template else HERMES  # GLM puts something else between the same tags
    if re.search(r"\[\w*func\w*\(", template):
        return PYTHONIC
    llama = "<|start_header_id|>" in template or "<|header_start|>" in template
    if llama and re.search(r"""["']parameters\\?["']: """, template):
        return LLAMA_JSON
    if re.search(r"""\{\\?["']name\\?["']: """, template) and re.search(r"""["']arguments\\?["']: """, template):
        return EMBER
    return None
