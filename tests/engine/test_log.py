import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from engine.log import LOG_FORMAT_VARIABLE, convert_line, render

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


def test_lines_of_other_processes_take_this_ones_format(monkeypatch: pytest.MonkeyPatch) -> None:
    event, plain = '{"time": 1.0, "event": "moved", "bytes": 7, "why": ""}', "Traceback (most recent call last):"
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "json")
    assert [convert_line(line) for line in (event, plain)] == [event, plain]
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "text")
    assert convert_line(event)[8:] == ' moved bytes=7 why=""'
    assert [convert_line(line) for line in (plain, "{7", "{}", "[1]")] == [plain, "{7", "{}", "[1]"]


@pytest.mark.parametrize("character", ["\r", "\x1b", "\x7f", "\x9b", "\u2028", "\udcff"])
def test_a_field_as_text_holds_no_control_characters(character: str) -> None:
    line = render({"event": "one", "why": f"a{character}b"}, text=True)
    assert line.isprintable()
    assert json.loads(line.partition("why=")[2]) == f"a{character}b"
