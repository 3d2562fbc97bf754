"""What reading calls in a completion costs, by format: µs of processor time for each piece of four characters, about
one token.

    python -m benchmarks.gateway.tool_parsers

Each format reads prose in which no call comes, and one call with long text in its arguments; then arguments that are
mostly punctuation, the worst there is. The best of several runs counts.
"""

import json
import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks.record import record
from gateway.inference.prompt import AUTO
from gateway.tool_parsers.parts import OutputParser
from gateway.tool_parsers.reasoning import ReasoningParser
from gateway.tool_parsers.registry import TOOL_FORMATS

RUNS: Final = 9
PIECE: Final = 4
TOOLS: Final[list[dict[str, Any]]] = [
    {"type": "function", "function": {"name": "write", "parameters": {"properties": {"text": {"type": "string"}}}}}
]
PROSE: Final = "The quick brown fox jumps over the lazy dog, again and again. " * 200
DENSE: Final = [{"k": [1, True, None], "n": {"a": "b"}}] * 300


def call(format: str, value: object) -> str:
    """A call of `write` with one argument, as a model of this format writes it."""
    encoded = json.dumps({"text": value})
    match format:
        case "pythonic":
            return f"[write(text={value!r})]"
        case "qwen_coder":
            text = value if isinstance(value, str) else json.dumps(value)
            return f"<tool_call>\n<function=write>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>"
        case "hermes":
            return f'<tool_call>\n{{"name": "write", "arguments": {encoded}}}\n</tool_call>'
        case "mistral":
            return f'[TOOL_CALLS] [{{"name": "write", "arguments": {encoded}}}]'
        case "mistral_named":
            return f"[TOOL_CALLS]write[ARGS]{encoded}"
        case "kimi":
            inner = f"functions.write:0<|tool_call_argument_begin|>{encoded}<|tool_call_end|>"
            return f"<|tool_calls_section_begin|><|tool_call_begin|>{inner}<|tool_calls_section_end|>"
        case "deepseek":
            inner = f"write<｜tool▁sep｜>{encoded}<｜tool▁call▁end｜>"
            return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case "deepseek_fenced":
            inner = f"function<｜tool▁sep｜>write\n```json\n{encoded}\n```<｜tool▁call▁end｜>"
            return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{inner}<｜tool▁calls▁end｜>"
    return f'{{"name": "write", "arguments": {encoded}}}'


def piece_us(parser: Callable[[], OutputParser], text: str) -> float:
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    best = float("inf")
    for _ in range(RUNS):
        reading = parser()
        began = time.process_time()
        for piece in pieces:
            reading.push(piece)
        reading.finish()
        best = min(best, time.process_time() - began)
    return round(best / len(pieces) * 1e6, 2)


def main() -> None:
    for name, tool_format in TOOL_FORMATS.items():
        for shape, text in (
            ("prose", PROSE),
            ("text in arguments", call(name, PROSE)),
            ("punctuation in arguments", call(name, DENSE)),
        ):
            record("calls", f"{name}, {shape}", piece_us(lambda: tool_format.parser(TOOLS, AUTO), text), "µs")  # noqa: B023
    thinking = TOOL_FORMATS["hermes"]
    for shape, text in (("thought", f"<think>{PROSE}</think>"), ("prose behind a thought", f"<think></think>{PROSE}")):
        record(
            "calls",
            f"hermes, {shape}",
            piece_us(lambda: ReasoningParser(thinking.parser(TOOLS, AUTO), False), text),
            "µs",
        )


if __name__ == "__main__":
    main()
