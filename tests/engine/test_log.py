import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from engine.log import LOG_FORMAT_VARIABLE, LOG_LEVEL_VARIABLE, is_wanted, log, relayed_line, render

WRITES_TWO_EVENTS = "from engine.log import log; log('one', text='a\\nb', where='\\udcff'); log('two'); print('alive')"


def test_an_event_is_one_line_of_json() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES_TWO_EVENTS], capture_output=True, text=True, check=True)
    one, two = [json.loads(line) for line in done.stderr.splitlines()]
    assert (one["event"], one["text"], two["event"]) == ("one", "a\nb", "two")
    assert one["time"] > 0


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2> >(exit)"], ids=["full", "closed", "left"])
def test_a_line_that_cannot_be_written_is_lost(redirection: str) -> None:
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("only Linux has a disk that is always full")
    command = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, WRITES_TWO_EVENTS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n")


@pytest.mark.parametrize(("variable", "text"), [("text", True), ("auto", False), ("json", False)])
def test_the_environment_chooses_the_format(variable: str, text: bool) -> None:
    environment = {**os.environ, LOG_FORMAT_VARIABLE: variable}
    done = subprocess.run([sys.executable, "-c", WRITES_TWO_EVENTS], capture_output=True, text=True, env=environment)
    one = done.stderr.splitlines()[0]
    assert one.startswith("{") is not text
    assert not text or one[8:].startswith(' one text="a\\nb" where=')


def test_a_terminal_gets_text_by_itself() -> None:
    owner, terminal = pty.openpty()
    subprocess.run([sys.executable, "-c", WRITES_TWO_EVENTS], stdout=subprocess.DEVNULL, stderr=terminal, check=True)
    os.close(terminal)
    written = os.read(owner, 4096).decode().splitlines()
    os.close(owner)
    assert written[1][8:] == " two"


def test_lines_of_other_processes_take_this_ones_format_and_name_their_process() -> None:
    event = '{"time": 1.0, "event": "moved", "bytes": 7, "why": ""}'
    assert json.loads(relayed_line(event, "a", False)) == {**json.loads(event), "process": "a"}
    assert json.loads(relayed_line(relayed_line(event, "a", False), "machine", False))["process"] == "a"
    assert relayed_line(relayed_line(event, "a", False), "machine", True).startswith("[a] ")
    text = relayed_line(event, "a", True)
    assert (text[:4], text[12:]) == ("[a] ", ' moved bytes=7 why=""')
    for plain in ("Traceback (most recent call last):", "{7", "{}", "[1]", "\x1b[1m"):
        assert relayed_line(plain, "a", True) == f"[a] {plain}"
        told = json.loads(relayed_line(plain, "a", False))
        assert told.pop("time") > 1.7e9
        assert told == {"level": "info", "event": "output", "text": plain, "process": "a"}


def test_the_environment_chooses_the_level(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "warning")
    log("one")
    log("two", level="error", count=2)
    (line,) = capfd.readouterr().err.splitlines()
    assert (json.loads(line)["event"], json.loads(line)["level"]) == ("two", "error")
    assert [is_wanted(each) for each in (line, '{"event": "one"}', "plain")] == [True, False, True]


@pytest.mark.parametrize("character", ["\r", "\x1b", "\x7f", "\x9b", "\u2028", "\udcff"])
def test_a_field_as_text_holds_no_control_characters(character: str) -> None:
    line = render({"event": "one", "why": f"a{character}b"}, text=True)
    assert line.isprintable()
    assert json.loads(line.partition("why=")[2]) == f"a{character}b"


def test_events_of_a_rank_name_it(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_LOG_FORMAT", "json")
    monkeypatch.setenv("HEARTH_LOG_RANK", "3")
    log("loaded", bytes=5)
    assert json.loads(capfd.readouterr().err)["rank"] == 3


def test_the_error_that_ends_a_process_is_one_event() -> None:
    script = "from engine.log import log_uncaught; log_uncaught(); {}['not foreseen']"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    event = json.loads(line)
    assert (done.returncode, event["event"], event["level"]) == (1, "process_failed", "error")
    assert event["error"] == "KeyError('not foreseen')"
    assert event["traceback"].startswith("Traceback (most recent call last):")
