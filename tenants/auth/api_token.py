"""The text of an ApiToken, in base62: `hearth_`, key id (11), `_`, 256 random bits (43), CRC-32 of all before (6)."""

import hashlib
import re
import zlib
from collections.abc import Callable
from typing import Final

from tenants.auth.errors import MalformedToken

DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
ID_LENGTH: Final = 11
CELL_CODE_LENGTH: Final = 2
TOKEN_ID: Final = re.compile(r"[0-9A-Za-z]{11}")
_TEXT: Final = re.compile(r"hearth_([0-9A-Za-z]{11})_[0-9A-Za-z]{43}([0-9A-Za-z]{6})")


def parse_token(text: str) -> str:
    """The key id of an ApiToken's text. Raises MalformedToken for anything that was not printed by `mint`."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise MalformedToken("an ApiToken looks like hearth_<id>_<secret>; copy all of it")
    if match[2] != checksum(text[: match.start(2)]):
        raise MalformedToken("this ApiToken has a typing error: its checksum is wrong; copy it again")
    return match[1]


def holds_token(text: str) -> bool:
    return _TEXT.search(text) is not None


def cell_code(cell: str) -> str:
    """What ids of tokens begin with that a cell mints, so that others know where to ask; "" where there is no cell."""
    if not cell:
        return ""
    digest = hashlib.sha256(f"hearth cell {cell}".encode()).digest()
    return base62(int.from_bytes(digest, "big") % 62**CELL_CODE_LENGTH, CELL_CODE_LENGTH)


def token_text(key_id: str, entropy: Callable[[int], bytes]) -> str:
    """A new text with a new secret of `entropy`."""
    secret = base62(int.from_bytes(entropy(32), "big"), 43)
    text = f"hearth_{key_id}_{secret}"
    return text + checksum(text)


def checksum(text: str) -> str:
    return base62(zlib.crc32(text.encode()), 6)


def base62(number: int, length: int) -> str:
    """The number in exactly `length` digits."""
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(DIGITS[digit])
    assert number == 0, f"needs more than {length} digits"
    return "".join(reversed(digits))
