"""A GGUF file's vocabulary → tokenizer.json, tokenizer_config.json and generation_config.json of a model's folder.

It knows no tensors. A file names how text is cut before it is merged by a word; what is not among the words here is
refused, because a guess would make other tokens than those that the model was trained on, and nobody would be told.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from tokenizers import Tokenizer

from engine.gguf.reader import GgufError, GgufFile


class TokenKind(IntEnum):
    """tokenizer.ggml.token_type, one for each token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before it is merged: by `pattern`, or as GPT-2 does where there is none. `whole_words` are tokens
    without a look at the merges; `leads` where a text begins with the first token if the file does not say."""

    pattern: str = ""
    digits: bool = False
    composed: bool = False
    whole_words: bool = False
    leads: bool = False


_LLAMA_3: Final = PreTokenizer(_WORDS + r"\p{N}{1,3}" + _REST, whole_words=True, leads=True)
_QWEN_2: Final = PreTokenizer(_WORDS + r"\p{N}" + _REST, composed=True)
PRE_TOKENIZERS: Final = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, leads=True),
}
# Control tokens that end an answer whatever the file calls its end: a chat model has one for a turn and one for a text.
_ENDS: Final = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")
)
# general.sampling.* → generation_config.json, and what is written where a file says nothing: llama.cpp's own defaults,
# but for those that a caller could not turn off. A small model drawn from all of its vocabulary says anything.
_SAMPLING: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_UNSAID: Final = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
_SPACE: Final = "▁"
_TOKEN_CHARS_MAX: Final = 1024  # of known models' tokens the longest have some hundred


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What goes into tokenizer.json, tokenizer_config.json and generation_config.json."""

    tokenizer: dict[str, Any]
    settings: dict[str, Any]
    generation: dict[str, Any]


def tokenizer_files(file: GgufFile, vocabulary: int, context_tokens: int) -> TokenizerFiles:
    """`vocabulary` is that of the embedding. Raises GgufError."""
    words = _Vocabulary(file, vocabulary)
    match words.entry("model"):
        case "gpt2":
            tokenizer = _byte_level(words)
        case "llama":
            tokenizer = _sentence_piece(words)
        case other:
            raise GgufError(f"{file.path} has a tokenizer of the kind {other!r}; gpt2 and llama are read")
    tokenizer |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(_added(words))}
    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library raises nothing narrower
        raise GgufError(f"{file.path}: its vocabulary and merges are no tokenizer: {error}") from error
    special = {f"{name}_token": words.tokens[id] for name, id in words.special.items()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        **special,
    }
    if templates := _templates(file):
        settings["chat_template"] = templates
    generation = {f"{name}_token_id": id for name, id in words.special.items() if name in ("bos", "pad")}
    generation |= {"eos_token_id": words.end_ids} | _sampling(file)
    return TokenizerFiles(tokenizer, settings, generation)


def _sampling(file: GgufFile) -> dict[str, Any]:
    """How the model is sampled where a caller does not say."""
    said = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return _UNSAID | {name: value for name, value in said.items() if value is not None}


class _Vocabulary:
    """The tokens of a file, checked against each other."""

    def __init__(self, file: GgufFile, size: int) -> None:
        self.path = file.path
        self._metadata = file.metadata
        self.tokens: list[str] = self.listed("tokens", str)
        kinds: list[int] = self.listed("token_type", int, len(self.tokens))
        if not 0 < len(self.tokens) <= size:
            raise GgufError(f"{file.path} has {len(self.tokens):,} tokens, and {size:,} rows of embeddings")
        if len(set(self.tokens)) < len(self.tokens):
            twice, _ = Counter(self.tokens).most_common(1)[0]
            raise GgufError(f"{file.path} has the token {twice!r} twice")
        if max(map(len, self.tokens)) > _TOKEN_CHARS_MAX:
            raise GgufError(f"{file.path} has a token of more than {_TOKEN_CHARS_MAX:,} characters")
        if unknown := set(kinds).difference(TokenKind):
            raise GgufError(f"{file.path} has tokens of the type {min(unknown)}, which is not known here")
        self.kinds = [TokenKind(kind) for kind in kinds]
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self._id(key) for name, key in names.items()}
        self.special = {name: id for name, id in ids.items() if id is not None}

    def entry(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def listed(self, key: str, kind: type, count: int | None = None) -> list[Any]:
        """A list of `count` values of one kind. Raises GgufError."""
        values = self.entry(key)
        if not isinstance(values, list) or (values and type(values[0]) is not kind):
            raise GgufError(f"{self.path} has no list tokenizer.ggml.{key}: it is a model without its tokenizer")
        if count is not None and len(values) != count:
            raise GgufError(f"{self.path} has {len(values):,} of tokenizer.ggml.{key} for {count:,} tokens")
        return values

    def ids_of(self, *kinds: TokenKind) -> dict[str, int]:
        return {token: id for id, token in enumerate(self.tokens) if self.kinds[id] in kinds}

    @property
    def used(self) -> dict[str, int]:
        """All tokens that are not there only to fill the embedding up."""
        return self.ids_of(*(kind for kind in TokenKind if kind is not TokenKind.UNUSED))

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer, the file's own first. Raises GgufError where there is none."""
        own = [self._id(key) for key in ("eos", "eot", "eom")]
        known = [id for token, id in self.ids_of(TokenKind.CONTROL).items() if token in _ENDS]
        ids = list(dict.fromkeys(id for id in (*own, *known) if id is not None))
        if not ids:
            raise GgufError(f"{self.path} names no token that ends an answer (tokenizer.ggml.eos_token_id)")
        return ids

    def _id(self, name: str) -> int | None:
        id = self.entry(f"{name}_token_id")
        if id is not None and (type(id) is not int or not 0 <= id < len(self.tokens)):
            raise GgufError(f"{self.path}: tokenizer.ggml.{name}_token_id {id!r} is no token of {len(self.tokens):,}")
        return id


def _byte_level(words: _Vocabulary) -> dict[str, Any]:
    """Merges of bytes, each of which is a letter, as GPT-2 has them."""
    name = words.entry("pre")
    pre = PRE_TOKENIZERS.get(str(name))
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise GgufError(
            f"{words.path} cuts text as {name!r} does (tokenizer.ggml.pre), which is not known here: {known}"
        )
    merges = [(merge[:end], merge[end + 1 :]) for merge in words.listed("merges", str) for end in [merge.find(" ", 1)]]
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if pre.digits else []
    if pre.pattern:
        steps.append({"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False})
    steps.append(_bytes_as_letters(add_prefix_space=False, use_regex=not pre.pattern))
    return {
        "normalizer": {"type": "NFC"} if pre.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(words, pre.leads),
        "decoder": _bytes_as_letters(add_prefix_space=True, use_regex=True),
        "model": _bpe(words, merges, ignore_merges=pre.whole_words),
    }


def _sentence_piece(words: _Vocabulary) -> dict[str, Any]:
    """Merges of letters in the order of the tokens' scores, and bytes for what is in no token, as Llama 2 has them."""
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if words.entry("add_space_prefix") is not False:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if "unk" not in words.special:
        raise GgufError(f"{words.path} names no unknown token (tokenizer.ggml.unknown_token_id)")
    unknown = words.tokens[words.special["unk"]]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(words, leads=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(words, _merges_of_scores(words), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges_of_scores(words: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two, the best token first: SentencePiece merges the best pair that there is."""
    scores, pieces = words.listed("scores", float, len(words.tokens)), words.ids_of(TokenKind.NORMAL)
    ways = [
        (scores[id], pieces[left], pieces[right], left, right)
        for token, id in pieces.items()
        for end in range(1, len(token))
        for left, right in [(token[:end], token[end:])]
        if left in pieces and right in pieces
    ]
    return [(left, right) for *_, left, right in sorted(ways, key=lambda way: (-way[0], way[1], way[2]))]


def _bpe(words: _Vocabulary, merges: list[tuple[str, str]], **changes: Any) -> dict[str, Any]:
    plain = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **plain,
        **changes,
        "vocab": words.used,
        "merges": merges,
    }


def _post_processor(words: _Vocabulary, leads: bool) -> dict[str, Any] | None:
    """What puts the first token before a text and the last behind it, where the file wants them; where it is silent of
    the first, `leads` says it."""
    leads = leads if words.entry("add_bos_token") is None else bool(words.entry("add_bos_token"))
    before = ["bos"] if leads and "bos" in words.special else []
    after = ["eos"] if words.entry("add_eos_token") and "eos" in words.special else []
    tokens = {name: words.tokens[words.special[name]] for name in (*before, *after)}
    if not tokens:
        return None

    def around(text: str, type_id: int) -> list[dict[str, Any]]:
        marks = {name: {"SpecialToken": {"id": token, "type_id": type_id}} for name, token in tokens.items()}
        sequence = {"Sequence": {"id": text, "type_id": type_id}}
        return [*(marks[name] for name in before), sequence, *(marks[name] for name in after)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [words.special[name]], "tokens": [token]} for name, token in tokens.items()
        },
    }


def _bytes_as_letters(*, add_prefix_space: bool, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def _added(words: _Vocabulary) -> Iterator[dict[str, Any]]:
    """Tokens that text is searched for before it is cut."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for id, (token, kind) in enumerate(zip(words.tokens, words.kinds, strict=True)):
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN) and token:
            yield {"id": id, "content": token, **flags, "special": kind is not TokenKind.USER_DEFINED}


def _templates(file: GgufFile) -> str | list[dict[str, str]]:
    """The chat template, or all of them by their names where there are more."""
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(key).removeprefix(".") or "default": str(text)
        for name, text in file.metadata.items()
        if name == key or name.startswith(f"{key}.")
    }
    if templates.keys() <= {"default"}:
        return templates.get("default", "")
    return [{"name": name, "template": template} for name, template in templates.items()]
