"""The grammar that a replica holds an answer to: the caller's, the one of tool calls, or either of both.

It knows prompts and formats of tool calls, and no replica.
"""

from typing import Any, Final

import msgspec

from engine.protocol.types import Grammar, GrammarKind
from gateway.errors import ApiError, bad_grammar, bad_input
from gateway.inference.prompt import AUTO, Prompt
from gateway.tool_parsers import call_grammar
from gateway.tool_parsers.tool_format import ToolFormat
from gateway.tool_parsers.tool_schema import ToolSelection

_ANSWER: Final = "start: answer\nanswer: "  # the beginning of every grammar of calls
_REQUIRED: Final = ToolSelection("required")


def answer_grammar(prompt: Prompt, format: ToolFormat | None, model: str) -> Grammar | None:
    """The grammar of the whole answer; `format` is how the model writes calls. Where a call must be made, the answer
    has no text, and a grammar for text holds for nothing. Raises ApiError for combinations that no grammar can hold."""
    if not prompt.tools:
        return prompt.grammar
    if format is None:
        raise bad_input(f"'tools': how {model} writes calls is not known here; leave them out", "tools")
    choice, parallel = prompt.tool_choice, prompt.parallel_calls
    if choice.mode in ("required", "named"):
        grammar = format.grammar(prompt.tools, choice, parallel)
        assert grammar is not None, "a call that must be made has a grammar"
        return grammar
    if prompt.grammar is not None:
        return _either(prompt.tools, prompt.grammar, prompt, format)
    return format.grammar(prompt.tools, choice, parallel) if prompt.strict_calls else None


def _either(tools: list[dict[str, Any]], document: Grammar, prompt: Prompt, format: ToolFormat) -> Grammar:
    """Calls, or a document. Raises ApiError where the grammar is not of a document, or where calls may begin as a
    document does: the library takes the longest piece that it can, and would see no document there."""
    marked = format.grammar(tools, AUTO, prompt.parallel_calls) is not None
    if document.kind is not GrammarKind.JSON_SCHEMA or not marked:
        problem = "goes with 'tools' for this model only where 'tool_choice' is 'none'; leave one of them out"
        raise bad_input(f"'{prompt.grammar_field}' {problem}", prompt.grammar_field)
    calls = format.grammar(tools, _REQUIRED, prompt.parallel_calls)
    assert calls is not None
    assert calls.source.startswith(_ANSWER)
    head = f"{_ANSWER}document | called\ndocument: %json {document.source}\ncalled: "
    return msgspec.structs.replace(calls, source=head + calls.source.removeprefix(_ANSWER))


def grammar_error(prompt: Prompt, grammar: Grammar | None, message: str) -> ApiError:
    """A replica's error in the caller's words: it names the field, and the tool at fault where that is known."""
    if not prompt.tools or grammar is None:
        return bad_grammar(prompt.grammar_field, message)
    tool = call_grammar.tool_at_fault(grammar.source, message)
    if tool is None and prompt.grammar is not None and prompt.tool_choice.mode == "auto":
        return bad_grammar(prompt.grammar_field, message)
    subject = "" if tool is None else f"the parameters of {tool!r}: "
    return bad_grammar(prompt.field_name("tools"), subject + message)
