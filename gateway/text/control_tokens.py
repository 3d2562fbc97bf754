"""Control tokens, and how text of a request is kept from becoming one: what stands in for their edges while a template
runs, and a tokenizer that does not know them. It knows no templates, no models' folders and no way back to text.

An added token ("<|im_end|>") can only be formed if its first and last character stand where the template or the request
put them. So before the template runs, these edge characters ("<", ">", "[", …) are replaced, in every string of the
request, by private-use characters that the request does not contain. What then matches an added token in the rendered
text was written by the template alone.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.text.encoding_cache import ScopedEncodings

JSON = Any
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PRIVATE = range(0xF0000, 0xFFFFE)
_ANY_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")


class AddedControlToken(msgspec.Struct, frozen=True):
    """One added token, as tokenizer.json has it: its spelling, and whether it takes the white space beside it."""

    id: int
    content: str
    lstrip: bool = False
    rstrip: bool = False


class ControlTokens:
    """The tokens that only a template may write: all added ones but white space.

    `pattern` finds them in rendered text. Tokens that are spelled like words have no edges to escape, so the pattern
    has only those that stand in a template.
    """

    def __init__(self, entries: list[dict[str, Any]], sources: str) -> None:
        """`entries` are tokenizer.json's; `sources` the text of all templates."""
        tokens = [token for token in msgspec.convert(entries, list[AddedControlToken]) if token.content.strip()]
        self.by_text = {token.content: token for token in tokens}
        self.ids = frozenset(token.id for token in tokens)
        written = [text for text in self.by_text if not _is_word(text) or text in sources]
        longest_first = sorted(written, key=len, reverse=True)
        self.pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if written else None


def _is_word(text: str) -> bool:
    return text[0].isalnum() and text[-1].isalnum()


class EscapeTable:
    """The characters with which control tokens begin and end, and what stands between them. `keys` are those of objects
    that the template looks for, which must find them."""

    def __init__(self, control: ControlTokens, keys: frozenset[str]) -> None:
        texts = list(control.by_text)
        edges = {text[0] for text in texts} | {text[-1] for text in texts}
        self.edges = sorted(edge for edge in edges if not edge.isalnum() and not edge.isspace())
        # Tokens that begin and end with letters cannot be escaped by their edges: their inside is broken instead.
        self.word_tokens = [text for text in texts if _is_word(text)]
        # A template may write a word of the request between its own edges: `<{{ key }}>`, where the key is "|end|".
        self.inner_text = "\n".join(text[1:-1].lower() for text in texts)
        self.keys = keys

    def escape_for(self, request: JSON) -> "ControlTokenEscaper | None":
        """Stand-ins that occur nowhere in the request; None where there are none left."""
        taken = {ord(char) for text in _strings(request) if not text.isascii() for char in _ANY_PRIVATE.findall(text)}
        free = (chr(code) for code in _PRIVATE if code not in taken)
        stand_ins = list(islice(free, 1 + len(self.edges)))
        if len(stand_ins) <= len(self.edges):
            return None
        return ControlTokenEscaper(self, list(zip(self.edges, stand_ins[1:], strict=True)), stand_ins[0])


class ControlTokenEscaper:
    """Replaces what could become part of a control token by stand-ins, and back."""

    def __init__(self, table: EscapeTable, pairs: list[tuple[str, str]], split: str) -> None:
        self._table = table
        self._pairs = pairs
        self._split = split

    def message(self, message: Mapping[str, JSON]) -> dict[str, JSON]:
        """One message; a role that we know stays as it is, for templates write it between control characters; so do
        the types of its content's parts, which they compare with."""
        escaped: dict[str, JSON] = self.value(dict(message))
        if isinstance(parts := message.get("content"), list):
            escaped["content"] = [
                {**own, "type": part["type"]} for own, part in zip(escaped["content"], parts, strict=True)
            ]
        if message.get("role") in ROLES:
            escaped["role"] = message["role"]
        return escaped

    def value(self, value: JSON) -> Any:
        """Any JSON value, keys included; a new one."""
        if isinstance(value, str):
            return self._text(value, _KINDS)
        if isinstance(value, Mapping):
            return {self._text(key, self._table.keys): self.value(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value

    def restore(self, text: str) -> str:
        for edge, stand_in in self._pairs:
            text = text.replace(stand_in, edge)
        return text.replace(self._split, "")

    def _text(self, text: str, known: frozenset[str]) -> str:
        """What may stand inside of a control token is split, for a template to write it between its edges; but for
        what is known to be looked for."""
        word = text.strip() if len(text) < _INSIDE_CHARS_MAX else ""
        if word and word not in known and word.lower() in self._table.inner_text:
            text = text.replace(word, self._split + word, 1)
        for edge, stand_in in self._pairs:
            if edge in text:
                text = text.replace(edge, stand_in)
        for token in self._table.word_tokens:
            text = text.replace(token, token[:-1] + self._split + token[-1])
        return text


_INSIDE_CHARS_MAX = 100
# Values that templates compare with: they name kinds and stand in no template between control characters.
_KINDS = frozenset({"function", "object", "array", "string", "number", "integer", "boolean", "null", "text"})


def _strings(value: JSON) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


class PlainTokenizer:
    """A copy of the tokenizer without its control tokens: no text becomes a control token."""

    def __init__(self, document: dict[str, Any], control: ControlTokens) -> None:
        kept = [entry for entry in document["added_tokens"] if entry["content"] not in control.by_text]
        bare = {**document, "added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}
        bare["model"] = _without(document["model"], control)
        bare["pre_tokenizer"] = copy.deepcopy(document.get("pre_tokenizer"))
        self._first = Tokenizer.from_buffer(msgspec.json.encode(bare))
        self._later = Tokenizer.from_buffer(msgspec.json.encode(bare)) if _never_prepend(bare) else self._first

    def encode(self, text: str, first: bool) -> list[int]:
        """`first`: the text stands at the very beginning, where some tokenizers put a space before it."""
        return encode_ids(self._first if first else self._later, text) if text else []

    def encode_runs(self, runs: list[str], spread: bool, known: ScopedEncodings | None) -> list[Sequence[int]]:
        """Each run's ids; `spread` over the library's threads, which keep words that they met."""
        first, *later = runs
        distinct = list(dict.fromkeys(run for run in later if run))  # roles and line breaks are there again and again
        ids = self._encode_distinct(self._later, distinct, spread, known)
        ids[""] = []
        begin = self._encode_distinct(self._first, [first], False, known)[first] if first else []
        return [begin, *(ids[run] for run in later)]

    def _encode_distinct(
        self, tokenizer: Tokenizer, texts: list[str], spread: bool, known: ScopedEncodings | None
    ) -> dict[str, Sequence[int]]:
        ids = {} if known is None else known.cache.find(known, tokenizer, texts)
        new = [text for text in texts if text not in ids]
        if spread:
            encodings = tokenizer.encode_batch_fast(new, add_special_tokens=False)
            encoded = {text: encoding.ids for text, encoding in zip(new, encodings, strict=True)}
        else:
            encoded = {text: encode_ids(tokenizer, text) for text in new}
        if known is not None and encoded:
            known.cache.add(known, tokenizer, encoded)
        return {**ids, **encoded}


def encode_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes by the batch call, the only one that lets other threads run meanwhile and leaves out offsets."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _without(model: dict[str, Any], control: ControlTokens) -> dict[str, Any]:
    """A copy of the model whose vocabulary has no control tokens."""
    vocabulary: Any = model.get("vocab")
    if isinstance(vocabulary, dict):
        unknown = model.get("unk_token")
        vocabulary = {text: id for text, id in vocabulary.items() if text not in control.by_text or text == unknown}
    elif isinstance(vocabulary, list):
        vocabulary = [[text, -1e6 if text in control.by_text else score] for text, score in vocabulary]
    return {**model, "vocab": vocabulary}


def _never_prepend(bare: dict[str, Any]) -> bool:
    """Takes away the space that some tokenizers put before the very first text; false where this one puts none."""
    pre = bare.get("pre_tokenizer") or {}
    firsts = [step for step in [pre, *pre.get("pretokenizers", [])] if step.get("prepend_scheme") == "first"]
    for step in firsts:
        step["prepend_scheme"] = "never"
    return bool(firsts)
