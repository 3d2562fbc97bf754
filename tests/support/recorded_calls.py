"""Completions as models of each family write them, and what they say."""

from typing import Any, NamedTuple


class Recorded(NamedTuple):
    format: str
    completion: str
    text: str
    calls: list[tuple[str, Any]]
    loose: bool = False  # a form that models write, and that they are not held to


ROME = ("get_weather", {"city": "Rome"})
LIMA = ("get_weather", {"city": "Lima", "days": 3})
NOW: tuple[str, Any] = ("now", {})

RECORDED = [
    Recorded("ember", '{"name": "get_weather", "arguments": {"city": "Rome"}}', "", [ROME]),
    Recorded(
        "ember",
        '{"name": "get_weather", "arguments": {"city": "Lima", "days": 3}}\n{"name": "now", "arguments": {}}\n',
        "",
        [LIMA, NOW],
        loose=True,
    ),
    Recorded("ember", "It is sunny in Rome.", "It is sunny in Rome.", []),
    Recorded("llama3_json", '{"name": "get_weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    Recorded("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [NOW], loose=True),
    Recorded(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Lima", "days": 3}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [LIMA, NOW],
        loose=True,
    ),
    Recorded(
        "llama3_json",
        'I will look.<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}',
        "I will look.",
        [ROME],
        loose=True,
    ),
    Recorded(
        "harmony",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}',
        "",
        [ROME],
    ),
    Recorded(
        "harmony",
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>",
        "It rains.",
        [],
        loose=True,
    ),
    Recorded(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Lima", "days": 3}<|call|>',
        "I will look.",
        [LIMA],
        loose=True,
    ),
    Recorded("pythonic", '[get_weather(city="Rome")]', "", [ROME]),
    Recorded("pythonic", "[get_weather(city='Lima', days=3), now()]", "", [LIMA, NOW], loose=True),
    Recorded("pythonic", '<|python_start|>[get_weather(city="Rome")]<|python_end|>', "", [ROME], loose=True),
    Recorded(
        "pythonic",
        '[get_weather(city="Rome", exact=True, unit=None, wind={"knots": 1.5}, hours=[1, 2])]',
        "",
        [("get_weather", {"city": "Rome", "exact": True, "unit": None, "wind": {"knots": 1.5}, "hours": [1, 2]})],
        loose=True,
    ),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "",
        [ROME],
    ),
    Recorded(
        "hermes",
        'I will look that up.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lima", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "I will look that up.\n\n",
        [LIMA, NOW],
        loose=True,
    ),
    Recorded(
        "qwen_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nLima\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        [LIMA, NOW],
    ),
    Recorded(
        "qwen_coder",
        "Let me see.\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "Let me see.\n",
        [ROME],
        loose=True,
    ),
    Recorded(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Lima", "days": 3}, "id": "9Ae3bDc2F"}, '
        '{"name": "now", "arguments": {}, "id": "VvvODy9mT"}]',
        "",
        [LIMA, NOW],
        loose=True,
    ),
    Recorded("mistral_named", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}', "", [ROME, NOW]),
    Recorded("mistral_named", '[TOOL_CALLS]get_weather[CALL_ID]9Ae3bDc2F[ARGS]{"city": "Rome"}', "", [ROME]),
    Recorded("mistral_named", 'Well.[TOOL_CALLS]get_weather{"city": "Rome"}', "Well.", [ROME], loose=True),
    Recorded(
        "kimi",
        "I'll check.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Lima", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I'll check.",
        [LIMA, NOW],
    ),
    Recorded(
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Lima", "days": 3}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [LIMA, NOW],
    ),
    Recorded(
        "deepseek_fenced",
        "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Lima", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me look.",
        [LIMA, NOW],
    ),
]
