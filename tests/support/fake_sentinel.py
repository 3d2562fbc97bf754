"""A Sentinel that says what a test has it say, also over TLS, behind a user and a password. It watches nobody."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeSentinel:
    """`name` None knows no primary; `silent` takes connections and answers nothing."""

    primary_port: int
    name: str | None = "main"
    epoch: int = 1
    login: tuple[str, str] | None = None
    silent: bool = False
    port: int = 0
    logins: list[tuple[str, str]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def listening(self, context: ssl.SSLContext | None = None) -> "AsyncIterator[FakeSentinel]":
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                command = await _command(reader)
                if not self.silent:
                    writer.write(self._answer(command))
        writer.close()

    def _answer(self, command: list[str]) -> bytes:
        if command[0] == "AUTH":
            user, password = command[1:] if len(command) == 3 else ("default", command[1])
            self.logins.append((user, password))
            return b"+OK\r\n" if self.login in (None, (user, password)) else b"-WRONGPASS invalid username-password\r\n"
        if command[0] != "SENTINEL":
            return b"+OK\r\n"
        if self.login is not None and self.login not in self.logins:
            return b"-NOAUTH Authentication required.\r\n"
        if command[1] == "GET-MASTER-ADDR-BY-NAME":
            return _array(["127.0.0.1", self.primary_port]) if command[2] == self.name else b"*-1\r\n"
        if command[2] != self.name:
            return b"-ERR No such master with that name\r\n"
        fields: dict[str, Any] = {
            "name": self.name,
            "ip": "127.0.0.1",
            "port": self.primary_port,
            "config-epoch": self.epoch,
            "num-slaves": 0,
            "num-other-sentinels": 2,
            "quorum": 2,
            "down-after-milliseconds": 3000,
        }
        return _array([part for pair in fields.items() for part in pair])


def _array(parts: list[Any]) -> bytes:
    texts = [str(part).encode() for part in parts]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts)


async def _command(reader: asyncio.StreamReader) -> list[str]:
    """The next command, as clients send them: an array of strings."""
    count = int((await reader.readuntil(b"\r\n"))[1:])
    words = []
    for _ in range(count):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(size + 2))[:-2].decode())
    return words
