"""Lines on stderr. A line that cannot be written is lost: logging ends nobody. It knows neither levels nor files."""

import contextlib
import json
import os
import time
from typing import Final

_STDERR: Final = 2


def log(event: str, **fields: object) -> None:
    """One line of JSON. Fields are counts, names and reasons, never tokens or text."""
    write(json.dumps({"time": round(time.time(), 3), "event": event, **fields}))


def write(line: str) -> None:
    """One line as it is, in one piece. A full disk or a reader that left loses it."""
    with contextlib.suppress(OSError):
        os.write(_STDERR, line.encode("utf-8", "replace") + b"\n")
