"""`hearth chat` against a gateway over a real socket, from standard input and in a terminal."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.settings.config import load_config
from gateway.state_dir import Credentials, open_state, write_credentials
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import WITHIN_S, wait_for

COMMAND = [sys.executable, "-m", "gateway.cli", "chat"]


def home(folder: Path, url: str, account_id: str = "a", token: str = "t") -> Path:
    """A folder whose state has these credentials of a first start."""
    folder.mkdir()
    config = load_config(state_folder=folder / ".hearth")
    open_state(config)
    write_credentials(config, Credentials(url, account_id, token))
    return folder


def home_of(gateway: Served, folder: Path) -> Path:
    return home(folder, gateway.base_url, gateway.account_id, gateway.token)


async def asked(folder: Path, text: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """`hearth chat` in this folder with the text on its standard input."""
    return await asyncio.to_thread(
        subprocess.run, [*COMMAND, *words], cwd=folder, input=text, capture_output=True, text=True, timeout=WITHIN_S
    )


@looped
async def test_a_question_on_standard_input_is_answered_once_and_what_is_wrong_is_said(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        folder = home_of(gateway, tmp_path / "home")
        done = await asked(folder, "What is a hearth?", "stub", "--system", "Be brief.")
        assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr
        assert "prompt tokens (0 cached)" in done.stderr
        assert "neurons" in done.stderr
        for words, text, said in (
            (["stup"], "Hello", f"did you mean {MODEL}?"),
            (["stub"], "  \n", "standard input is empty"),
            (["stub", "--token", "wrong"], "Hello", "uthenti"),
            (["stub", "--url", "http://192.0.2.1:80"], "Hello", "give a token"),
        ):
            refused = await asked(folder, text, *words)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert said in refused.stderr


def test_without_a_server_it_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["chat"]) == 1
    assert "no credentials of a first start" in capsys.readouterr().err
    monkeypatch.chdir(home(tmp_path / "home", "http://127.0.0.1:9"))
    assert main(["chat"]) == 1
    assert "`hearth serve` starts one" in capsys.readouterr().err


class Terminal:
    """`hearth chat` in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self._mine, theirs = pty.openpty()
        self._chat = subprocess.Popen(
            [*COMMAND, "stub"], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # for Ctrl-C
        )  # fmt: skip
        os.close(theirs)
        self._shown = b""

    def say(self, line: bytes, until: bytes) -> None:
        """Types a line and reads until this is shown."""
        before = len(self._shown)
        os.write(self._mine, line)
        while until not in self._shown[before:]:
            assert select.select([self._mine], [], [], WITHIN_S)[0], self._shown
            self._shown += os.read(self._mine, 4096)

    def read(self, count: int) -> None:
        """Reads until so many more bytes are shown."""
        wanted = len(self._shown) + count
        while len(self._shown) < wanted:
            assert select.select([self._mine], [], [], WITHIN_S)[0], self._shown
            self._shown += os.read(self._mine, 4096)

    def end(self) -> int:
        """Presses Ctrl-D, and again where the prompt was not there yet to take it."""
        try:
            for _ in range(round(WITHIN_S)):
                os.write(self._mine, b"\x04")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self._chat.wait(1)
            raise AssertionError("Ctrl-D does not end it")
        finally:
            self._chat.kill()
            self._chat.wait()
            os.close(self._mine)


def interrupt(folder: Path, gateway: Served) -> None:
    """Presses Ctrl-C in the middle of an answer, and before one has begun."""
    terminal = Terminal(folder)
    try:
        gateway.behaviour.step_s = 0.05
        terminal.say(b"", b"Ctrl-D ends")
        terminal.say(b"Hello\r", b"Hello\r\n")
        terminal.read(20)
        terminal.say(b"\x03", b"(stopped)\r\n[")
        terminal.say(b"/save first.json\r", b"saved to first.json")
        gateway.behaviour.first_s = 60
        terminal.say(b"And more\r", b"And more\r\n")
        wait_for(lambda: len(gateway.fleet.submits) == 2)
        terminal.say(b"\x03", b"stopped: nothing more is computed")
        terminal.say(b"/save second.json\r", b"saved to second.json")
    finally:
        status = terminal.end()
    assert status == 0


@looped
async def test_ctrl_c_stops_an_answer_keeps_what_came_of_it_and_charges_that_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        folder = home_of(gateway, tmp_path / "home")
        await asyncio.to_thread(interrupt, folder, gateway)
        await gateway.settled()
        records = await gateway.records()
    first, second = (json.loads((folder / f"{name}.json").read_text())["messages"] for name in ("first", "second"))
    assert [message["role"] for message in first] == ["user", "assistant"]
    assert second == first, "a question without an answer is not kept"
    assert sorted(record.completion_tokens for record in records)[0] == 0


def converse(folder: Path) -> None:
    terminal = Terminal(folder)
    try:
        for line, until in (
            (b"", b"Ctrl-D ends"),
            (b"/system Be brief.\r", b"brief.\r\n"),
            (b"Hello\r", b"of answer"),
            (b"And more\r", b"of answer"),
            (b"/model\r", MODEL.encode()),
            (b"/model nope\r", b"There is no model 'nope'"),
            (b"/nothing\r", b"there is no /nothing"),
            (b"/save talk.json\r", b"saved to talk.json"),
            (b"/save talk.json\r", b"is there already"),
        ):
            terminal.say(line, until)
    finally:
        status = terminal.end()
    assert status == 0


@looped
async def test_a_conversation_keeps_what_was_said_obeys_commands_and_ends_with_ctrl_d(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        folder = home_of(gateway, tmp_path / "home")
        await asyncio.to_thread(converse, folder)
    talk = json.loads((folder / "talk.json").read_text())
    assert talk["model"] == "stub", "a name that nothing has changes no conversation"
    saved = talk["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert (saved[0]["content"], saved[3]["content"]) == ("Be brief.", "And more")
