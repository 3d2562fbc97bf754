"""What holds of all formats: recorded and generated completions, cut at every character and at random."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tool_parsers.registry import TOOL_FORMATS, tool_format_of
from gateway.tool_parsers.scanner import CALLS_MAX
from gateway.tool_parsers.tool_schema import ToolSelection
from tests.support.call_reading import check, cut, parser, read
from tests.support.recorded_calls import RECORDED, Recorded

FORMAT_NAMES = sorted(TOOL_FORMATS)
PIECES = sorted(
    {marker for format in TOOL_FORMATS.values() for marker in format.markers}
    | {'{"name": "', '"arguments": ', '"parameters": ', '{"city": "Rome"}', '{"id": "x", ', "}", "{", "[", "]", "("}
    | {"<function=", ">", "<parameter=", "</parameter>", "</function>", "<tool_", "</to", "city=", "days=", "3", ", "}
    | {
        "```json",
        "```",
        "functions.",
        ":0",
        "get_weather",
        "now",
        "now()",
        "\n",
        " ",
        "\\",
        '"',
        "'",
        "\\u12",
        "\\ud83d",
    }
    | {"true", "None", ";", "é", "[TOOL", "<｜tool▁call▁", "-1.5e3", "\x00"}
)
completions = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)
recorded_broken = st.builds(
    lambda recorded, at, other, size: recorded.completion[:at] + other + recorded.completion[at + size :],
    st.sampled_from(RECORDED),
    st.integers(0, 200),
    completions,
    st.integers(0, 20),
)


def random_cuts(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(at, len(text)) for at in cuts} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.format)
def test_a_recorded_completion_is_read_whatever_its_cuts(recorded: Recorded) -> None:
    for size in (1, 2, 3, 5, 11, 1000):
        found = read(parser(recorded.format), cut(recorded.completion, size))
        assert (found.text, found.values) == (recorded.text, recorded.calls)
    for at in range(len(recorded.completion)):
        found = read(parser(recorded.format), [recorded.completion[:at], recorded.completion[at:]])
        assert (found.text, found.values) == (recorded.text, recorded.calls)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.format)
def test_a_completion_that_stops_anywhere_loses_nothing_that_it_said(recorded: Recorded) -> None:
    for end in range(len(recorded.completion)):
        text = recorded.completion[:end]
        found = check(recorded.format, text, cut(text, 1))
        ended = [(name, json.loads(arguments)) for name, arguments, ended in found.calls if ended]
        assert ended == recorded.calls[: len(ended)]


@pytest.mark.parametrize("format", FORMAT_NAMES)
@settings(max_examples=150, deadline=None)
@given(completions | recorded_broken, st.lists(st.integers(0, 300), max_size=8))
def test_whatever_a_model_writes_is_read_the_same_in_any_pieces(format: str, text: str, cuts: list[int]) -> None:
    check(format, text, cut(text, 1))
    check(format, text, random_cuts(text, cuts))


arguments = st.dictionaries(
    st.sampled_from(["city", "unit", "a b", "é", "x"]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


def written(format: str, calls: list[tuple[str, str]]) -> str:
    """Calls with the text of their arguments, as a model of a JSON format writes them."""
    match format:
        case "ember":
            return "\n".join(f'{{"name": "{name}", "arguments": {said}}}' for name, said in calls)
        case "llama3_json":
            return "; ".join(f'{{"name": "{name}", "parameters": {said}}}' for name, said in calls)
        case "hermes":
            lines = (f'<tool_call>\n{{"name": "{name}", "arguments": {said}}}\n</tool_call>' for name, said in calls)
            return "\n".join(lines)
        case "mistral":
            inner = ", ".join(f'{{"name": "{name}", "arguments": {said}}}' for name, said in calls)
            return f"[TOOL_CALLS] [{inner}]"
        case "mistral_named":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{said}" for name, said in calls)
        case "harmony":
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{said}<|call|>"
                for name, said in calls
            )
        case "kimi":
            inner = "".join(
                f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{said}<|tool_call_end|>"
                for i, (name, said) in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
        case "deepseek":
            inner = "".join(
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{said}<｜tool▁call▁end｜>" for name, said in calls
            )
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
        case _:
            inner = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{said}\n```<｜tool▁call▁end｜>"
                for name, said in calls
            )
            return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


JSON_FORMATS = [name for name in FORMAT_NAMES if name not in ("pythonic", "qwen_coder")]


@pytest.mark.parametrize("format", JSON_FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["get_weather", "now"]), arguments), min_size=1, max_size=4),
    st.sampled_from([None, 2]),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_generated_calls_come_back_to_the_letter(
    format: str, calls: list[tuple[str, object]], indent: int | None, ascii: bool, cuts: list[int]
) -> None:
    texts = [(name, json.dumps(value, indent=indent, ensure_ascii=ascii)) for name, value in calls]
    text = written(format, texts)
    for pieces in (cut(text, 1), random_cuts(text, cuts)):
        found = read(parser(format), pieces)
        assert found.text == ""
        assert found.calls == [(name, said, True) for name, said in texts]


WITHIN_TEXT = [name for name in FORMAT_NAMES if TOOL_FORMATS[name].hold is None]  # others read all that is around calls


@pytest.mark.parametrize(
    "recorded", [r for r in RECORDED if r.calls and r.format in WITHIN_TEXT], ids=lambda recorded: recorded.format
)
def test_what_calls_no_offered_tool_is_text(recorded: Recorded) -> None:
    for choice in (ToolSelection("none"), ToolSelection("named", "tomorrow")):
        found = read(parser(recorded.format, choice=choice), cut(recorded.completion, 1))
        assert (found.text, found.calls) == (recorded.completion, [])


@pytest.mark.parametrize("format", [name for name in JSON_FORMATS if name in WITHIN_TEXT])
def test_calls_beyond_the_limit_are_text(format: str) -> None:
    text = written(format, [("now", "{}")] * (CALLS_MAX + 1))
    found = read(parser(format), cut(text, 7))
    assert len(found.calls) == CALLS_MAX
    assert "now" in found.text


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_arguments_stream_before_the_call_is_whole(format: str) -> None:
    text = written(format, [("get_weather", '{"city": "' + "Rome " * 100 + '"}')])
    begun = parser(format)
    assert len(begun.push(text[: text.index("Rome") + 250])) == 2  # ToolCallStart, ToolCallDelta


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_prose_is_given_out_as_it_comes(format: str) -> None:
    found = parser(format)
    assert [part for word in ("It ", "is ", "fine") for part in found.push(word)] != []
    assert found.finish() == []


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_broken_arguments_keep_all_the_rest_of_the_text(format: str) -> None:
    text = written(format, [("get_weather", '{"city": Rome}'), ("now", "{}")])
    (call,) = check(format, text, cut(text, 1)).calls
    assert call == ("get_weather", text[text.index('{"city"') :], False)


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_a_line_break_in_a_string_is_escaped(format: str) -> None:
    text = written(format, [("get_weather", '{"city": "New\nYork"}')])
    assert check(format, text, cut(text, 1)).values == [("get_weather", {"city": "New\nYork"})]


TEMPLATES = {
    "kimi": "<|tool_calls_section_begin|>...<|tool_call_argument_begin|>{{ tool_call['function']['arguments'] }}",
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'}}",
    "deepseek_fenced": "{{'<｜tool▁calls▁begin｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n'}}",
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "mistral_named": '{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}',
    "qwen_coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
    "hermes": '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>',
    "pythonic": "<|header_start|>Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
    "llama3_json": """<|start_header_id|>{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}""",
    "ember": """{{- '{"name": "' + function.name + '", "arguments": ' }}""",
    None: "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", list(TEMPLATES), ids=str)
def test_a_chat_template_tells_the_format(name: str | None) -> None:
    found = tool_format_of(TEMPLATES[name], {})
    assert (found and found.name) == name


def test_glm_writes_something_else_between_the_tags_of_hermes() -> None:
    assert tool_format_of("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>", {}) is None


def test_kimi_is_known_by_its_tokens_where_its_template_has_no_calls() -> None:
    found = tool_format_of("<|im_system|>tool_declare", {"<|tool_call_argument_begin|>": 7})
    assert found is not None
    assert found.name == "kimi"


def test_the_built_in_model_has_its_format() -> None:
    from gateway.catalogue.catalogue import BUILT_IN, folder_of, model_entries
    from gateway.settings.config import Config
    from gateway.text.tokenizer import ModelTokenizer

    entry = next(entry for entry in model_entries(Config()) if entry.name == BUILT_IN)
    settings = json.loads((folder_of(Config(), entry) / "tokenizer_config.json").read_text())
    found = tool_format_of(settings["chat_template"], {})
    assert ModelTokenizer(folder_of(Config(), entry)).supports_tools
    assert found is not None
    assert found.name == "ember"


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.format)
def test_a_format_names_all_control_tokens_that_it_writes(recorded: Recorded) -> None:
    plain = recorded.completion
    for marker in TOOL_FORMATS[recorded.format].markers:
        plain = plain.replace(marker, "")
    assert not any(edge in plain for edge in ("<|", "<｜", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "tool_call>"))
