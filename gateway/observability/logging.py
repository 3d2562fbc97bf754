"""The gateway's log: one event a line, in the shape of the machine's side. It does not know what happens.

    log.info("request_ended", extra={"fields": {"model": …, "total_ms": …}})

Never a prompt or a completion: whoever logs gives ids, numbers and words of the code's own.
"""

import logging
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TextIO

from engine.log import as_text, render
from engine.process.rotated_file import RotatedFile
from gateway.settings.telemetry import LogConfig

# Set by a parent that writes this process's lines itself, also those into [log] file.
LOG_RELAYED_VARIABLE: Final = "HEARTH_LOG_RELAYED"


class EventFormatter(logging.Formatter):
    """A record as a line of JSON or of text: time, level, event, its `fields`, and a traceback where there is one."""

    def __init__(self, text: bool = False) -> None:
        super().__init__()
        self._text = text

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return render(event, self._text)


class RotatedFileHandler(logging.Handler):
    """Writes events as JSON into [log] file."""

    def __init__(self, file: RotatedFile) -> None:
        super().__init__()
        self._file = file
        self.setFormatter(EventFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(self.format(record).encode("utf-8", "replace"))


def configure_logging(to: TextIO, log_config: LogConfig, root: logging.Logger | None = None) -> None:
    """Writes every event of this process there from now on, and into the file of [log]: also what Python warns of, and
    what ends the process. What httptools finds wrong with a client's bytes is the client's business: uvicorn's warnings
    about it are left out."""
    lines = logging.StreamHandler(to)
    lines.setFormatter(EventFormatter(as_text(log_config.format)))
    root = root or logging.getLogger()
    root.handlers = [lines]
    if log_config.file and LOG_RELAYED_VARIABLE not in os.environ:
        file = RotatedFile(Path(log_config.file), log_config.file_bytes, log_config.files)
        root.handlers.append(RotatedFileHandler(file))
    root.setLevel(log_config.level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.captureWarnings(True)
    sys.excepthook = _log_exception


def _log_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        logging.getLogger(__name__).error("process_failed", exc_info=(kind, error, traceback))
