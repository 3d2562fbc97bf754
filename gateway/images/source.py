"""An image as a request brings it: bytes, out of a data: URI or base64, before anybody has looked into them.

It fetches nothing, and knows no formats beyond their media types.
"""

import base64
import binascii
import re
from typing import Final

import msgspec

from gateway.errors import ApiError, bad_input

IMAGES_MAX: Final = 16  # of one request
MEDIA_TYPES: Final = ("image/png", "image/jpeg", "image/webp", "image/gif")
_ALIASES: Final = {"image/jpg": "image/jpeg"}
_DATA_URI: Final = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.IGNORECASE)


class ImageSource(msgspec.Struct, frozen=True):
    """One image: `media_type` is what the request says that it is, if it does; `field` where it stood."""

    content: bytes
    media_type: str | None
    field: str


def from_data_uri(uri: str, field: str) -> ImageSource:
    """Raises ApiError for anything but base64 of a media type that is decoded here."""
    match = _DATA_URI.match(uri)
    if match is None:
        advice = "no address is fetched here; send the image itself as 'data:image/png;base64,…'"
        raise bad_input(f"'{field}' is no data: URI; {advice}", field)
    if "base64" not in match[2].lower().split(";"):
        raise bad_input(f"'{field}': the data: URI is not in base64; send 'data:image/png;base64,…'", field)
    return from_base64(uri[match.end() :], match[1].lower().strip(), field)


def from_base64(text: str, media_type: str | None, field: str) -> ImageSource:
    """Raises ApiError."""
    named = None if media_type is None else _ALIASES.get(media_type, media_type)
    if named is not None and named not in MEDIA_TYPES:
        raise _refused_type(named, field)
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise bad_input(f"'{field}' is not valid base64; encode the file's bytes as they are", field) from None
    return from_bytes(content, named, field)


def from_bytes(content: bytes, media_type: str | None, field: str) -> ImageSource:
    """Raises ApiError for no bytes."""
    if not content:
        raise bad_input(f"'{field}' is empty; send an image", field)
    return ImageSource(content, media_type, field)


def check_count(fields: list[str]) -> None:
    """Raises ApiError for images in more than IMAGES_MAX fields."""
    if len(fields) > IMAGES_MAX:
        field = fields[IMAGES_MAX]
        raise bad_input(f"'{field}' is image {IMAGES_MAX + 1} of {len(fields)}; at most {IMAGES_MAX} are taken", field)


def _refused_type(named: str, field: str) -> ApiError:
    what = "SVG is a document, which is not drawn here" if "svg" in named else f"{named[:40]!r} is not decoded here"
    return bad_input(f"'{field}': {what}; send {', '.join(MEDIA_TYPES)}", field)
