"""A made-up tokenizer.json of a model's true size, for measuring what grammars cost: they look at spellings.

The vocabulary is one of byte pairs: bytes, numbers, punctuation, runs of white space, words with a space before them,
in capitals or without, pieces of other scripts, and special tokens at the end.
"""

import json
import random
from pathlib import Path
from typing import Final

_SPECIAL: Final = 256
_PUNCTUATION: Final = "{}[]\":,.;()<>/\\'=-_+*&|!?#$%@^~`"
_HEADS: Final = (*"bcdfghjklmnprstvwyz", "bl", "br", "ch", "cl", "dr", "gr", "pl", "qu", "sh", "sp", "st", "str", "th")
_VOWELS: Final = (*"aeiou", "ea", "ou", "ai", "io")
_TAILS: Final = (*"nrlstmdy", "ng", "nt", "st", "ck", "tion", "ing", "er", "ed", "ly", "")
_SCRIPTS: Final = ((0xC0, 0x250), (0x370, 0x500), (0x5D0, 0x700), (0x900, 0xA00), (0x4E00, 0x9FA6), (0xAC00, 0xD7A4))
_OTHER_SCRIPTS_PART: Final = 0.15


def write_tokenizer(folder: Path, size: int) -> None:
    """Writes a tokenizer of `size` tokens, the last one the end of a text; the same ones for the same size."""
    special = min(_SPECIAL, size // 8)
    vocabulary = {_spelled(piece): token for token, piece in enumerate(_pieces(size - special))}
    names = [*(f"<|reserved_{number}|>" for number in range(special - 1)), "<|end_of_text|>"]
    added = [
        {"id": token, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for token, name in enumerate(names, size - special)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document))


def _pieces(count: int) -> list[bytes]:
    pick = random.Random(0)
    pieces = dict.fromkeys(bytes([byte]) for byte in _LETTERS)
    common = [str(number).zfill(width) for width in (1, 2, 3) for number in range(10**width)]
    common += [first + last for first in _PUNCTUATION for last in ("", *_PUNCTUATION)]
    common += [f" {mark}" for mark in _PUNCTUATION] + [blank * length for blank in " \n\t" for length in range(2, 17)]
    pieces |= dict.fromkeys(piece.encode() for piece in common)
    while len(pieces) < count:
        pieces[_word(pick).encode()] = None
    return list(pieces)[:count]


def _word(pick: random.Random) -> str:
    if pick.random() < _OTHER_SCRIPTS_PART:
        return "".join(chr(pick.randrange(*pick.choice(_SCRIPTS))) for _ in range(pick.randint(1, 3)))
    parts = (pick.choice(sounds) for _ in range(pick.randint(1, 3)) for sounds in (_HEADS, _VOWELS, _TAILS))
    word = "".join(parts)
    return pick.choice(["", " ", " "]) + pick.choice([word, word, word, word.capitalize(), word.upper()])


def _spelled(piece: bytes) -> str:
    """As byte-level tokenizers write bytes."""
    return "".join(_LETTERS[byte] for byte in piece)


_PRINTED: Final = [*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN: Final = [byte for byte in range(256) if byte not in _PRINTED]
_LETTERS: Final = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + n) for n, byte in enumerate(_HIDDEN)}
