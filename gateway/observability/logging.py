"""The gateway's log: one JSON line an event, in the shape of the machine's side. It does not know what happens.

    log.info("request_ended", extra={"fields": {"model": …, "total_ms": …}})

Never a prompt or a completion: whoever logs gives ids, numbers and words of ours.
"""

import json
import logging
from typing import Any, TextIO


class JsonLineFormatter(logging.Formatter):
    """A record as a JSON line: time, level, event, its `fields`, and a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(to: TextIO, root: logging.Logger | None = None) -> None:
    """From now on every event of this process is a line there. What httptools finds wrong with a client's bytes is
    the client's business: uvicorn's warnings about it are left out."""
    lines = logging.StreamHandler(to)
    lines.setFormatter(JsonLineFormatter())
    root = root or logging.getLogger()
    root.handlers = [lines]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
