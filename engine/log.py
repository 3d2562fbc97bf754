"""The log of every process: one event a line on stderr, as JSON, or as text where a person reads. A line that cannot be
written is lost: logging ends nobody. It knows neither levels nor files."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Final

LOG_FORMAT_VARIABLE: Final = "HEARTH_LOG_FORMAT"  # how [log] format reaches the engine's processes
_STDERR: Final = 2
_SHOWN_APART: Final = ("time", "level", "event", "traceback")


def log(event: str, **fields: object) -> None:
    """Writes one event. Fields are counts, names and reasons, never tokens or text."""
    write(render({"time": round(time.time(), 3), "event": event, **fields}, as_text()))


def write(line: str) -> None:
    """Writes one line as it is, in one piece. A full disk or a reader that left loses it."""
    with contextlib.suppress(OSError):
        os.write(_STDERR, line.encode("utf-8", "replace") + b"\n")


def as_text(log_format: str | None = None) -> bool:
    """Whether events are text for people: with the format `text`, and with `auto` where stderr is a terminal. None:
    the format that the environment names, or else `auto`."""
    chosen = log_format or os.environ.get(LOG_FORMAT_VARIABLE, "auto")
    return chosen == "text" or (chosen != "json" and os.isatty(_STDERR))


def render(event: Mapping[str, object], text: bool) -> str:
    """The event as a line of JSON; as `text`, its time of day, its level unless that is info, name and fields."""
    if not text:
        return json.dumps(event)
    seconds = event.get("time", 0.0)
    parts = [time.strftime("%H:%M:%S", time.localtime(seconds if isinstance(seconds, int | float) else 0.0))]
    if event.get("level", "info") != "info":
        parts.append(str(event["level"]).upper())
    parts.append(str(event.get("event", "")))
    parts += [f"{name}={_show(value)}" for name, value in event.items() if name not in _SHOWN_APART]
    return " ".join(parts) + (f"\n{event['traceback']}" if event.get("traceback") else "")


def convert_line(line: str) -> str:
    """A line of another process's log in this process's format: an event of JSON becomes text where this process
    writes text; all else stays."""
    if not line.startswith("{") or not as_text():
        return line
    try:
        event = json.loads(line)
    except ValueError:
        return line
    return render(event, text=True) if isinstance(event, dict) and "event" in event else line


def _show(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if not text.isprintable():  # control characters could write lines of their own, or to the terminal
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in ' "=' for c in text) else text
