"""Texts that are found again wherever they were left: in files, in a store, in another process's memory.

It knows no Hearth; it knows the forms in which software keeps a text and token ids.
"""

import base64
import itertools
import os
import random
import string
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MARK_LETTERS: Final = 12
_TOKENS_MIN: Final = 6  # in a row are no accident
_WRITTEN: Final = ("behind", "as msgpack", "as JSON")
_PIECE_BYTES: Final = 16 << 20
_OVERLAP_BYTES: Final = 400  # more than the longest pattern


@dataclass(frozen=True)
class Hit:
    place: str
    form: str
    around: bytes

    def __str__(self) -> str:
        return f"{self.place}: {self.form}: {self.around!r}"


class Canaries:
    """Makes texts of one word that all begin and end with the same two marks, and finds their marks and tokens again.

    One word, since tokenizers keep caches of words; what stands between the marks says where the text was put.
    """

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self._head, self._tail = ("".join(source.choices(string.ascii_lowercase, k=_MARK_LETTERS)) for _ in range(2))
        self.patterns = {**_forms(self._head), "the end in utf-8": self._tail.encode()}

    def text(self, place: str) -> str:
        assert place.isalpha()
        return f"{self._head}{place}{self._tail}"

    def watch_prompts(self, encode: Callable[[str], list[int]]) -> None:
        """Finds token ids as well: those that all texts, behind a space, have in common."""
        whole = [encode(f"so {self.text(place)}") for place in ("prompt", "tools", "anything")]
        common = [ids[0] for ids in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*whole, strict=False))]
        self.watch_tokens("a prompt", common[2:-1])

    def watch_text(self, name: str, text: str) -> None:
        self.patterns[f"{name} in utf-8"] = text.encode()

    def watch_tokens(self, name: str, ids: list[int]) -> None:
        """As frames and arrays, tensors, other frames, and documents hold them."""
        assert len(ids) >= _TOKENS_MIN, f"{len(ids)} tokens may be found by accident"
        self.patterns[f"tokens of {name} as u32"] = struct.pack(f"<{len(ids)}I", *ids)
        self.patterns[f"tokens of {name} as i64"] = struct.pack(f"<{len(ids)}q", *ids)
        self.patterns[f"tokens of {name} as msgpack"] = b"".join(map(_msgpack, ids))
        self.patterns[f"tokens of {name} as JSON"] = ",".join(map(str, ids)).encode()

    def find(self, place: str, held: bytes, patterns: dict[str, bytes] | None = None) -> Iterator[Hit]:
        for form, pattern in (patterns or self.patterns).items():
            if (at := held.find(pattern)) >= 0:
                yield Hit(place, form, held[max(0, at - 60) : at + 100])

    def in_file(self, path: Path, place: str | None = None) -> Iterator[Hit]:
        yield from self.find(f"the name of {path}", os.fsencode(path))
        before = b""
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield from self.find(place or str(path), before + piece)
                before = piece[-_OVERLAP_BYTES:]

    def in_folder(self, folder: Path) -> Iterator[Hit]:
        """All regular files below it."""
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield from self.in_file(path)

    def in_open_files(self, pid: int) -> Iterator[Hit]:
        """Those that have no name any more too. Devices, sockets and pipes have no content to be read."""
        for number in Path(f"/proc/{pid}/fd").iterdir():
            if number.is_file():
                yield from self.in_file(number, f"process {pid} holds {os.readlink(number)} open")

    def in_memory(self, pid: int) -> Iterator[Hit]:
        """Every mapping but those of files that the process only reads; for what programs compute with, not for what
        they only write."""
        patterns = {form: found for form, found in self.patterns.items() if not form.endswith(_WRITTEN)}
        for name, start, end in mappings(pid):
            before = b""
            for piece in read_memory(pid, start, end):
                if piece.count(0) < len(piece):
                    yield from self.find(f"process {pid} at {start:x}, {name}", before + piece, patterns)
                before = piece[-_OVERLAP_BYTES:]


def mappings(pid: int) -> Iterator[tuple[str, int, int]]:
    """(name, first byte, end) of all memory that the process may have written."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights[0] == "r" and (rights[1] == "w" or inode == "0"):
            start, end = span.split("-")
            yield (name[0] if name else "anonymous"), int(start, 16), int(end, 16)


def read_memory(pid: int, start: int, end: int) -> Iterator[bytes]:
    """In pieces; none of what is the kernel's own, such as [vvar]."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for at in range(start, end, _PIECE_BYTES):
            try:
                yield os.pread(memory.fileno(), min(_PIECE_BYTES, end - at), at)
            except OSError:
                return


def _forms(text: str) -> dict[str, bytes]:
    """JSON escapes nothing of it; UTF-16 and UTF-32 are also how Python keeps a text with wider characters beside."""
    forms = {"in utf-8": text.encode(), "in utf-16": text.encode("utf-16-le"), "in utf-32": text.encode("utf-32-le")}
    for lead in range(3):  # its characters that do not depend on what stands before and behind it
        first, last = -(-lead * 8 // 6), (lead + len(text)) * 8 // 6
        forms[f"in base64, {lead} behind"] = base64.b64encode(bytes(lead) + text.encode())[first:last]
    return forms


def _msgpack(id: int) -> bytes:
    if id < 128:
        return bytes([id])
    if id < 256:
        return struct.pack(">BB", 0xCC, id)
    return struct.pack(">BH", 0xCD, id) if id < 1 << 16 else struct.pack(">BI", 0xCE, id)
