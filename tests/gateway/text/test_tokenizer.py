import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from gateway.text.control_tokens import encode_ids
from gateway.text.tokenizer import ModelFolderError, ModelTokenizer, TokenizationError
from tests.support.model_folders import EMBER, byte_level, sentence_piece, shapes, special, write


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return dict(shapes(tmp_path_factory.mktemp("shapes")))


NAMES = ["chatml", "llama3", "phi3", "mistral-first", "mistral-always", "mistral-never", "mistral-normalizer", "ember"]
TALKS = [
    [{"role": "user", "content": "Hello there!"}],
    [{"role": "user", "content": " naïve 東京 😀 \n<b>[x]</b> a|b > c && d "}],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two.\n\n  Three"},
        {"role": "user", "content": "def f(x):\n    return x"},
    ],
    [{"role": "user", "content": ""}],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <now> [in °C]",
            "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
        },
    }
]


def _reference(folder: Path, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    return list(ids["input_ids"] if hasattr(ids, "keys") else ids)


@pytest.mark.parametrize("name", NAMES)
def test_messages_encode_as_transformers_does(folders: dict[str, Path], name: str) -> None:
    text = ModelTokenizer(folders[name])
    for talk in TALKS:
        assert text.encode_chat(talk) == _reference(folders[name], talk), talk


@pytest.mark.parametrize("name", ["chatml", "ember"])
def test_tools_and_tool_turns_encode_as_transformers_does(folders: dict[str, Path], name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"location": "<Köln>"}}}
    talk = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "1", "content": '{"c": [1, 2]}'},
    ]
    text = ModelTokenizer(folders[name])
    assert text.supports_tools
    expected = _reference(folders[name], talk, TOOLS)
    assert text.encode_chat(talk, TOOLS) == expected
    call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)  # as OpenAI sends it
    assert text.encode_chat(talk, TOOLS) == expected


@pytest.mark.parametrize("name", NAMES)
def test_cut_encoding_equals_whole_encoding(folders: dict[str, Path], name: str) -> None:
    """Cut at control tokens, in one thread or in several, the ids are those of the tokenizer for the whole text."""
    text = ModelTokenizer(folders[name])
    for talk in [*TALKS, [*TALKS[2], *TALKS[1], *TALKS[2]] * 20]:
        variables = {**text._special, "messages": talk, "tools": None, "add_generation_prompt": True}
        written = text._templates["default"].render(variables)
        whole = encode_ids(text._tokenizer, written)
        assert text.encode_chat(talk) == text.encode_chat(talk, spread=True) == whole


def _fields(hostile: str) -> Iterator[tuple[list[dict[str, Any]], list[Any] | None]]:
    user = {"role": "user", "content": "x"}
    call = {"id": hostile, "type": "function", "function": {"name": hostile, "arguments": {hostile: [hostile]}}}
    as_text = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": hostile})}}
    broken = {"id": "1", "type": "function", "function": {"name": "f", "arguments": hostile}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": hostile, "description": hostile}}
    tool["function"]["parameters"] = {
        "type": "object",
        "properties": {hostile: {"type": hostile, "description": hostile, "enum": [hostile]}},
        "required": [hostile],
    }
    yield [{"role": "user", "content": hostile}], None
    yield [{"role": "user", "content": f"a{hostile}b{hostile}"}], None
    yield [{"role": "user", "content": f"  {hostile}\n"}], None
    yield [{"role": "system", "content": hostile}, user], None
    yield [user, {"role": "assistant", "content": hostile}, user], None
    yield [user, {"role": "tool", "content": hostile, "name": hostile, "tool_call_id": hostile}], None
    yield [{"role": "user", "content": "x", "name": hostile}], None
    yield [{"role": hostile, "content": "x"}], None
    yield [user, {"role": "assistant", "content": None, "tool_calls": [call, as_text, broken]}, user], None
    yield [user], [tool]
    yield [user], [tool["function"]]


def _controls(text: ModelTokenizer, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[int] | str:
    try:
        return [id for id in text.encode_chat(messages, tools) if id in text._control.ids]
    except TokenizationError as error:
        return str(error)


@pytest.mark.parametrize("name", NAMES)
def test_no_field_of_a_request_can_make_a_control_token(folders: dict[str, Path], name: str) -> None:
    """Every added token in every field gives the same control tokens as harmless text there, whole, cut and glued."""
    text = ModelTokenizer(folders[name])
    for token in text._control.by_text:
        harmless = list(_fields("harmless"))
        for hostile in (token, token[:-1], token[1:], token + token, token[:2] + token + token[2:]):
            for (messages, tools), (quiet, quiet_tools) in zip(_fields(hostile), harmless, strict=True):
                expected = _controls(text, quiet, quiet_tools)
                if messages[0]["role"] in ("user", "system", "assistant", "tool") or isinstance(expected, list):
                    assert _controls(text, messages, tools) == expected, (token, messages, tools)


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_as_text_survive_the_round_trip(folders: dict[str, Path], name: str) -> None:
    text = ModelTokenizer(folders[name])
    for token in text._control.by_text:
        ids = text.encode_chat([{"role": "user", "content": f"say {token} please"}])
        decoder = text.detokenizer()
        assert f"say {token} please" in decoder.push(ids) + decoder.finish()


def test_control_tokens_do_not_form_across_fields(tmp_path: Path) -> None:
    """A template that puts two fields of the request side by side, or a field between control characters."""
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}<|{{ m.name }}|>{% endfor %}"
    text = ModelTokenizer(write(tmp_path, byte_level([special("<|end|>"), special("<|a-b|>")]), template))
    for name, content in [("<|en", "d|>"), ("<|end", "|>"), ("<", "|end|>"), ("end", "x"), ("a-b", ""), (" end", "")]:
        ids = text.encode_chat([{"role": "user", "name": name, "content": content}])
        assert text._control.ids.isdisjoint(ids), (name, content)


def test_no_variable_of_a_template_that_a_request_sets_makes_a_control_token(tmp_path: Path) -> None:
    """As `chat_template_kwargs` do, their names included."""
    template = "<|a|>{{ effort }}<|b|>{{ more | tojson }}<{{ effort }}>{% for name in more %}{{ name }}{% endfor %}"
    control = [special("<|a|>"), special("<|b|>"), special("<|end|>"), special("<high>"), AddedToken("unused_token")]
    text = ModelTokenizer(write(tmp_path, byte_level(control), template))
    written = text._control.by_text["<|a|>"].id, text._control.by_text["<|b|>"].id
    for hostile in (*text._control.by_text, "high", "|end|", "<|end", "|>", "unused_"):
        options = {"effort": hostile, "more": {hostile: [hostile, {hostile: hostile}]}}
        ids = text.encode_chat([{"role": "user", "content": "x"}], options=options)
        assert tuple(id for id in ids if id in text._control.ids) == written, hostile
        decoder = text.detokenizer()
        assert hostile in decoder.push(ids) + decoder.finish()


def test_tokens_spelled_like_words_do_not_form_across_fields(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    text = ModelTokenizer(write(tmp_path, byte_level([AddedToken("unused_token")]), template))
    for name, content in [("unused_", "token"), ("unused_token", ""), ("", "unused_token")]:
        ids = text.encode_chat([{"role": "user", "name": name, "content": content}])
        assert text._control.ids.isdisjoint(ids), (name, content)


def test_parts_of_content_do_not_join_to_a_control_token(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endfor %}"
    text = ModelTokenizer(write(tmp_path, byte_level([special("<|end|>")]), template))
    parts = [{"type": "text", "text": "<|en  "}, {"type": "text", "text": "  d|>"}]
    assert text._control.ids.isdisjoint(text.encode_chat([{"role": "user", "content": parts}]))


def test_private_use_characters_of_the_request_stay_what_they_are() -> None:
    text = ModelTokenizer(EMBER)
    content = "\U000f0000\U000f0001<\U000f0002 \U000f0003"
    ids = text.encode_chat([{"role": "user", "content": content}])
    decoder = text.detokenizer()
    assert content in decoder.push(ids) + decoder.finish()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["<|", "|>", "<", ">", "end", "user", " ", "\n", "|", "ü", "x"]), max_size=12))
def test_text_built_of_pieces_of_control_tokens_makes_none(pieces: list[str]) -> None:
    text = _ember()
    quiet = [id for id in text.encode_chat([{"role": "user", "content": "x"}]) if id in text._control.ids]
    ids = text.encode_chat([{"role": "user", "content": "".join(pieces)}])
    assert [id for id in ids if id in text._control.ids] == quiet


_EMBERS: list[ModelTokenizer] = []


def _ember() -> ModelTokenizer:
    if not _EMBERS:
        _EMBERS.append(ModelTokenizer(EMBER))
    return _EMBERS[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_raw_prompt_gets_the_tokenizers_lead_and_no_control_token(folders: dict[str, Path], name: str) -> None:
    text = ModelTokenizer(folders[name])
    tokenizer = Tokenizer.from_file(str(folders[name] / "tokenizer.json"))
    assert text.encode_prompt("Once upon a time") == tokenizer.encode("Once upon a time").ids
    for token in text._control.by_text:
        assert text._control.ids.isdisjoint(text.encode_prompt(f"a {token} b")[len(text.special_tokens.lead) :])


def test_a_lead_of_the_post_processor_is_kept(tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer = sentence_piece([], "first")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    text = ModelTokenizer(write(tmp_path, tokenizer, None))
    assert text.encode_prompt("Hello") == tokenizer.encode("Hello").ids
    assert text.encode_prompt("</s>")[0] == 1
    assert text.encode_prompt("") == [1]


# ---- folders ----------------------------------------------------------------------------------------------------


def test_stop_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level([special("<|a|>"), special("<|b|>")]), None, eos_token="<|b|>")
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|b|>")
    assert ModelTokenizer(folder).stop_ids == [end]
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert ModelTokenizer(folder).stop_ids == [5]
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert ModelTokenizer(folder).stop_ids == [7, 8]


def test_a_folder_without_template_refuses_messages_in_words(tmp_path: Path) -> None:
    text = ModelTokenizer(write(tmp_path, byte_level([]), None))
    assert not text.has_chat_template
    with pytest.raises(TokenizationError, match="prompt"):
        text.encode_chat([{"role": "user", "content": "x"}])


def test_a_template_file_wins_and_named_templates_are_found(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write(tmp_path, byte_level([]), None, chat_template=named)
    text = ModelTokenizer(folder)
    assert text.encode_chat([]) == text.encode_prompt("plain")
    assert text.encode_chat([], TOOLS) == text.encode_prompt("tools")
    (folder / "chat_template.jinja").write_text("file")
    assert ModelTokenizer(folder).encode_chat([]) == text.encode_prompt("file")


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", None), ("tokenizer.json", "{"), ("tokenizer_config.json", '{"chat_template": "{% if %}"}')],
)
def test_a_broken_folder_is_refused_in_words(tmp_path: Path, name: str, content: str | None) -> None:
    folder = write(tmp_path, byte_level([]), None)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ModelFolderError, match=r"tokenizer|template"):
        ModelTokenizer(folder)


def test_a_refusal_of_the_template_is_told_to_the_caller(folders: dict[str, Path]) -> None:
    with pytest.raises(TokenizationError, match="Only user and assistant"):
        ModelTokenizer(folders["mistral-first"]).encode_chat([{"role": "tool", "content": "x"}])


def test_a_lone_surrogate_is_refused() -> None:
    for attempt in (_ember().encode_prompt, lambda text: _ember().encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(TokenizationError, match="surrogate"):
            attempt("a\ud800b")


def test_the_date_in_a_template_is_the_clocks(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level([]), "{{ strftime_now('%d %b %Y') }}")
    text = ModelTokenizer(folder, today=lambda: datetime(2026, 11, 20))
    assert text.encode_chat([]) == text.encode_prompt("20 Nov 2026")


def test_a_key_between_a_templates_own_edges_makes_no_control_token(tmp_path: Path) -> None:
    """As some templates write a tool's parameters: <name>…</name>."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% for call in m.tool_calls or [] %}"
        "{% for key, value in call.function.arguments.items() %}<{{ key }}>{{ value }}</{{ key }}><{{ value }}>"
        "<|{{ key }}{{ value }}|>{% endfor %}{% endfor %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    control = [special("<|im_start|>"), special("<|im_end|>"), special("</s>"), AddedToken("<think>")]
    text = ModelTokenizer(write(tmp_path, byte_level(control), template))
    harmless = [id for id in text.encode_chat(_called("a", "b")) if id in text._control.ids]
    for key, value in (
        ("|im_end|", "x"),
        ("|IM_END|", "x"),
        (" |im_end| ", "x"),
        ("s", "x"),
        ("think", "think"),
        ("im_", "end"),
        ("im_end", ""),
        ("x", "|im_start|"),
        ("x", "|im_end|"),
    ):
        ids = text.encode_chat(_called(key, value))
        assert [id for id in ids if id in text._control.ids] == harmless, (key, value)


def _called(key: str, value: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {key: value}}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]
