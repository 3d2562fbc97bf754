"""Server-sent events as bytes: one `data:` line each, padding that hides token lengths, and comments.

It does not know sockets, nor what the events mean.
"""

import os
from collections.abc import Iterator
from typing import Final

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_ALPHABET: Final = b"abcdefghijklmnopqrstuvwxyz0123456789"
PADDINGS: Final = [(_ALPHABET * 2)[:length] for length in range(8, 72)]


def event(body: bytes) -> bytes:
    """Renders one event. `body` is JSON without line breaks."""
    return b"data: " + body + b"\n\n"


def named_event(name: str, body: bytes) -> bytes:
    """Renders one event with a line that names its kind."""
    return b"event: " + name.encode() + b"\n" + event(body)


def paddings() -> Iterator[bytes]:
    """Yields paddings of random length (8–71 bytes) for ever, from the system's randomness, drawn 4,096 at a time."""
    while True:
        for byte in os.urandom(4096):
            yield PADDINGS[byte & 63]
