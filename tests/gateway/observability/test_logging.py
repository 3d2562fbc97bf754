import io
import json
import logging
import os

import pytest

from gateway.observability.logging import configure_logging
from gateway.settings.telemetry import LogConfig


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


def test_an_event_is_one_json_line_with_its_fields(written: io.StringIO) -> None:
    root = logging.getLogger("a test's root")
    configure_logging(written, LogConfig(format="json"), root)
    root.info("request_ended", extra={"fields": {"model": "@cf/a/b", "total_ms": 1.5}})
    line = json.loads(written.getvalue())
    assert line.pop("time") > 1.7e9
    assert line == {"level": "info", "event": "request_ended", "model": "@cf/a/b", "total_ms": 1.5}


def test_an_exception_is_in_its_line(written: io.StringIO) -> None:
    root = logging.getLogger("another root")
    configure_logging(written, LogConfig(format="json"), root)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        root.exception("request %s failed", 7)
    (line,) = written.getvalue().splitlines()
    assert json.loads(line)["event"] == "request 7 failed"
    assert "ValueError: two" in json.loads(line)["traceback"]


def test_text_is_for_people(written: io.StringIO) -> None:
    root = logging.getLogger("a third root")
    configure_logging(written, LogConfig(format="text"), root)
    root.info("request_ended", extra={"fields": {"model": "@cf/a/b", "total_ms": 1.5, "why": "two words"}})
    try:
        raise ValueError("wrong")
    except ValueError:
        root.exception("failed")
    first, second, *traceback = written.getvalue().splitlines()
    assert first[8:] == ' request_ended model=@cf/a/b total_ms=1.5 why="two words"'
    assert second[8:] == " ERROR failed"
    assert traceback[-1] == "ValueError: wrong"


def test_what_is_no_terminal_gets_json_by_itself(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (False, True):
        monkeypatch.setattr(os, "isatty", lambda number, terminal=terminal: terminal)
        root = logging.getLogger(f"a root of {terminal}")
        configure_logging(written, LogConfig(format="auto"), root)
        root.info("started")
    first, second = written.getvalue().splitlines()
    assert json.loads(first)["event"] == "started"
    assert second[8:] == " started"
