"""`hearth top` as a process of its own: in a terminal, in a pipe, with the token that it makes for itself."""

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.cli import main
from gateway.settings.config import load_config
from gateway.state_dir import server_secret
from tenants.audit import AuditLog
from tenants.auth.accounts import AccountService
from tenants.auth.errors import Unauthenticated
from tenants.open import open_store
from tenants.records.grants import Permission
from tests.gateway.commands.terminal.test_top_view import MACHINE

_CODES = re.compile(r"\x1b\[[0-9;]*m")  # of colours
DOCUMENT = {"machines": [msgspec.to_builtins(MACHINE)]}


class Operators(BaseHTTPRequestHandler):
    """A gateway as operators see it: it believes whatever token the test says."""

    def do_GET(self) -> None:
        seen = self.server.seen  # type: ignore[attr-defined]
        if "/operator/top" in self.path:  # of an older version, it has no such path
            return self.send_error(404)
        seen.append((self.path, self.headers["Authorization"].removeprefix("Bearer ")))
        status, body = self.server.answer(seen[-1][1])  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def answering(status: int = 200, document: Any = None, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", port), Operators)
    body = json.dumps({"success": True, "result": DOCUMENT if document is None else document}).encode()
    server.seen = []  # type: ignore[attr-defined]
    server.answer = lambda token: (status, body)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Terminal:
    """A process in a terminal of its own, 100 columns wide."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self._screen, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 100))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        command = [sys.executable, "-m", "gateway.cli", "top", *words]
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # its keys become its signals
            env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.getcwd(), **environment},
        )  # fmt: skip
        self.text = ""

    def until(self, said: str, within_s: float = 60.0) -> None:
        """Reads on until it is on the screen anew."""
        self.text, until = "", time.monotonic() + within_s
        while said not in self.text and said not in _CODES.sub("", self.text):
            assert time.monotonic() < until, f"{said!r} is not in {self.text[-3000:]!r}"
            if select.select([self._screen], [], [], 0.1)[0]:
                self.text += os.read(self._screen, 1 << 16).decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def ended(self) -> int:
        """Its status, once it has ended and left the terminal as it was."""
        self.until("\x1b[?1049l")
        assert self.process.wait(10) >= 0
        assert termios.tcgetattr(self._theirs) == self.before
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)
        os.close(self._theirs)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEARTH_TOKEN", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return tmp_path


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def top(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(["top", *words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


@pytest.mark.parametrize(
    ("ending", "status"),
    [("q", 0), ("\x03", 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["q", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_a_terminal_shows_it_live_and_is_as_before_when_it_ends(
    tmp_path: Path, ending: str | signal.Signals, status: int
) -> None:
    with answering() as server:
        terminal = Terminal(tmp_path, "--url", url(server), "--interval", "0.2", HEARTH_TOKEN="given")
        try:
            terminal.until("memory → device")
            terminal.type("x")
            terminal.until("moves in the last")
        except BaseException:
            terminal.close()
            raise
    try:
        terminal.until("does not answer")
        terminal.until("so far")
        with answering(port=server.server_address[1]):
            terminal.until("moves in the last")
            if isinstance(ending, str):
                terminal.type(ending)
            else:
                terminal.process.send_signal(ending)
            assert terminal.ended() == status
        assert "Traceback" not in terminal.text
    finally:
        terminal.close()


def test_in_a_pipe_one_picture_is_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with answering() as server:
        for words in (["--once"], []):
            told = top(capsys, "--url", url(server), "--token", "given", *words)
            assert "@cf/acme/moving" in told
            assert "\x1b" not in told
        assert json.loads(top(capsys, "--url", url(server) + "/", "--token", "given", "--json")) == DOCUMENT
        assert server.seen == [("/client/v4/operator/machines", "given")] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("status", "document", "said"),
    [
        (401, {}, "the token must be a live one with the permission operator"),
        (404, {}, "the token must be a live one with the permission operator"),
        (503, {}, "answers 503"),
        (200, {"machines": 5}, "of another version"),
    ],
)
def test_an_answer_that_is_none_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], status: int, document: Any, said: str
) -> None:
    with answering(status, document) as server:
        assert said in top(capsys, "--once", "--url", url(server), "--token", "given", status=1)


def test_what_cannot_be_asked_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no gateway's state folder" in top(capsys, status=1)
    assert not (here / ".hearth").exists()
    for wrong in ("hearth.example.com", "http://[::1", "http://127.0.0.1:x", "ftp://127.0.0.1"):
        assert "is no address" in top(capsys, "--url", wrong, "--token", "given", status=1)
        assert "is no address" in top(capsys, "--url", wrong, status=1)
    with answering() as server:
        pass
    assert "does not answer" in top(capsys, "--once", "--url", url(server), "--token", "given", status=1)
    server_secret(load_config())
    assert "there is no store at" in top(capsys, status=1)


def test_the_token_is_sent_whatever_the_address_or_the_token_has_in_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering() as server:
        address = url(server).replace("//", "//ann:secret@")
        assert "@cf/acme/moving" in top(capsys, "--once", "--url", address, "--token", "given")
        assert "@cf/acme/moving" in top(capsys, "--once", "--url", url(server), "--token", "gíven")
    (_, first), (_, second) = server.seen  # type: ignore[attr-defined]
    assert (first, second.encode("latin-1").decode()) == ("given", "gíven")


# ---- the token that it makes -----------------------------------------------------------------------------------------


def asked(question: Any) -> Any:
    async def ask() -> Any:
        store = open_store(load_config().store_url)
        try:
            return await question(store)
        finally:
            await store.close()

    return asyncio.run(ask())


def settled_at(server: ThreadingHTTPServer) -> None:
    """This folder's configuration has its gateway there."""
    Path("hearth.toml").write_text(f"[server]\nport = {server.server_address[1]}\n")


@pytest.mark.parametrize("token", ["", None])
def test_no_token_is_made_for_anything_but_the_gateway_of_this_configuration(
    here: Path, capsys: pytest.CaptureFixture[str], token: str | None
) -> None:
    assert main(["accounts", "create", "first"]) == 0
    given = [] if token is None else ["--token", token]
    with answering() as own, answering() as other:
        settled_at(own)
        port = own.server_address[1]
        for stranger in (url(other), f"http://127.0.0.2:{port}", "https://hearth.example.com", "http://127.0.0.1"):
            said = top(capsys, "--once", "--url", stranger, *given, status=1)
            assert f"{stranger} is not this configuration's own gateway" in said
            assert "HEARTH_TOKEN" in said
        assert not own.seen + other.seen  # type: ignore[attr-defined]
        for itself in (url(own), url(own) + "/", f"http://localhost:{port}"):
            assert "@cf/acme/moving" in top(capsys, "--once", "--url", itself, *given)
        assert len(own.seen) == 3  # type: ignore[attr-defined]


def test_a_token_is_made_for_the_while_noted_and_never_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = []
    for name in ("first", "second"):
        assert main(["accounts", "create", name, "--json"]) == 0
        ids.append(json.loads(capsys.readouterr().out)["account_id"])
    assert main(["accounts", "suspend", ids[0]]) == 0
    secret, granted = server_secret(load_config()), []

    def answer(token: str) -> tuple[int, bytes]:
        caller = asked(lambda store: AccountService(store, secret).verify(token))
        granted.append((caller.account.id, caller.grant.permissions))
        return 200, json.dumps({"result": DOCUMENT}).encode()

    with answering() as server:
        settled_at(server)
        server.answer = answer  # type: ignore[attr-defined]
        told = top(capsys, "--url", url(server), "--json")
        ((_, token),) = server.seen  # type: ignore[attr-defined]
    assert granted == [(ids[1], (Permission.OPERATOR,))], "the first one that is not suspended"
    assert token not in told
    with pytest.raises(Unauthenticated, match="revoked"):
        asked(lambda store: AccountService(store, secret).verify(token))

    async def actions(store: Any) -> list[str]:
        return [entry.action async for entry in AuditLog(store.audit, secret).entries(ids[1])]

    assert asked(actions)[-2:] == ["token.create", "token.revoke"]
