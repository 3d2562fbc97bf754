"""The gateway's log: one event a line, in the shape of the machine's side. It does not know what happens.

    log.info("request_ended", extra={"fields": {"model": …, "total_ms": …}})

Never a prompt or a completion: whoever logs gives ids, numbers and words of the code's own.
"""

import logging
from typing import Any, TextIO

from engine.log import as_text, render


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


def configure_logging(to: TextIO, log_format: str, root: logging.Logger | None = None) -> None:
    """Writes every event of this process there from now on; `log_format` is that of [log]. What httptools finds wrong
    with a client's bytes is the client's business: uvicorn's warnings about it are left out."""
    lines = logging.StreamHandler(to)
    lines.setFormatter(EventFormatter(as_text(log_format)))
    root = root or logging.getLogger()
    root.handlers = [lines]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
