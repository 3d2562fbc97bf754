"""SHA256SUMS of a folder whose weights are replaced: parsed, and written with other sums. It computes no sums.

The gateway checks folders against such a file (`hearth models add`), and so does `sha256sum --check`.
"""

import re
from collections.abc import Mapping
from typing import Final

SUMS_NAME: Final = "SHA256SUMS"
ORIGINAL_SUMS_NAME: Final = "SHA256SUMS.original"  # as it was before the weights were compressed
_LINE: Final = re.compile(r"^(\\?)([0-9A-Fa-f]{64})( [ *])(.+)$", re.MULTILINE)


def parse_sums(text: str) -> dict[str, str]:
    """Names → sums in lower case. Lines that sha256sum did not write are ignored."""
    return {_name(match): match[2].lower() for match in _LINE.finditer(text)}


def replace_sums(text: str, sums: Mapping[str, str]) -> str:
    """The same lines, with these sums for these names."""
    return _LINE.sub(lambda match: f"{match[1]}{sums.get(_name(match), match[2])}{match[3]}{match[4]}", text)


def encode_sums(text: str) -> bytes:
    """The bytes that were read as `text`: names may have bytes that are no UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _name(match: re.Match[str]) -> str:
    name = match[4]
    if match[1]:
        name = re.sub(r"\\(.)", lambda escaped: "\n" if escaped[1] == "n" else escaped[1], name)
    return name.removeprefix("./")
