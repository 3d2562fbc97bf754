import io
import json
import logging

import pytest

from gateway.observability.logging import configure_logging


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


def test_an_event_is_one_json_line_with_its_fields(written: io.StringIO) -> None:
    root = logging.getLogger("a test's root")
    configure_logging(written, root)
    root.info("request_ended", extra={"fields": {"model": "@cf/a/b", "total_ms": 1.5}})
    line = json.loads(written.getvalue())
    assert line.pop("time") > 1.7e9
    assert line == {"level": "info", "event": "request_ended", "model": "@cf/a/b", "total_ms": 1.5}


def test_an_exception_is_in_its_line(written: io.StringIO) -> None:
    root = logging.getLogger("another root")
    configure_logging(written, root)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        root.exception("request %s failed", 7)
    (line,) = written.getvalue().splitlines()
    assert json.loads(line)["event"] == "request 7 failed"
    assert "ValueError: two" in json.loads(line)["traceback"]
