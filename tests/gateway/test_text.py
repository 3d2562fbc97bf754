import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gateway.catalogue import BUILT_IN, folder_of
from gateway.config import ModelConfig, load_config
from gateway.template import Template, TemplateError
from gateway.text import Decoder, FolderError, Text, TextError

EMBER = folder_of(load_config(), ModelConfig(name=BUILT_IN))
CORPUS = [
    "The quick brown fox jumps over the lazy dog. You are a helpful assistant, aren't you?",
    "im start end system user assistant tool INST call <b> [x] | function get_weather location",
    "naïve café größe 東京 Привет 😀😃 0123456789 \n\n  def f(x):\n    return x",
] * 3

CHATML = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'tool' and m.content.startswith('<tool_response>') %}RAW{% endif %}"
    "{% if m.name %}{{ m.name }}: {% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% generation %}{{ m.content | trim }}{% endgeneration %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def _special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


def _byte_level(added: list[AddedToken]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def _sentence_piece(added: list[AddedToken], scheme: str) -> Tokenizer:
    """Like Llama 2's: "▁" for spaces, bytes as <0xHH>; specials inside the vocabulary as well."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocabulary = {name: id for id, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([_special("<s>"), _special("</s>"), _special("<unk>"), *added])
    return tokenizer


def _write(folder: Path, tokenizer: Tokenizer, template: str | None, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    document = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    if template is not None:
        document["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    return folder


def _shapes(root: Path) -> Iterator[tuple[str, Path]]:
    chat = [_special("<|im_start|>"), _special("<|im_end|>"), _special("<|endoftext|>")]
    plain = [AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)]
    plain += [AddedToken("<think>"), AddedToken("</think>"), AddedToken("unused_token")]
    yield "chatml", _write(root / "chatml", _byte_level(chat + plain), CHATML, eos_token="<|im_end|>")
    llama = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
    yield (
        "llama3",
        _write(
            root / "llama3",
            _byte_level([_special(text) for text in llama]),
            LLAMA3,
            bos_token={"content": "<|begin_of_text|>", "__type": "AddedToken"},
        ),
    )
    phi = [_special("<|user|>", rstrip=True), _special("<|assistant|>", rstrip=True), _special("<|end|>", rstrip=True)]
    phi += [_special("<|system|>", rstrip=True), _special("<|tool|>", lstrip=True)]
    yield "phi3", _write(root / "phi3", _byte_level(phi), PHI3)
    inst = [_special("[INST]"), _special("[/INST]")]
    for scheme in ("first", "always", "never", "normalizer"):
        tokenizer = _sentence_piece(inst, scheme)
        yield f"mistral-{scheme}", _write(root / scheme, tokenizer, MISTRAL, bos_token="<s>", eos_token="</s>")
    yield "ember", EMBER


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return dict(_shapes(tmp_path_factory.mktemp("shapes")))


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
    text = Text(folders[name])
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
    text = Text(folders[name])
    assert text.takes_tools
    expected = _reference(folders[name], talk, TOOLS)
    assert text.encode_chat(talk, TOOLS) == expected
    call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)  # as OpenAI sends it
    assert text.encode_chat(talk, TOOLS) == expected


@pytest.mark.parametrize("name", NAMES)
def test_cut_encoding_equals_whole_encoding(folders: dict[str, Path], name: str) -> None:
    """The slow way for hostile text is no other tokenization: forced for harmless text, it gives the same ids."""
    text = Text(folders[name])
    for talk in TALKS:
        whole = text.encode_chat(talk)
        escape = text._edges.escape_for(talk)
        variables = {**text._special, "messages": talk, "tools": None, "add_generation_prompt": True}
        written = text._template(None).render(variables)
        assert text._control.pattern is not None
        parts = [escape.restore(part) for part in text._control.pattern.split(written)]
        assert text._encode_cut(parts) == whole


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


def _controls(text: Text, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[int] | str:
    try:
        return [id for id in text.encode_chat(messages, tools) if id in text._control.ids]
    except TextError as error:
        return str(error)


@pytest.mark.parametrize("name", NAMES)
def test_no_field_of_a_request_can_make_a_control_token(folders: dict[str, Path], name: str) -> None:
    """Every added token in every field gives the same control tokens as harmless text there, whole, cut and glued."""
    text = Text(folders[name])
    for token in text._control.by_text:
        harmless = list(_fields("harmless"))
        for hostile in (token, token[:-1], token[1:], token + token, token[:2] + token + token[2:]):
            for (messages, tools), (quiet, quiet_tools) in zip(_fields(hostile), harmless, strict=True):
                expected = _controls(text, quiet, quiet_tools)
                if messages[0]["role"] in ("user", "system", "assistant", "tool") or isinstance(expected, list):
                    assert _controls(text, messages, tools) == expected, (token, messages, tools)


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_as_text_survive_the_round_trip(folders: dict[str, Path], name: str) -> None:
    text = Text(folders[name])
    for token in text._control.by_text:
        ids = text.encode_chat([{"role": "user", "content": f"say {token} please"}])
        decoder = text.decoder()
        assert f"say {token} please" in decoder.push(ids) + decoder.finish()


def test_control_tokens_do_not_form_across_fields(tmp_path: Path) -> None:
    """A template that puts two fields of the request side by side, or a field between control characters."""
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}<|{{ m.name }}|>{% endfor %}"
    text = Text(_write(tmp_path, _byte_level([_special("<|end|>"), _special("<|a-b|>")]), template))
    for name, content in [("<|en", "d|>"), ("<|end", "|>"), ("<", "|end|>"), ("end", "x"), ("a-b", ""), (" end", "")]:
        ids = text.encode_chat([{"role": "user", "name": name, "content": content}])
        assert text._control.ids.isdisjoint(ids), (name, content)


def test_tokens_spelled_like_words_do_not_form_across_fields(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    text = Text(_write(tmp_path, _byte_level([AddedToken("unused_token")]), template))
    for name, content in [("unused_", "token"), ("unused_token", ""), ("", "unused_token")]:
        ids = text.encode_chat([{"role": "user", "name": name, "content": content}])
        assert text._control.ids.isdisjoint(ids), (name, content)


def test_parts_of_content_do_not_join_to_a_control_token(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endfor %}"
    text = Text(_write(tmp_path, _byte_level([_special("<|end|>")]), template))
    parts = [{"type": "text", "text": "<|en  "}, {"type": "text", "text": "  d|>"}]
    assert text._control.ids.isdisjoint(text.encode_chat([{"role": "user", "content": parts}]))


def test_private_use_characters_of_the_request_stay_what_they_are() -> None:
    text = Text(EMBER)
    content = "\U000f0000\U000f0001<\U000f0002 \U000f0003"
    ids = text.encode_chat([{"role": "user", "content": content}])
    decoder = text.decoder()
    assert content in decoder.push(ids) + decoder.finish()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["<|", "|>", "<", ">", "end", "user", " ", "\n", "|", "ü", "x"]), max_size=12))
def test_text_built_of_pieces_of_control_tokens_makes_none(pieces: list[str]) -> None:
    text = _ember()
    quiet = [id for id in text.encode_chat([{"role": "user", "content": "x"}]) if id in text._control.ids]
    ids = text.encode_chat([{"role": "user", "content": "".join(pieces)}])
    assert [id for id in ids if id in text._control.ids] == quiet


_EMBERS: list[Text] = []


def _ember() -> Text:
    if not _EMBERS:
        _EMBERS.append(Text(EMBER))
    return _EMBERS[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_raw_prompt_gets_the_tokenizers_lead_and_no_control_token(folders: dict[str, Path], name: str) -> None:
    text = Text(folders[name])
    tokenizer = Tokenizer.from_file(str(folders[name] / "tokenizer.json"))
    assert text.encode_prompt("Once upon a time") == tokenizer.encode("Once upon a time").ids
    for token in text._control.by_text:
        assert text._control.ids.isdisjoint(text.encode_prompt(f"a {token} b")[len(text._lead) :])


def test_a_lead_of_the_post_processor_is_kept(tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer = _sentence_piece([], "first")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    text = Text(_write(tmp_path, tokenizer, None))
    assert text.encode_prompt("Hello") == tokenizer.encode("Hello").ids
    assert text.encode_prompt("</s>")[0] == 1
    assert text.encode_prompt("") == [1]


# ---- folders ----------------------------------------------------------------------------------------------------


def test_stop_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = _write(tmp_path, _byte_level([_special("<|a|>"), _special("<|b|>")]), None, eos_token="<|b|>")
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|b|>")
    assert Text(folder).stop_ids == [end]
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert Text(folder).stop_ids == [5]
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert Text(folder).stop_ids == [7, 8]


def test_a_folder_without_template_refuses_messages_in_words(tmp_path: Path) -> None:
    text = Text(_write(tmp_path, _byte_level([]), None))
    assert not text.chats
    with pytest.raises(TextError, match="prompt"):
        text.encode_chat([{"role": "user", "content": "x"}])


def test_a_template_file_wins_and_named_templates_are_found(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = _write(tmp_path, _byte_level([]), None, chat_template=named)
    text = Text(folder)
    assert text.encode_chat([]) == text.encode_prompt("plain")
    assert text.encode_chat([], TOOLS) == text.encode_prompt("tools")
    (folder / "chat_template.jinja").write_text("file")
    assert Text(folder).encode_chat([]) == text.encode_prompt("file")


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", None), ("tokenizer.json", "{"), ("tokenizer_config.json", '{"chat_template": "{% if %}"}')],
)
def test_a_broken_folder_is_refused_in_words(tmp_path: Path, name: str, content: str | None) -> None:
    folder = _write(tmp_path, _byte_level([]), None)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(FolderError, match=r"tokenizer|template"):
        Text(folder)


def test_a_refusal_of_the_template_is_told_to_the_caller(folders: dict[str, Path]) -> None:
    with pytest.raises(TextError, match="Only user and assistant"):
        Text(folders["mistral-first"]).encode_chat([{"role": "tool", "content": "x"}])


def test_a_lone_surrogate_is_refused() -> None:
    for attempt in (_ember().encode_prompt, lambda text: _ember().encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(TextError, match="surrogate"):
            attempt("a\ud800b")


def test_the_date_in_a_template_is_the_clocks(tmp_path: Path) -> None:
    folder = _write(tmp_path, _byte_level([]), "{{ strftime_now('%d %b %Y') }}")
    text = Text(folder, today=lambda: datetime(2026, 11, 20))
    assert text.encode_chat([]) == text.encode_prompt("20 Nov 2026")


# ---- templates are data under a limit ---------------------------------------------------------------------------


def test_an_endless_template_is_stopped() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="not done after"):
        Template(loop + "{% endfor %}").render({}, seconds=0.1)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000 }}",
        "{{ 9 ** 9999999 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ undefined.x.y }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        Template(source).render({"messages": []})


def test_a_request_is_never_a_template() -> None:
    assert Template("{{ messages[0] }}").render({"messages": ["{{ 7 * 7 }}"]}) == "{{ 7 * 7 }}"


# ---- decoding ---------------------------------------------------------------------------------------------------


def _cuts(ids: list[int], rng: random.Random) -> Iterator[list[int]]:
    start = 0
    while start < len(ids):
        end = min(len(ids), start + rng.choice([1, 1, 1, 2, 5]))
        yield ids[start:end]
        start = end


def _in_pieces(decoder: Decoder, ids: list[int], rng: random.Random) -> str:
    pieces = [decoder.push(cut) for cut in _cuts(ids, rng)]
    assert not any("�" in piece for piece in pieces), "a half character was emitted"
    return "".join(pieces) + decoder.finish()


@pytest.mark.parametrize("name", NAMES)
def test_pieces_join_to_what_the_tokenizer_decodes(folders: dict[str, Path], name: str) -> None:
    text, rng = Text(folders[name]), random.Random(1)
    tokenizer = Tokenizer.from_file(str(folders[name] / "tokenizer.json"))
    for sample in [*CORPUS, "😀" * 40, "é\n漢字\t\0 ", " leading", "a  b"]:
        ids = tokenizer.encode(sample, add_special_tokens=False).ids
        for _ in range(5):
            assert _in_pieces(text.decoder(), ids, rng) == tokenizer.decode(ids)


def test_tokenizers_without_a_byte_table_are_streamed(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "##ing": 2, "world": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    text = Text(_write(tmp_path, tokenizer, None))
    assert _in_pieces(text.decoder(), [1, 2, 3, 1], random.Random(0)) == tokenizer.decode([1, 2, 3, 1])


def test_special_tokens_are_skipped_and_others_shown(folders: dict[str, Path]) -> None:
    text = Text(folders["chatml"])
    by_text = text._control.by_text
    ids = [by_text["<think>"].id, *text.encode_prompt("ok"), by_text["</think>"].id, by_text["<|im_end|>"].id]
    assert text.decoder().push(ids) == "<think>ok</think>"


def test_an_unfinished_character_is_replaced_only_at_the_end() -> None:
    text = _ember()
    ids = text.encode_prompt("😀")
    if len(ids) == 1:
        pytest.skip("this tokenizer knows the character whole")
    decoder = text.decoder()
    assert decoder.push(ids[:-1]) == ""
    assert decoder.finish() == "�"


def test_ids_beyond_the_tokenizer_decode_to_nothing(tmp_path: Path) -> None:
    """Models pad their vocabulary: config.json says how far."""
    folder = _write(tmp_path, _byte_level([]), None)
    (folder / "config.json").write_text('{"vocab_size": 5000}')
    assert Text(folder).decoder().push([4999]) == ""
    assert Text(folder).token_bytes(4999) == b""


def test_token_bytes_join_to_the_text() -> None:
    text = _ember()
    sample = "Größe 東京 😀"
    assert b"".join(text.token_bytes(id) for id in text.encode_prompt(sample)).decode() == sample


def _batch(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the first moment at which the text ends with a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    st.text(alphabet="ab<é😀\n", max_size=24),
    st.lists(st.text(alphabet="ab<é😀\n", min_size=1, max_size=4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_stop_strings_do_not_depend_on_the_cuts(sample: str, stops: list[str], rng: random.Random) -> None:
    text = _ember()
    decoder = text.decoder(stops)
    expected, stopped = _batch(sample, stops)
    shown = ""
    for cut in _cuts(text.encode_prompt(sample), rng):
        shown += decoder.push(cut)
        assert expected.startswith(shown), "text was shown that a stop string takes back"
    assert shown + decoder.finish() == expected
    assert (decoder.stopped_by is not None) == stopped


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    text = _ember()
    decoder = text.decoder(["</answer>"])
    assert decoder.push(text.encode_prompt("yes </ans")) == "yes "
    assert decoder.push(text.encode_prompt(" no")) == "</ans no"
    assert decoder.push(text.encode_prompt("</answer> never")) == ""
    assert decoder.stopped_by is not None
    assert decoder.push(text.encode_prompt("more")) == ""
    assert decoder.finish() == ""
