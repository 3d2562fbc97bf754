"""Token ids back to text, piece by piece: whole characters only, and held back where a stop string may begin.

It knows the decoder of tokenizer.json, and nothing of models, requests or sockets. It assumes that a token is the same
bytes everywhere, but for the space that some tokenizers leave out before the very first one.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_BYTES = {"type": "ByteFallback"}
_FUSE = {"type": "Fuse"}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass(frozen=True, slots=True)
class TokenByteTable:
    """The bytes of every id, and of an id that is the first to show; mostly the same list. `special_ids` show as
    nothing. `strips_leading_space`: a text that begins with a space loses that one."""

    bytes_of: list[bytes]
    first_bytes_of: list[bytes]
    special_ids: frozenset[int]
    strips_leading_space: bool

    @property
    def token_bytes_max(self) -> int | None:
        """No token stands for more bytes of text; None where text is more than the bytes of its tokens."""
        return max(map(len, self.bytes_of)) if self.first_bytes_of is self.bytes_of else None

    def with_visible(self, spelled: Mapping[int, str]) -> "TokenByteTable":
        """A copy in which these special tokens show, as they are spelled."""
        spelled = {id: text for id, text in spelled.items() if id in self.special_ids}
        if not spelled:
            return self
        later = self.bytes_of.copy()
        first = later if self.first_bytes_of is self.bytes_of else self.first_bytes_of.copy()
        for id, text in spelled.items():
            later[id] = first[id] = text.encode()
        return TokenByteTable(later, first, self.special_ids - spelled.keys(), self.strips_leading_space)


def token_byte_table(document: dict[str, Any], tokenizer: Tokenizer, size: int) -> TokenByteTable | None:
    """Builds the table of a tokenizer.json and its tokenizer. `size` is that of the model's vocabulary, which may be
    padded. None for a decoder in which a token's text depends on the tokens around it."""
    decoder = document.get("decoder")
    spellings = _spellings(decoder, tokenizer)
    if spellings is None:
        return None
    spell, spell_first = spellings
    vocabulary = tokenizer.get_vocab()
    skipped = frozenset(entry["id"] for entry in document["added_tokens"] if entry.get("special"))
    later = [b""] * max(size, tokenizer.get_vocab_size(), 1 + max(vocabulary.values(), default=0))
    first = later if spell_first is None else later.copy()
    for text, id in vocabulary.items():
        if id not in skipped:
            later[id] = spell(text)
            if spell_first is not None:
                first[id] = spell_first(text)
    return TokenByteTable(later, first, skipped, _STRIP in ((decoder or {}).get("decoders") or []))


def _spellings(
    decoder: dict[str, Any] | None, tokenizer: Tokenizer
) -> tuple[Callable[[str], bytes], Callable[[str], bytes] | None] | None:
    """What turns a token's text in the vocabulary into its bytes, and what does where it is the first; None in its
    place where a first token is as any other."""
    if decoder is None:  # then tokens are words
        return lambda text: f" {text}".encode(), str.encode
    steps = decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level(), None
    if steps[:2] == [_SPACE, _BYTES] and steps[2:] in ([], [_FUSE], [_FUSE, _STRIP]):
        return _byte_or(lambda text: text.replace("▁", " ").encode()), None
    if kinds not in (["Metaspace"], ["ByteFallback", "Metaspace"], ["WordPiece"]):
        return None
    decode = tokenizer.decoder.decode
    return _byte_or(lambda text: decode(["a", text])[1:].encode()), _byte_or(lambda text: decode([text]).encode())


def _byte_level() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable bytes are themselves, the others are the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

    def spell(text: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in text])
        except KeyError:
            return text.encode()

    return spell


def _byte_or(spell: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """SentencePiece writes what is in no other token byte by byte, as <0xE2>."""

    def byte_or(text: str) -> bytes:
        byte = _BYTE.fullmatch(text)
        return spell(text) if byte is None else bytes.fromhex(byte[1])

    return byte_or


class Utf8Detokenizer:
    """One completion's text without stop strings: a fraction of a microsecond per token.

    Bytes that are no UTF-8 become replacement characters, as Python's decoder sets them.
    """

    __slots__ = ("_at_start", "_pending", "_strip", "_table")

    def __init__(self, table: TokenByteTable) -> None:
        self._table = table
        self._at_start = table.first_bytes_of is not table.bytes_of
        self._strip = table.strips_leading_space
        self._pending = b""

    def push(self, ids: Iterable[int]) -> str:
        ids = self._begin(ids) if self._at_start else ids
        later = self._table.bytes_of
        return self._decoded(self._pending + b"".join([later[id] for id in ids]))

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def _begin(self, ids: Iterable[int]) -> list[int]:
        """Takes the first token that shows; the rest is to be pushed."""
        rest = [id for id in ids if id not in self._table.special_ids]
        if not rest:
            return []
        self._at_start = False
        self._pending = self._table.first_bytes_of[rest[0]]
        return rest[1:]

    def _decoded(self, received: bytes) -> str:
        text, used = codecs.utf_8_decode(received, "replace", False)
        self._pending = received[used:]
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text


class Detokenizer:
    """One completion's text, piece by piece. Whatever the cuts between pushes, the pieces join to the same text.

    A stop string ends the text before its first character; where several could, the one that is complete first does,
    and of those the longest. Text that may be the beginning of a stop string is held back. None is looked for in the
    text of the first `min_tokens`.
    """

    __slots__ = ("_longest", "_min_tokens", "_pending_text", "_pieces", "_starts", "_stop", "stopped_by")

    def __init__(self, pieces: Utf8Detokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._pieces = pieces
        self._min_tokens = min_tokens  # of them that are still to come
        self._stop = [text for text in stop if text]
        self._starts = tuple({text[:end] for text in self._stop for end in range(1, len(text))})
        self._longest = max((len(text) for text in self._stop), default=0)
        self._pending_text = ""
        self.stopped_by: str | None = None

    def push(self, ids: Sequence[int]) -> str:
        """What may be emitted now that these ids followed; empty once a stop string ended it."""
        if self.stopped_by is not None:
            return ""
        early = ""
        if self._min_tokens:
            first, ids = ids[: self._min_tokens], ids[self._min_tokens :]
            self._min_tokens -= len(first)
            early = self._pieces.push(first)
        text = self._pieces.push(ids)
        return early + (self._emit(text) if self._stop else text)

    def finish(self) -> str:
        """The rest: held text, and a replacement character for a character that stayed incomplete."""
        if self.stopped_by is not None:
            return ""
        text = self._pieces.finish()
        rest = self._emit(text) + self._pending_text if self._stop else text
        self._pending_text = ""
        return rest

    def _emit(self, text: str) -> str:
        if not text:
            return ""
        text = self._pending_text + text
        matches = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.stopped_by = min(matches)
            self._pending_text = ""
            return text[:at]
        keep = self._overlap(text) if text.endswith(self._starts) else 0
        self._pending_text = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _overlap(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        raise AssertionError("endswith found an overlap")
