"""engine/gguf/tokenizer.py: the tokens are those of the reference libraries for every way to cut text."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN_2

from engine.gguf.reader import GgufError, read_gguf
from engine.gguf.tokenizer import PRE_TOKENIZERS, TokenizerFiles, tokenizer_files
from gateway.catalogue.model_config import read_sampling
from gateway.text.tokenizer import ModelTokenizer
from tests.support.gguf_files import add_vocabulary, finish
from tests.support.model_folders import CHATML, CORPUS

CONTROL, USER, UNUSED, BYTE, UNKNOWN = 3, 4, 5, 6, 2
TEXTS = [
    *CORPUS,
    "Hello World's  12345 67 I'LL don't\n\n\n\tend  ",
    "x=1;\r\n\r\n  y = [1, 22, 333, 4444]",
    "naïve e\u0301te\u0301 ÅNGSTRÖM 東京タワー Привет мир 😀🏽 ½ ٣٤٥ Ⅷ",
    "HTTPServerError fooBar ʼn _x_ // /* */ <|im_end|>",
    "an unmerged word",
    " ",
    "\u00a0\u2003wide\u200bspace",
    "",
]  # fmt: skip
CUTS = {
    "gpt-2": ["x", "1234", " YOU", "'", "LL", " ", " y", "\n", "\n", "z"],
    "smollm": ["x", "1", "2", "3", "4", " YOU", "'", "LL", " ", " y", "\n", "\n", "z"],
    "llama-bpe": ["x", "123", "4", " YOU", "'LL", " ", " y", "\n\n", "z"],
    "qwen2": ["x", "1", "2", "3", "4", " YOU", "'LL", " ", " y", "\n\n", "z"],
    "tekken": ["x", "1", "2", "3", "4", " YOU", "'LL", " ", " y", "\n\n", "z"],
}


def reference_pre_tokenizer(name: str) -> Any:
    """As the model's own tokenizer.json has it, by other hands where there are such."""
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    patterns = {
        "llama-bpe": TikTokenConverter().pattern,
        "qwen2": QWEN_2,
        # Mistral's tekken.json
        "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
    if name in patterns:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(patterns[name]), "isolated"), last])
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
    return pre_tokenizers.Sequence([*digits, whole])


def trained(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    tokenizer.normalizer = normalizers.NFC() if name == "qwen2" else None
    tokenizer.pre_tokenizer = reference_pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS if "unmerged" not in text], trainer)
    document = json.loads(tokenizer.to_str())
    document["model"]["vocab"]["Ġunmerged"] = len(document["model"]["vocab"])  # that no merges lead to
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def imported(
    path: Path, tokens: list[str], kinds: dict[str, int], size: int | None = None, **settings: Any
) -> TokenizerFiles:
    writer = GGUFWriter(path / "model.gguf", "llama")
    template = settings.pop("template", None)
    add_vocabulary(writer, tokens, kinds, **settings)
    if template:
        writer.add_chat_template(template)
    return tokenizer_files(read_gguf(finish(writer, path / "model.gguf")), size or len(tokens), 512)


def byte_level(path: Path, name: str, tokenizer: Tokenizer, **settings: Any) -> TokenizerFiles:
    document = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER, "[PAD0]": UNUSED, "[PAD1]": UNUSED}
    ends = {"bos_token_id": vocabulary["<|im_start|>"], "eos_token_id": vocabulary["<|im_end|>"]}
    merges = [" ".join(merge) for merge in document["model"]["merges"]]
    return imported(path, [*tokens, "[PAD0]", "[PAD1]"], kinds, pre=name, merges=merges, **{**ends, **settings})


@pytest.mark.parametrize("name", CUTS)
def test_tokens_are_those_of_the_model_s_own_tokenizer_and_lead_back_to_the_text(name: str, tmp_path: Path) -> None:
    reference = trained(name)
    files = byte_level(tmp_path, name, reference, add_bos_token=False)
    tokenizer = Tokenizer.from_str(json.dumps(files.tokenizer))
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|> <think>so</think>"]:
        ids = tokenizer.encode(text).ids
        assert ids == reference.encode(text).ids
        normal = reference.normalizer.normalize_str(text) if reference.normalizer else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == normal
    assert tokenizer.encode("a<|im_end|>").ids[-1] == reference.token_to_id("<|im_end|>")
    assert tokenizer.token_to_id("[PAD0]") is None
    assert tokenizer.decode(tokenizer.encode("<think>a<|im_end|>").ids) == "<think>a"


@pytest.mark.parametrize("name", CUTS)
def test_text_is_cut_where_each_model_cuts_it(name: str, tmp_path: Path) -> None:
    document = byte_level(tmp_path, name, trained(name)).tokenizer
    steps = document["pre_tokenizer"]["pretokenizers"]
    cut = Tokenizer.from_str(json.dumps(document)).pre_tokenizer.pre_tokenize_str("x1234 YOU'LL  y\n\nz")
    letters = {letter: text for letter, text in (("Ġ", " "), ("Ċ", "\n"))}
    assert ["".join(letters.get(letter, letter) for letter in part) for part, _ in cut] == CUTS[name]
    assert steps[-1]["type"] == "ByteLevel"


def test_every_name_is_proved_or_is_another_name_of_one_that_is() -> None:
    proved = [PRE_TOKENIZERS[name] for name in CUTS]
    assert all(pre in proved for pre in PRE_TOKENIZERS.values())


@pytest.mark.parametrize("pre", ["default", "gemma4", "qwen35", "", [1], 7, "made-up"])
def test_an_unknown_way_to_cut_text_is_refused_by_name(pre: Any, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="which is not known here: gpt-2, smollm"):
        imported(tmp_path, ["<s>", "</s>", "a", "b", "ab"], {}, merges=["a b"], pre=pre)


def test_what_is_put_around_a_text_is_what_the_file_says(tmp_path: Path) -> None:
    for name, told, leads in (
        ("llama-bpe", {}, True), ("qwen2", {}, False), ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ):  # fmt: skip
        reference = trained(name)
        tokenizer = Tokenizer.from_str(json.dumps(byte_level(tmp_path, name, reference, **told).tokenizer))
        first = [reference.token_to_id("<|im_start|>")] if leads else []
        plain = reference.encode("a b").ids
        assert tokenizer.encode("a b").ids == [*first, *plain]
        assert tokenizer.encode("a b", "a b").ids == [*first, *plain, *first, *plain]
    files = byte_level(tmp_path, "qwen2", trained("qwen2"), add_eos_token=True)
    assert Tokenizer.from_str(json.dumps(files.tokenizer)).encode("").ids == [files.generation["eos_token_id"][0]]


def test_the_folder_s_tokenizer_speaks_and_ends_as_the_file_says(tmp_path: Path) -> None:
    """Through the gateway's own reading of a folder: chat template, control tokens, stop ids."""
    reference = trained("qwen2")
    files = byte_level(tmp_path, "qwen2", reference, template=CHATML, eot_token_id=7)
    for name, document in (
        ("tokenizer", files.tokenizer), ("tokenizer_config", files.settings), ("generation_config", files.generation),
    ):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": reference.get_vocab_size() + 2}))
    tokenizer = ModelTokenizer(tmp_path)
    said = tokenizer.encode_chat([{"role": "user", "content": "the fox <|im_end|>"}])
    assert said[0] == reference.token_to_id("<|im_start|>")
    assert said.count(reference.token_to_id("<|im_end|>")) == 1  # the template's, never the caller's
    assert tokenizer.stop_ids == [reference.token_to_id("<|im_end|>"), 7]
    assert files.settings["eos_token"] == "<|im_end|>"


def test_a_model_is_sampled_as_its_file_says_and_else_as_llama_cpp_would(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    add_vocabulary(writer, ["<s>", "</s>", "a", "b", "ab"], {"<s>": CONTROL, "</s>": CONTROL}, merges=["a b"], **ends)
    writer.add_float32("general.sampling.temp", 0.25)
    writer.add_int32("general.sampling.top_k", 20)
    files = tokenizer_files(read_gguf(finish(writer, tmp_path / "model.gguf")), 5, 512)
    (tmp_path / "generation_config.json").write_text(json.dumps(files.generation))
    said = {"temperature": 0.25, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    assert read_sampling(tmp_path) == said


def test_known_ends_of_turns_and_texts_end_an_answer_where_they_are_control_tokens(tmp_path: Path) -> None:
    tokens = ["<s>", "</s>", "a", "b", "ab", "<|im_end|>", "<|eot_id|>", "<|end|>"]
    kinds = dict.fromkeys(("<s>", "</s>", "<|im_end|>", "<|end|>"), CONTROL)
    assert imported(tmp_path, tokens, kinds, merges=["a b"]).generation["eos_token_id"] == [1, 5, 7]


def test_several_templates_keep_their_names(tmp_path: Path) -> None:
    files = byte_level(tmp_path, "qwen2", trained("qwen2"), template=[
        {"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"},
    ])  # fmt: skip
    templates = {entry["name"]: entry["template"] for entry in files.settings["chat_template"]}
    assert templates == {"default": "A", "tool_use": "B"}


# SentencePiece


def sentence_piece_tokens() -> tuple[list[str], list[float], dict[str, int]]:
    """A vocabulary as SentencePiece trains it: each token is made of two others, the earlier one the better."""
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(merge) for merge in learnt["merges"]]
    letters = [token for token in learnt["vocab"] if token not in merged]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys([*merged, *letters]))}
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *sorted(ranks)]  # in another order than that of their scores
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(bytes_, BYTE)}
    return tokens, [-float(ranks.get(token, 0)) for token in tokens], kinds


def best_pairs(text: str, tokens: list[str], scores: list[float], kinds: dict[str, int], prefix: bool) -> list[int]:
    """SentencePiece's own way, as its paper has it: merge the best pair of neighbours until there is none."""
    ids = {token: id for id, token in enumerate(tokens)}
    plain = {token: id for token, id in ids.items() if token not in kinds}
    parts = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        neighbours = enumerate(itertools.pairwise(parts))
        pairs = [(-scores[plain[a + b]], i) for i, (a, b) in neighbours if a + b in plain]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    pieces = [[plain[part]] if part in plain else [ids[f"<0x{b:02X}>"] for b in part.encode()] for part in parts]
    return [id for piece in pieces for id in piece]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_tokens_are_those_of_its_own_merges(prefix: bool, tmp_path: Path) -> None:
    tokens, scores, kinds = sentence_piece_tokens()
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    files = imported(tmp_path, tokens, kinds, model="llama", scores=scores, add_space_prefix=prefix, **ends)
    tokenizer = Tokenizer.from_str(json.dumps(files.tokenizer))
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == [1, *best_pairs(text, tokens, scores, kinds, prefix)], text
        assert tokenizer.decode(ids) == text


# What is wrong


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "t5"}, "of the kind 't5'; gpt2 and llama are read"),
        ({"model": "llama", "scores": [0.0] * 5}, "names no unknown token"),
        ({"model": "llama", "unknown_token_id": 0, "scores": [0.0] * 4}, "4 of tokenizer.ggml.scores for 5 tokens"),
        ({"eos_token_id": 5}, "eos_token_id 5 is no token of 5"),
        ({"merges": ["a b", "a c"]}, "no tokenizer: "),
        ({"merges": ["ab"]}, "no tokenizer: "),
        ({"size": 4}, "has 5 tokens, and 4 rows of embeddings"),
        ({"tokens": ["<s>", "</s>", "a", "b", "a"]}, "the token 'a' twice"),
        ({"tokens": ["<s>", "</s>", "a", "b", "x" * 1025]}, "a token of more than 1,024 characters"),
        ({"kinds": {"a": 77}}, "tokens of the type 77"),
        ({"merges": []}, "has no list tokenizer.ggml.merges"),
    ],
)
def test_a_vocabulary_that_is_wrong_is_refused_by_name(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"tokens": ["<s>", "</s>", "a", "b", "ab"], "kinds": {}, "merges": ["a b"]}
    with pytest.raises(GgufError, match=said):
        imported(tmp_path, **{**usual, **settings})
