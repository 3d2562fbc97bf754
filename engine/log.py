"""The log of every process: one event a line on stderr, as JSON, or as text where a person reads. A line that cannot be
written is lost: logging ends nobody. It knows no files."""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Final

LOG_FORMAT_VARIABLE: Final = "HEARTH_LOG_FORMAT"  # how [log] format and level reach the engine's processes
LOG_LEVEL_VARIABLE: Final = "HEARTH_LOG_LEVEL"
LOG_RANK_VARIABLE: Final = "HEARTH_LOG_RANK"  # in a follower of a model of several ranks: each of its events has it
LEVELS: Final = ("debug", "info", "warning", "error")  # what is at least as grave as the level is written
_STDERR: Final = 2
_SHOWN_APART: Final = ("time", "level", "event", "traceback")


def log(event: str, level: str = "info", **fields: object) -> None:
    """Writes one event. Fields are counts, names and reasons, never tokens or text."""
    if _reaches_level(level):
        rank = os.environ.get(LOG_RANK_VARIABLE)
        own = {} if rank is None else {"rank": int(rank)}
        write(render({"time": round(time.time(), 3), "level": level, "event": event, **own, **fields}, as_text()))


def log_uncaught() -> None:
    """Has the error that ends this process written as one event."""

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        log("process_failed", level="error", error=repr(error), traceback=text)

    sys.excepthook = uncaught


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


def relayed_line(line: str, process: str, text: bool) -> str:
    """A line that another process wrote, as this one writes its own. Its process is named: as a field of the event, or
    before the text. What is no event, such as a library's warning, becomes one."""
    event = _event_of(line)
    if text and event is not None:
        return f"[{event.pop('process', process)}] {render(event, text=True)}"
    if text:
        return f"[{process}] {line}"
    if event is None:
        event = {"time": round(time.time(), 3), "level": "info", "event": "output", "text": line}
    return render({**event, "process": event.get("process", process)}, text=False)


def is_wanted(line: str) -> bool:
    """Whether a line that another process wrote is grave enough here; what is no event always is."""
    event = _event_of(line)
    return event is None or _reaches_level(str(event.get("level", "info")))


def _reaches_level(level: str) -> bool:
    least = os.environ.get(LOG_LEVEL_VARIABLE, "info")
    return level not in LEVELS or least not in LEVELS or LEVELS.index(level) >= LEVELS.index(least)


def _event_of(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _show(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if not text.isprintable():  # control characters could write lines of their own, or to the terminal
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in ' "=' for c in text) else text
