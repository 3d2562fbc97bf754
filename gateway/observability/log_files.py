"""Where `hearth serve` keeps the lines of its children, and how they are read again. It writes none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from engine.process.rotated_file import RotatedFile, log_files
from gateway.settings.config import Config

LOG_NAMES: Final = ("gateway", "machine")


def log_file(config: Config, name: str) -> RotatedFile:
    """The file for the lines of one of LOG_NAMES: [log] file, or one of its own in the state folder."""
    return RotatedFile(log_path(config, name), config.log.file_bytes, config.log.files)


def log_path(config: Config, name: str) -> Path:
    return Path(config.log.file) if config.log.file else config.state / f"{name}.log"


def logged_events(config: Config, text: str) -> Iterator[dict[str, Any]]:
    """The events, the oldest first of each file, in whose lines this text is."""
    needle = text.encode()
    for path in dict.fromkeys(log_path(config, name) for name in LOG_NAMES):
        for each in log_files(path, config.log.files):
            with each.open("rb") as lines:
                for line in lines:
                    if needle in line and (event := _event(line)) is not None:
                        yield event


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
