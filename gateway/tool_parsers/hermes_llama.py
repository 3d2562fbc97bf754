"""Calls that are JSON objects. Hermes and Qwen put each in tags of its own, Llama 3 has `parameters` for `arguments`,
"; " between calls, perhaps a tag before; Ember, and many a small model of other families, writes one a line."""

from collections.abc import Mapping
from typing import Final

from gateway.tool_parsers import call_grammar, json_calls
from gateway.tool_parsers.scanner import Scan, Scanner
from gateway.tool_parsers.tool_format import CallDelimiters, ToolFormat
from gateway.tool_parsers.tool_schema import FunctionSpec

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
# Llama 4 puts the latter two around text before its calls.
LLAMA_TAGS: Final = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")


def _read_hermes(scanner: Scanner, functions: Mapping[str, FunctionSpec]) -> Scan[None]:
    while (yield from scanner.read_text_until(BEGIN)) is not None:
        yield from scanner.skip_blank()
        if (yield from json_calls.read_call(scanner, functions)):
            yield from scanner.skip_blank()
            if (yield from scanner.accept(END)):
                scanner.discard()


def _hermes_delimiters(tokens: Mapping[str, int]) -> CallDelimiters:
    begin, end = call_grammar.marker(BEGIN, tokens), call_grammar.marker(END, tokens)
    return CallDelimiters(mark=begin, first='"\\n"', between=f'"\\n" {end} "\\n" {begin} "\\n"', last=f'"\\n" {end}')


HERMES: Final = ToolFormat(
    name="hermes",
    markers=frozenset({BEGIN, END}),
    read=_read_hermes,
    delimiters=_hermes_delimiters,
    write=call_grammar.object_rule_writer("arguments"),
)
LLAMA_JSON: Final = ToolFormat(
    name="llama3_json",
    markers=frozenset(LLAMA_TAGS),
    read=lambda scanner, functions: json_calls.read_call_sequence(scanner, functions, *LLAMA_TAGS),
    delimiters=lambda _: CallDelimiters(between='"; "'),
    write=call_grammar.object_rule_writer("parameters"),
)
EMBER: Final = ToolFormat(
    name="ember",
    read=json_calls.read_call_sequence,
    delimiters=lambda _: CallDelimiters(between='"\\n"'),
    write=call_grammar.object_rule_writer("arguments"),
)
